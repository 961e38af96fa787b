"""Perturbation of a layer's pre-activations, example by example (Ren, Kornblith, Liao, Hinton 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident.contract import DIRECTIONS
from ...kernels.mlp_resident.reference import draw_directions
from .base import EstimatorState, central_slopes


@dataclass(frozen=True)
class Activation:
    """d_h = mean_j (L(h + e v_j) - L(h - e v_j)) / 2e * v_j for every example; then dW = x d_h^T.

    Attributes:
        num_perturbations: P pairs an example.
        perturbation_size: e.
        directions_name: `signs` (random) or `hadamard` (rows of a basis under random sign flips per example; with
            P the basis size, the estimate is exact up to O(e^2)).
    """

    num_perturbations: int = 8
    perturbation_size: float = 0.1
    directions_name: str = "hadamard"

    def __post_init__(self) -> None:
        if self.directions_name not in DIRECTIONS:
            raise UserError(f"directions_name={self.directions_name}: unknown; known: {', '.join(DIRECTIONS)}")

    def init(self, point: np.ndarray, seed: int, expert: int = 0) -> EstimatorState:
        """State at the pre-activations `point`, [B, H]."""
        point = np.asarray(point)
        if point.ndim != 2:
            raise UserError(f"point: shape {point.shape}, expected [batch, hidden]")
        return EstimatorState(point, seed, expert)

    def directions(self, state: EstimatorState) -> np.ndarray:
        """v of this step: int8 [P, B, H]."""
        batch, hidden = state.point.shape
        code = DIRECTIONS[self.directions_name]
        drawn = draw_directions(state.seed, state.expert, state.step, batch, hidden, self.num_perturbations, code)
        return drawn.transpose(1, 0, 2)

    def ask(self, state: EstimatorState) -> np.ndarray:
        """h + e v_j and h - e v_j: [P, 2, B, H]."""
        reach = self.perturbation_size * self.directions(state)
        return np.stack([state.point + reach, state.point - reach], axis=1)

    def tell(self, state: EstimatorState, losses: np.ndarray) -> tuple[np.ndarray, EstimatorState]:
        """d_h [B, H] from losses [P, 2, B]; a pair that is not finite is dropped for its example and counted."""
        expected = (self.num_perturbations, 2, state.point.shape[0])
        slopes, finite = central_slopes(losses, self.perturbation_size, expected)
        shares = slopes / np.maximum(finite.sum(0), 1)
        gradient = np.einsum("pb,pbh->bh", shares, self.directions(state))
        return gradient, replace(state, step=state.step + 1, dropped=state.dropped + int((~finite).sum()))
