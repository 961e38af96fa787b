"""How evenly a router loads its experts."""

from __future__ import annotations

import numpy as np


def load_metrics(sizes: np.ndarray) -> dict[str, float | int]:
    """Figures of one area (or any set of experts) from inputs per expert, int [E].

    Returns:
        experts; cold (no input); max_over_mean (1 is even); gini (0 is even: mean absolute difference of two
        experts over twice the mean); effective_experts (exp of the entropy of the load).
    """
    sizes = np.sort(np.asarray(sizes, np.float64))
    count, total = len(sizes), sizes.sum()
    if not total:
        return {"experts": count, "cold": count, "max_over_mean": 0.0, "gini": 0.0, "effective_experts": 0.0}
    share = sizes[sizes > 0] / total
    ranks = np.arange(1, count + 1)
    return {
        "experts": count,
        "cold": int((sizes == 0).sum()),
        "max_over_mean": float(sizes[-1] * count / total),
        "gini": float(2 * (ranks * sizes).sum() / (count * total) - (count + 1) / count),
        "effective_experts": float(np.exp(-(share * np.log(share)).sum())),
    }
