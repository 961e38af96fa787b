"""Perturbation of a layer's pre-activations, example by example (Ren, Kornblith, Liao, Hinton 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident.contract import DIRECTIONS
from ...kernels.mlp_resident.directions import draw_directions
from .base import EstimatorState, check_choices, ends, shares


@dataclass(frozen=True)
class Activation:
    """d_h = mean_j c_j v_j for every example, c_j the coefficient of its probe j; then dW = x d_h^T.

    Attributes:
        num_perturbations: P directions an example.
        perturbation_size: e.
        kind: `signs` (random) or `hadamard` (rows of a basis under random sign flips per example; with P the basis
            size, the estimate is exact up to O(e^2), one-sided O(e)).
        difference: `central` or `one_sided`.
        fitness: `plain`, `std`, `ranks` or `normalised`, over the probes of an example.
    """

    num_perturbations: int = 8
    perturbation_size: float = 0.1
    kind: str = "hadamard"
    difference: str = "central"
    fitness: str = "plain"

    def __post_init__(self) -> None:
        if self.kind not in ("signs", "hadamard"):
            raise UserError(f"kind={self.kind}: Activation takes signs, hadamard")
        check_choices(self.difference, self.fitness, self.num_perturbations, self.perturbation_size)

    def init(self, point: np.ndarray, seed: int, expert: int = 0) -> EstimatorState:
        """State at the pre-activations `point`, [B, H]."""
        point = np.asarray(point)
        if point.ndim != 2:
            raise UserError(f"point: shape {point.shape}, expected [batch, hidden]")
        basis = 1 << (32 * -(-point.shape[1] // 32) - 1).bit_length()
        if self.kind == "hadamard" and self.num_perturbations > basis:
            raise UserError(
                f"num_perturbations={self.num_perturbations}: the basis of {point.shape[1]} units has {basis}"
            )
        return EstimatorState(point, seed, expert)

    def directions(self, state: EstimatorState) -> np.ndarray:
        """v of this step: int8 [P, B, H]."""
        batch, hidden = state.point.shape
        code = DIRECTIONS[self.kind]
        drawn = draw_directions(state.seed, state.expert, state.step, batch, hidden, self.num_perturbations, code)
        return drawn.transpose(1, 0, 2)

    def ask(self, state: EstimatorState) -> np.ndarray:
        """Points to evaluate, [K, B, H]."""
        return ends(state.point, self.perturbation_size * self.directions(state), self.difference)

    def tell(self, state: EstimatorState, losses: np.ndarray) -> tuple[np.ndarray, EstimatorState]:
        """d_h [B, H] from losses [K, B]; a probe that is not finite is dropped for its example and counted."""
        slopes, finite = shares(self, losses, state.point.shape[:1])
        held = slopes / np.maximum(finite.sum(0), 1)
        gradient = np.einsum("pb,pbh->bh", held, self.directions(state))
        return gradient, replace(state, step=state.step + 1, dropped=state.dropped + int((~finite).sum()))
