"""Interpolated modified Kneser-Ney over bytes (Chen and Goodman 1999, "An empirical study of smoothing techniques for
language modeling", section 3): three discounts an order, lower orders on continuation counts, the order below the
unigram uniform over 256 bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ngrams import MAX_ORDER, GramTable, distinct, lookup, of_order, packed


@dataclass(frozen=True)
class _Order:
    table: GramTable
    discounts: np.ndarray
    totals: np.ndarray
    backoff: np.ndarray


def _discounts(counts: np.ndarray) -> np.ndarray:
    """D1, D2, D3+ from counts of counts (eq. 17); where one cannot be had, that of absolute discounting, .75."""
    n1, n2, n3, n4 = (int((counts == k).sum()) for k in (1, 2, 3, 4))
    if not n1 or not n2:
        return np.array([0.0, 0.75, 0.75, 0.75])
    y = n1 / (n1 + 2 * n2)
    d1 = 1 - 2 * y * n2 / n1
    d2 = 2 - 3 * y * n3 / n2
    d3 = 3 - 4 * y * n4 / n3 if n3 else d2
    return np.array([0.0, *np.clip([d1, d2, d3], 0.0, [1.0, 2.0, 3.0])])


def _order(table: GramTable) -> _Order:
    discounts = _discounts(table.counts)
    totals = table.sum_by_context(table.counts).astype(np.float64)
    taken = table.sum_by_context(discounts[np.minimum(table.counts, 3)])
    return _Order(table, discounts, totals, taken / totals)


class KneserNey:
    """Models of one or more orders over the same training bytes.

    Args:
        data: uint8 [N], with at least seven bytes before every position.
        positions: int64 [n], training bytes.
        orders: wanted orders, 1 .. 8.
    """

    def __init__(self, data: np.ndarray, positions: np.ndarray, orders: tuple[int, ...]) -> None:
        assert orders
        assert max(orders) <= MAX_ORDER
        keys = packed(data, positions)
        self._top: dict[int, _Order] = {}
        self._lower: dict[int, _Order] = {}
        highest = max(orders)
        for order in orders:
            self._top[order] = _order(GramTable.build(*distinct(of_order(keys, order))))
        grams = self._top[highest].table.keys
        for order in range(highest - 1, 0, -1):
            # how many different bytes were seen before a gram: the distinct grams one longer that end in it
            grams, continuations = distinct(of_order(grams, order))
            self._lower[order] = _order(GramTable.build(grams, continuations))

    def probabilities(self, data: np.ndarray, positions: np.ndarray) -> dict[int, np.ndarray]:
        """Probability of the byte at each position under the model of each order, float64 [n]."""
        return self.of_keys(packed(data, positions))

    def of_keys(self, keys: np.ndarray) -> dict[int, np.ndarray]:
        """As `probabilities`, of packed keys [n]."""
        below = np.full(len(keys), 1 / 256)
        result = {}
        for order in range(1, max(self._top) + 1):
            if order in self._top:
                result[order] = _interpolate(self._top[order], of_order(keys, order), below)
            if order in self._lower:
                below = _interpolate(self._lower[order], of_order(keys, order), below)
        return result


def _interpolate(order: _Order, keys: np.ndarray, below: np.ndarray) -> np.ndarray:
    context, known = lookup(order.table.contexts, keys >> np.uint64(8))
    place, seen = lookup(order.table.keys, keys)
    counts = np.where(seen, order.table.counts[place], 0)
    own = (counts - order.discounts[np.minimum(counts, 3)]) / order.totals[context]
    return np.where(known, own + order.backoff[context] * below, below)
