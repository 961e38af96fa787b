"""Perturbation of all weights at once: mean_j c_j z_j, c_j the coefficient of probe j."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident.contract import DIRECTIONS, LAYER_NORMAL
from ...kernels.mlp_resident.directions import flat_direction, input_basis
from ...kernels.philox import reference as philox
from .base import EstimatorState, check_choices, ends, shares


@dataclass(frozen=True)
class WeightEstimator:
    """What `Spsa`, `Fzoo`, `LowRank` and `Agzo` share.

    Attributes:
        num_perturbations: P directions a step.
        perturbation_size: e.
        kind: of the directions.
        difference: `central`, (L(+e) - L(-e)) / 2e, or `one_sided`, (L(+e) - L) / e.
        fitness: `plain`, `std`, `ranks` or `normalised`; see `kernels.mlp_resident.fitness`.
        density: share of entries that sparse directions hold.
        rescale: divide sparse estimates by it, which makes them unbiased.
        rank: of low-rank and subspace directions.
        dense: bool like the point: entries that sparse directions always hold, or None.
    """

    num_perturbations: int = 8
    perturbation_size: float = 1e-2
    kind: str = "signs"
    difference: str = "central"
    fitness: str = "plain"
    density: float = 0.5
    rescale: bool = True
    rank: int = 1
    dense: np.ndarray | None = None

    kinds: ClassVar[tuple[str, ...]] = ("signs", "sparse", "gaussian")

    def __post_init__(self) -> None:
        check_choices(self.difference, self.fitness, self.num_perturbations, self.perturbation_size)
        if self.kind not in self.kinds:
            raise UserError(f"kind={self.kind}: {type(self).__name__} takes {', '.join(self.kinds)}")
        if not 0 < self.density <= 1:
            raise UserError(f"density={self.density}: must be above 0 and at most 1")

    def init(self, point: np.ndarray, seed: int, expert: int = 0) -> EstimatorState:
        """State at the weights `point`, of any shape."""
        return EstimatorState(np.asarray(point), seed, expert)

    def directions(self, state: EstimatorState) -> np.ndarray:
        """z of this step: [P, *point.shape]."""
        return np.stack([self.direction(state, j) for j in range(self.num_perturbations)])

    def direction(self, state: EstimatorState, probe: int) -> np.ndarray:
        """z of one probe, of the point's shape."""
        code = DIRECTIONS[self.kind]
        z = flat_direction(code, self.density, state.seed, state.step, state.expert, probe, state.point.size)
        if self.kind == "sparse" and self.dense is not None:
            full = flat_direction(
                DIRECTIONS["signs"], 1.0, state.seed, state.step, state.expert, probe, state.point.size
            )
            z = np.where(self.dense.reshape(-1), full, z)
        return z.reshape(state.point.shape)

    def ask(self, state: EstimatorState) -> np.ndarray:
        """Points to evaluate, [K, *point.shape]."""
        reach = state.point.dtype.type(self.perturbation_size) * self.directions(state)
        return ends(state.point, reach, self.difference)

    def tell(self, state: EstimatorState, losses: np.ndarray) -> tuple[np.ndarray, EstimatorState]:
        """Gradient estimate from losses [K]; a probe that is not finite is dropped and counted."""
        slopes, finite = shares(self, losses, ())
        held = max(int(finite.sum()), 1)
        gradient = np.zeros(state.point.shape)
        for j in np.flatnonzero(slopes):
            gradient += slopes[j] / held * self.direction(state, int(j))
        if self.kind == "sparse" and self.rescale:
            factor = np.full(state.point.shape, 1 / self.density)
            if self.dense is not None:
                factor[self.dense.reshape(state.point.shape)] = 1
            gradient *= factor
        return gradient, replace(state, step=state.step + 1, dropped=state.dropped + int((~finite).sum()))


@dataclass(frozen=True)
class Spsa(WeightEstimator):
    """Simultaneous perturbation (Spall 1992, eq. 2.2, with several pairs averaged); MeZO is one Gaussian pair."""


@dataclass(frozen=True)
class Fzoo(WeightEstimator):
    """One-sided probes whose step is scaled by the standard deviation of their losses (FZOO, Dang et al. 2025)."""

    difference: str = "one_sided"
    fitness: str = "std"


@dataclass(frozen=True)
class LowRank(WeightEstimator):
    """Z = A B^T / sqrt(r) for a matrix, A and B standard normal (EGGROLL, Sarkar et al. 2025; LOZO, Chen et al. 2024).

    `factors` are what a batched forward needs: x (W + e Z) = x W + e (x A) B^T / sqrt(r), which never forms Z.
    """

    kind: str = "lowrank"
    fitness: str = "normalised"

    kinds: ClassVar[tuple[str, ...]] = ("lowrank",)

    def init(self, point: np.ndarray, seed: int, expert: int = 0) -> EstimatorState:
        """State at the matrix `point` [F, H]."""
        point = np.asarray(point)
        if point.ndim != 2 or self.rank > min(point.shape):
            raise UserError(f"point: shape {point.shape}, expected a matrix with both sides at least rank={self.rank}")
        return EstimatorState(point, seed, expert)

    def factors(self, state: EstimatorState, probe: int) -> tuple[np.ndarray, np.ndarray]:
        """A [F, r] and B [H, r] of one probe."""
        rows, columns = state.point.shape
        word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_NORMAL, probe)
        flat = philox.normals(state.seed, word, state.step, state.expert, (rows + columns) * self.rank)
        cut = rows * self.rank
        return flat[:cut].reshape(rows, self.rank), flat[cut:].reshape(columns, self.rank)

    def direction(self, state: EstimatorState, probe: int) -> np.ndarray:
        """Z of one probe."""
        a, b = self.factors(state, probe)
        return a @ b.T / np.float32(np.sqrt(self.rank))


@dataclass(frozen=True)
class Agzo(LowRank):
    """Z = A R^T with A the top-r left basis of the layer's inputs and R standard normal (AGZO).

    The state must hold the layer's inputs [B, F]: `state.moved(point, inputs)` before `ask`.
    """

    kind: str = "subspace"
    fitness: str = "plain"
    rank: int = 4

    kinds: ClassVar[tuple[str, ...]] = ("subspace",)

    def direction(self, state: EstimatorState, probe: int) -> np.ndarray:
        """Z of one probe."""
        if state.inputs is None or state.inputs.shape[1:] != state.point.shape[:1]:
            raise UserError(
                f"inputs: Agzo looks at the layer's inputs [batch, {state.point.shape[0]}]; give them with "
                "state.moved(point, inputs)"
            )
        basis = input_basis(state.inputs, self.rank, state.seed, state.step, state.expert, 0)
        return basis @ self.factors(state, probe)[1].T
