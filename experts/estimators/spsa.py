"""Simultaneous perturbation of all weights at once (Spall 1992, eq. 2.2, with several pairs averaged)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...kernels.mlp_resident.contract import LAYER_ALL
from ...kernels.philox import reference as philox
from .base import EstimatorState, central_slopes


@dataclass(frozen=True)
class Spsa:
    """mean_j (L(theta + e z_j) - L(theta - e z_j)) / 2e * z_j with Rademacher z_j.

    Attributes:
        num_perturbations: P pairs a step.
        perturbation_size: e.
    """

    num_perturbations: int = 8
    perturbation_size: float = 1e-2

    def init(self, point: np.ndarray, seed: int, expert: int = 0) -> EstimatorState:
        """State at the weights `point`, of any shape."""
        return EstimatorState(np.asarray(point), seed, expert)

    def directions(self, state: EstimatorState) -> np.ndarray:
        """z of this step: int8 [P, *point.shape]."""
        draws = [
            philox.signs(
                state.seed,
                philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_ALL, j),
                state.step,
                state.expert,
                state.point.size,
            )
            for j in range(self.num_perturbations)
        ]
        return np.stack(draws).reshape(-1, *state.point.shape)

    def ask(self, state: EstimatorState) -> np.ndarray:
        """theta + e z_j and theta - e z_j: [P, 2, *point.shape]."""
        reach = self.perturbation_size * self.directions(state)
        return np.stack([state.point + reach, state.point - reach], axis=1)

    def tell(self, state: EstimatorState, losses: np.ndarray) -> tuple[np.ndarray, EstimatorState]:
        """Gradient estimate from losses [P, 2]; a pair that is not finite is dropped and counted."""
        slopes, finite = central_slopes(losses, self.perturbation_size, (self.num_perturbations, 2))
        gradient = np.tensordot(slopes, self.directions(state), axes=1) / max(int(finite.sum()), 1)
        return gradient, replace(state, step=state.step + 1, dropped=state.dropped + int((~finite).sum()))
