"""Count-based models that say what a loss is worth: unigram, bigram, Kneser-Ney."""

from __future__ import annotations

import numpy as np

from .kneser_ney import KneserNey

__all__ = ["KneserNey", "ngram_baselines"]


def ngram_baselines(
    data: np.ndarray, train: np.ndarray, heldout: np.ndarray, orders: tuple[int, ...] = (5, 8)
) -> dict[str, np.ndarray]:
    """Bits of every held-out byte, float64 [n], by model.

    Args:
        data: uint8 [N], with at least seven bytes before every position.
        train: int64 positions counted.
        heldout: int64 [n] positions scored.
        orders: of the Kneser-Ney models.
    """
    bytes_here, bytes_before = data[train].astype(np.int64), data[train - 1].astype(np.int64)
    unigram = (np.bincount(bytes_here, minlength=256) + 1 / 256) / (len(train) + 1)
    pairs = np.bincount(bytes_before * 256 + bytes_here, minlength=1 << 16).reshape(256, 256)
    # one pseudo-count of the unigram in every context
    bigram = (pairs + unigram) / (pairs.sum(1, keepdims=True) + 1)
    wanted = data[heldout].astype(np.int64)
    result = {
        "unigram": -np.log2(unigram[wanted]),
        "bigram": -np.log2(bigram[data[heldout - 1].astype(np.int64), wanted]),
    }
    model = KneserNey(data, train, orders)
    for order, probabilities in model.probabilities(data, heldout).items():
        result[f"kneser_ney_{order}"] = -np.log2(probabilities)
    return result
