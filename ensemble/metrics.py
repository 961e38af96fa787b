"""Losses of mixed predictions, and how sure one can be of their mean."""

from __future__ import annotations

import numpy as np

from ..kernels.mlp_resident.contract import tree_signs
from ..kernels.philox import reference as philox

LOG2 = float(np.log(2))


def path_signs(targets: np.ndarray, depth: int) -> np.ndarray:
    """float32 [n, K]: +1 where the branch to the target at that depth is bit 1, else -1."""
    return tree_signs(targets, depth).astype(np.float32)


def tree_nats(logits: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Loss in nats, float64 [n], of logits [n, K] along the path with these signs."""
    missed = -signs.astype(np.float64) * logits
    return np.logaddexp(0, missed).sum(1)


def document_interval(
    bits: np.ndarray, documents: np.ndarray, seed: int, draws: int = 1000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean bits per byte over resampled documents.

    Each draw takes as many documents as there are, with replacement, and divides their bits by their bytes (Efron
    and Tibshirani 1993, section 13.3). With one document the interval is that one value.

    Args:
        bits: float64 [n].
        documents: int [n], document of each byte.
        seed: run seed.
        draws: resamples.
        level: share of the resamples inside.
    """
    _, own = np.unique(documents, return_inverse=True)
    count = int(own.max()) + 1
    sums, lengths = np.bincount(own, weights=bits), np.bincount(own)
    word = philox.pack_draw(philox.PURPOSE_BOOTSTRAP)
    chosen = philox.uniform_ints(seed, word, 0, philox.WHOLE_RUN, draws * count, count).reshape(draws, count)
    means = sums[chosen].sum(1) / lengths[chosen].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
