"""How the losses at the ends of probes become coefficients of their directions."""

from __future__ import annotations

import numpy as np

from .contract import NORMALISED, PLAIN, RANKS, STD


def centred_ranks(values: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """Ranks along axis 0 in [-1/2, 1/2], ties sharing their mean rank; 0 where not finite or alone.

    Rank shaping as in Salimans, Ho, Chen, Sidor, Sutskever, "Evolution strategies as a scalable alternative to
    reinforcement learning" (2017, section 2), with ties averaged so that it does not depend on the order.
    """
    flat, held = values.reshape(len(values), -1), finite.reshape(len(values), -1)
    with np.errstate(invalid="ignore"):
        below = (flat[:, None] > flat[None]) & held[None]
        equal = (flat[:, None] == flat[None]) & held[None]
    rank = below.sum(1) + (equal.sum(1) - 1) / 2
    count = held.sum(0)
    centred = rank / np.maximum(count - 1, 1) - 0.5
    return np.where(held & (count > 1), centred, 0).reshape(values.shape)


def coefficients(
    plus: np.ndarray, minus: np.ndarray | None, base: np.ndarray | None, size: float, fitness: int
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficient of every direction, so that the estimate is their mean over the finite ones times the directions.

    Args:
        plus: losses at +e, [P, ...].
        minus: at -e for central differences, or None.
        base: unperturbed losses [...] for one-sided differences, or None.
        size: e.
        fitness: PLAIN, STD, RANKS or NORMALISED; statistics are over the finite losses of axis 0, both ends together.

    Returns:
        (coefficients [P, ...], 0 where dropped; finite bool [P, ...]). Where all losses agree, STD and NORMALISED give
        0: there is nothing to follow.
    """
    other = base if minus is None else minus
    assert other is not None
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(plus - other)
    ends, held = (plus, finite) if minus is None else (np.concatenate([plus, minus]), np.concatenate([finite, finite]))
    if fitness == PLAIN:
        # the difference first: it is exact where the losses are close
        raw = np.where(finite, plus, 0) - np.where(finite, other, 0)
        return raw / (size if minus is None else 2 * size), finite
    safe = np.where(held, ends, 0)
    if fitness == RANKS:
        shaped = centred_ranks(ends, held)
    else:
        count = np.maximum(held.sum(0), 1)
        mean = safe.sum(0) / count
        spread = np.sqrt((np.where(held, safe - mean, 0) ** 2).sum(0) / count)
        # a spread at the rounding of the losses is none
        alive = spread > 4 * np.finfo(plus.dtype).eps * np.abs(mean)
        centre = mean if fitness == NORMALISED or minus is not None else base
        assert fitness in (STD, NORMALISED)
        shaped = np.where(held & alive, (safe - centre) / np.where(alive, spread, 1), 0)
    if minus is not None:
        shaped = (shaped[: len(plus)] - shaped[len(plus) :]) / 2
    return np.where(finite, shaped, 0) / size, finite
