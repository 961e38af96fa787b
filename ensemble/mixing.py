"""Mixing weights of an ensemble: fitted on the calibration split, stored as JSON, applied to opinions.

Legend: n inputs, A areas, K depth of the tree, V classes, R head rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..kernels.errors import UserError
from .metrics import path_signs, tree_nats
from .pools import REGRESSION_POOLS, SOFTMAX_POOLS, TREE_POOLS, check_pool, log_softmax, weighted_sum


@dataclass(frozen=True)
class Mixing:
    """A fitted pool.

    Attributes:
        head: `tree`, `softmax` or `regression`.
        pool: its name.
        weights: float64 [A, K] (tree) or [A]; 0 for areas left out.
    """

    head: str
    pool: str
    weights: np.ndarray

    def to_json(self) -> dict:
        """For the manifest."""
        return {"head": self.head, "pool": self.pool, "weights": self.weights.tolist()}

    @classmethod
    def from_json(cls, stored: dict) -> Mixing:
        """What `to_json` gave."""
        check_pool(stored["pool"], stored["head"])
        return cls(stored["head"], stored["pool"], np.array(stored["weights"], np.float64))


def losses(mixing: Mixing, opinions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Loss in nats of every input, float64 [n].

    Args:
        mixing: the pool.
        opinions: float32 [n, A, K] along the targets' paths (tree), or [n, A, V]; nothing missing.
        targets: int [n], or float [n, V] for regression, whose loss is squared error summed over the outputs.
    """
    if mixing.head == "regression":
        return ((weighted_sum(opinions, mixing.weights) - targets) ** 2).sum(1, dtype=np.float64)
    if mixing.head == "tree":
        depth = opinions.shape[2]
        return tree_nats(weighted_sum(opinions, mixing.weights), path_signs(targets, depth))
    log_p = SOFTMAX_POOLS[mixing.pool].log_proba(opinions, mixing.weights)
    return -np.take_along_axis(log_p, np.asarray(targets, np.int64)[:, None], 1)[:, 0].astype(np.float64)


def area_losses(head: str, opinions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Loss in nats (regression: squared error) of every area alone on every input, float64 [n, A]."""
    if head == "regression":
        return ((opinions - targets[:, None]) ** 2).sum(2, dtype=np.float64)
    if head == "tree":
        signs = path_signs(targets, opinions.shape[2])
        return np.stack([tree_nats(opinions[:, a], signs) for a in range(opinions.shape[1])], axis=1)
    chosen = np.asarray(targets, np.int64)[:, None, None]
    return -np.take_along_axis(log_softmax(opinions.astype(np.float64)), chosen, 2)[:, :, 0]


def fit(head: str, pool: str, opinions: np.ndarray, targets: np.ndarray, top_k: int | None = None) -> Mixing:
    """Weights of a pool from the calibration split.

    Args:
        head: `tree` or `softmax`.
        pool: a registered pool.
        opinions: as in `losses`.
        targets: int [n].
        top_k: use only the k areas that do best alone; None for all.

    Raises:
        UserError: an unknown pool, or a k that the areas do not allow.
    """
    check_pool(pool, head)
    areas = opinions.shape[1]
    if top_k is not None and not 1 <= top_k <= areas:
        raise UserError(f"ensemble.k={top_k}: must be between 1 and {areas}, the number of areas")
    chosen = np.arange(areas)
    if top_k is not None and top_k < areas:
        alone = area_losses(head, opinions, targets).mean(0)
        chosen = np.sort(np.argsort(alone, kind="stable")[:top_k])
    used = opinions[:, chosen]
    if head == "tree":
        own = TREE_POOLS[pool].fit(used, path_signs(targets, opinions.shape[2]))
        weights = np.zeros((areas, opinions.shape[2]))
    elif head == "regression":
        own = REGRESSION_POOLS[pool].fit(used, targets)
        weights = np.zeros(areas)
    else:
        own = SOFTMAX_POOLS[pool].fit(used, np.asarray(targets, np.int64))
        weights = np.zeros(areas)
    weights[chosen] = own
    return Mixing(head, pool, weights)
