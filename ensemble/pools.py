"""How the areas' opinions become one, and how the weights are fitted.

Every pool is a fixed-order sum over the areas, so an answer does not depend on the batch it is asked in. Weights are
fitted on the calibration split; all fits are convex and run to convergence.

Legend: n inputs, A areas, K columns: depth of the tree, or classes V of a softmax.

A missing opinion (a cold or failed expert) is stood in for by the mean of those present (`fill_missing`), which for a
weighted mean is the same as giving its weight to the others in equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..kernels.errors import UserError

_NEWTON_STEPS = 50
_EM_STEPS = 2000
_TOLERANCE = 1e-9
# pseudo-observations that hold logistic weights at the plain mean
_RIDGE = 1.0


def fill_missing(opinions: np.ndarray, present: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """Opinions [n, A, K] with what is missing put in, in place.

    Args:
        opinions: float32 [n, A, K].
        present: bool [n, A].
        fallback: float32 [n, K] or [K], where no area has an opinion.
    """
    rows = np.flatnonzero(~present.all(1))
    if len(rows):
        held = present[rows]
        count = held.sum(1)
        mean = np.where(held[:, :, None], opinions[rows], 0).sum(1, dtype=np.float32)
        mean /= np.maximum(count, 1)[:, None].astype(np.float32)
        spare = np.broadcast_to(fallback, (len(opinions), opinions.shape[2]))[rows]
        mean = np.where((count > 0)[:, None], mean, spare)
        opinions[rows] = np.where(held[:, :, None], opinions[rows], mean[:, None])
    return opinions


def weighted_sum(opinions: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """sum_a weights[a] * opinions[:, a]: float32 [n, K], areas in order; weights [A] or [A, K]."""
    total = np.zeros((opinions.shape[0], opinions.shape[2]), np.float32)
    for area in range(opinions.shape[1]):
        total += opinions[:, area] * np.asarray(weights[area], np.float32)
    return total


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis, in the dtype of `logits`."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class TreePool(Protocol):
    """A pool of tree logits along the targets' paths."""

    def fit(self, logits: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """Weights float64 [A, K] from logits [n, A, K] and signs [n, K]."""
        ...


class SoftmaxPool(Protocol):
    """A pool of class logits."""

    def fit(self, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Weights float64 [A] from logits [n, A, V] and targets int [n]."""
        ...

    def log_proba(self, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Log-probabilities float32 [n, V]."""
        ...


@dataclass(frozen=True)
class MeanTreeLogits:
    """Plain mean of the logits at every node."""

    def fit(self, logits: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """1 / A everywhere."""
        return np.full(logits.shape[1:], 1 / logits.shape[1])


@dataclass(frozen=True)
class LogisticTree:
    """Logistic mixing: z_k = sum_a w_ak z_ak, a weight an area and a depth.

    Minimises the log loss of every decision (Mattern, "Mixing strategies in data compression", 2012, section 3) by
    Newton's method, with a ridge towards 1 / A, so that a handful of inputs does not run away.
    """

    def fit(self, logits: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """Converged weights; see `TreePool`."""
        areas, depth = logits.shape[1:]
        weights = np.full((areas, depth), 1 / areas)
        for k in range(depth):
            weights[:, k] = logistic_weights(logits[:, :, k].astype(np.float64), signs[:, k].astype(np.float64))
        return weights


def logistic_weights(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """argmin_w sum_n softplus(-s x.w) + ridge |w - 1/A|^2 / 2 for x [n, A], damped Newton: float64 [A]."""
    count, areas = x.shape
    centre = np.full(areas, 1 / areas)
    weights = centre.copy()

    def value(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -signs * (x @ w)).sum() + 0.5 * _RIDGE * ((w - centre) ** 2).sum())

    current = value(weights)
    for _ in range(_NEWTON_STEPS):
        margin = signs * (x @ weights)
        wrong = np.exp(-np.logaddexp(0, margin))
        gradient = -(x * (signs * wrong)[:, None]).sum(0) + _RIDGE * (weights - centre)
        curvature = (x * (wrong * (1 - wrong))[:, None]).T @ x + _RIDGE * np.eye(areas)
        step = np.linalg.solve(curvature, gradient)
        if gradient @ step < _TOLERANCE * max(count, 1):
            break
        scale = 1.0
        while (new := value(weights - scale * step)) > current and scale > 1e-6:
            scale /= 2
        weights, current = weights - scale * step, new
    return weights


@dataclass(frozen=True)
class MeanSoftmaxLogits:
    """Softmax of the plain mean of the logits."""

    def fit(self, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """1 / A for every area."""
        return np.full(logits.shape[1], 1 / logits.shape[1])

    def log_proba(self, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """See `SoftmaxPool`."""
        return log_softmax(weighted_sum(logits, weights))


@dataclass(frozen=True)
class LinearPool:
    """p = sum_a w_a p_a on the simplex; weights by expectation maximisation (Jordan and Jacobs 1994, section 4.2)."""

    def fit(self, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Converged weights; the likelihood is concave in them, so any start does."""
        chosen = np.take_along_axis(log_softmax(logits.astype(np.float64)), targets[:, None, None], 2)[:, :, 0]
        weights = np.full(logits.shape[1], 1 / logits.shape[1])
        likelihood = np.exp(chosen - chosen.max(1, keepdims=True)) if len(chosen) else chosen
        for _ in range(_EM_STEPS if len(chosen) else 0):
            share = likelihood * weights
            share /= share.sum(1, keepdims=True)
            moved = share.mean(0)
            if np.abs(moved - weights).max() < _TOLERANCE:
                break
            weights = moved
        return weights

    def log_proba(self, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """See `SoftmaxPool`."""
        mixed = weighted_sum(np.exp(log_softmax(logits)), weights)
        return np.log(np.maximum(mixed, np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class LogPool:
    """p proportional to prod_a p_a^w_a (logarithmic opinion pool, Genest and Zidek 1986, section 3); w_a free."""

    def fit(self, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Weights at the optimum of a convex loss, by L-BFGS with a ridge towards 1 / A."""
        from scipy.optimize import minimize

        log_p = log_softmax(logits.astype(np.float64))
        chosen = np.take_along_axis(log_p, targets[:, None, None], 2)[:, :, 0]
        centre = np.full(logits.shape[1], 1 / logits.shape[1])

        def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
            mixed = np.einsum("nav,a->nv", log_p, weights)
            log_norm = np.logaddexp.reduce(mixed, axis=1)
            expected = np.einsum("nv,nav->na", np.exp(mixed - log_norm[:, None]), log_p)
            value = (log_norm - chosen @ weights).sum() + 0.5 * _RIDGE * ((weights - centre) ** 2).sum()
            return float(value), (expected - chosen).sum(0) + _RIDGE * (weights - centre)

        found = minimize(loss, centre, jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-14})
        return found.x

    def log_proba(self, logits: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """See `SoftmaxPool`."""
        return log_softmax(weighted_sum(log_softmax(logits), weights))


class RegressionPool(Protocol):
    """A pool of predicted numbers."""

    def fit(self, values: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Weights float64 [A] from predictions [n, A, V] and targets [n, V]."""
        ...


@dataclass(frozen=True)
class MeanValues:
    """Plain mean of the predictions."""

    def fit(self, values: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """1 / A for every area."""
        return np.full(values.shape[1], 1 / values.shape[1])


@dataclass(frozen=True)
class LinearValues:
    """Weighted sum by least squares, with a ridge towards 1 / A (stacked regression, Breiman 1996)."""

    def fit(self, values: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """argmin_w sum |y - sum_a w_a v_a|^2 + ridge |w - 1/A|^2."""
        areas = values.shape[1]
        x = np.moveaxis(values.astype(np.float64), 1, 2).reshape(-1, areas)
        centre = np.full(areas, 1 / areas)
        rest = targets.reshape(-1) - x @ centre
        return centre + np.linalg.solve(x.T @ x + _RIDGE * np.eye(areas), x.T @ rest)


TREE_POOLS: dict[str, TreePool] = {"mean_logits": MeanTreeLogits(), "logistic": LogisticTree()}
SOFTMAX_POOLS: dict[str, SoftmaxPool] = {
    "mean_logits": MeanSoftmaxLogits(),
    "linear": LinearPool(),
    "log": LogPool(),
}
REGRESSION_POOLS: dict[str, RegressionPool] = {"mean_logits": MeanValues(), "linear": LinearValues()}


def check_pool(name: str, head: str) -> None:
    """UserError where a pool is unknown or does not go with the head."""
    known = {"tree": TREE_POOLS, "softmax": SOFTMAX_POOLS}.get(head, REGRESSION_POOLS)
    if name not in known:
        raise UserError(f"ensemble.pool={name}: not for expert.head={head}; known: {', '.join(known)}")
