"""The estimator interface of notebooks: `init / ask / tell` around any loss that can be evaluated.

    state = estimator.init(point, seed)
    points = estimator.ask(state)            # [P, 2, ...]: where to evaluate
    gradient, state = estimator.tell(state, losses)   # losses [P, 2] (or [P, 2, B] per example)

`tell` is pure. The draws are those of the resident loops, named by (seed, expert, step).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...kernels.errors import UserError


@dataclass(frozen=True)
class EstimatorState:
    """Where an estimator stands.

    Attributes:
        point: the array whose gradient is wanted: weights of any shape (spsa), or pre-activations [B, H] (activation).
        seed: run seed.
        expert: names the stream of draws.
        step: counts calls of `tell`.
        dropped: pairs dropped so far because a loss was not finite.
    """

    point: np.ndarray
    seed: int
    expert: int = 0
    step: int = 0
    dropped: int = 0

    def moved(self, point: np.ndarray) -> EstimatorState:
        """The same state at another point."""
        if point.shape != self.point.shape:
            raise UserError(f"point: shape {point.shape}, the estimator was started at {self.point.shape}")
        return replace(self, point=point)


class Estimator(Protocol):
    """What every estimator offers."""

    num_perturbations: int
    perturbation_size: float

    def init(self, point: np.ndarray, seed: int, expert: int = 0) -> EstimatorState:
        """State at `point` before the first step."""
        ...

    def ask(self, state: EstimatorState) -> np.ndarray:
        """Points to evaluate, [P, 2, *point.shape]: plus, then minus."""
        ...

    def tell(self, state: EstimatorState, losses: np.ndarray) -> tuple[np.ndarray, EstimatorState]:
        """Gradient estimate of the shape of the point, and the state of the next step."""
        ...


def central_slopes(losses: np.ndarray, size: float, expected: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(L+ - L-) / 2e along axis 1 with what is not finite set to 0, and where it was finite.

    UserError when `losses` does not have the `expected` shape.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if losses.shape != expected:
        raise UserError(f"losses: shape {losses.shape}, expected {expected}: one for each point of ask()")
    with np.errstate(invalid="ignore"):
        slopes = (losses[:, 0] - losses[:, 1]) / (2 * size)
    finite = np.isfinite(slopes)
    return np.where(finite, slopes, 0), finite
