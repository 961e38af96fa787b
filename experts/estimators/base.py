"""The estimator interface of notebooks and of the general loop: `init / ask / tell` around any loss.

    state = estimator.init(point, seed)
    points = estimator.ask(state)                     # [K, *point.shape]: where to evaluate
    gradient, state = estimator.tell(state, losses)   # losses [K], or [K, B] one an example (activation)

With central differences K = 2 P: all plus ends, then all minus ends. One-sided ones have K = P + 1: the point itself,
then the plus ends. `tell` is pure. The draws are those of the resident loops, named by (seed, expert, step).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident.contract import DIFFERENCES, FITNESS
from ...kernels.mlp_resident.fitness import coefficients


@dataclass(frozen=True)
class EstimatorState:
    """Where an estimator stands.

    Attributes:
        point: the array whose gradient is wanted: weights of any shape, or pre-activations [B, H] (activation).
        seed: run seed.
        expert: names the stream of draws.
        step: counts calls of `tell`.
        dropped: probes dropped so far because a loss was not finite.
        inputs: a layer's inputs [B, F], for estimators that look at them.
    """

    point: np.ndarray
    seed: int
    expert: int = 0
    step: int = 0
    dropped: int = 0
    inputs: np.ndarray | None = None

    def moved(self, point: np.ndarray, inputs: np.ndarray | None = None) -> EstimatorState:
        """The same state at another point (and with the layer inputs of another batch)."""
        if point.shape != self.point.shape:
            raise UserError(f"point: shape {point.shape}, the estimator was started at {self.point.shape}")
        return replace(self, point=point, inputs=self.inputs if inputs is None else inputs)


class Estimator(Protocol):
    """What every estimator offers."""

    @property
    def num_perturbations(self) -> int:
        """P."""
        ...

    @property
    def perturbation_size(self) -> float:
        """e."""
        ...

    @property
    def difference(self) -> str:
        """Which ends are compared."""
        ...

    @property
    def fitness(self) -> str:
        """How losses become coefficients."""
        ...

    def directions(self, state: EstimatorState) -> np.ndarray:
        """Directions of this step: [P, *point.shape]."""
        ...

    def ask(self, state: EstimatorState) -> np.ndarray:
        """Points to evaluate, [K, *point.shape]."""
        ...

    def tell(self, state: EstimatorState, losses: np.ndarray) -> tuple[np.ndarray, EstimatorState]:
        """Gradient estimate of the shape of the point, and the state of the next step."""
        ...


def check_choices(difference: str, fitness: str, num_perturbations: int, perturbation_size: float) -> None:
    """UserError where a choice is unknown or a number out of range."""
    for field, value, known in (("difference", difference, DIFFERENCES), ("fitness", fitness, FITNESS)):
        if value not in known:
            raise UserError(f"{field}={value}: unknown; known: {', '.join(known)}")
    if num_perturbations < 1:
        raise UserError(f"num_perturbations={num_perturbations}: must be at least 1")
    if not 0 < perturbation_size < float("inf"):
        raise UserError(f"perturbation_size={perturbation_size}: must be a finite number above 0")


def ends(point: np.ndarray, reach: np.ndarray, difference: str) -> np.ndarray:
    """Points [K, ...] of directions times e, `reach` [P, ...]."""
    if difference == "central":
        return np.concatenate([point + reach, point - reach])
    return np.concatenate([point[None], point + reach])


def shares(estimator: Estimator, losses: np.ndarray, expected: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients [P, ...] of the directions, 0 where a loss was not finite; finite bool [P, ...]).

    UserError when `losses` has not the shape [K, *expected].
    """
    probes = estimator.num_perturbations
    central = estimator.difference == "central"
    shape = (2 * probes if central else probes + 1, *expected)
    losses = np.asarray(losses, dtype=np.float64)
    if losses.shape != shape:
        raise UserError(f"losses: shape {losses.shape}, expected {shape}: one for each point of ask()")
    plus, minus, base = (losses[:probes], losses[probes:], None) if central else (losses[1:], None, losses[0])
    return coefficients(plus, minus, base, estimator.perturbation_size, FITNESS[estimator.fitness])
