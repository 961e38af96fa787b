"""Counts of byte n-grams up to order 8, as sorted packed keys.

A gram of order n that ends at position p is the big-endian number of bytes p - n + 1 .. p: the predicted byte lowest,
so that a sort groups by context. Legend: n positions, M distinct grams, C distinct contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_ORDER = 8


def packed(data: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 [n]: the eight bytes that end at each position; `data` holds at least seven bytes before each."""
    keys = np.zeros(len(positions), np.uint64)
    for back in range(MAX_ORDER - 1, -1, -1):
        keys = (keys << np.uint64(8)) | data[positions - back]
    return keys


def of_order(keys: np.ndarray, order: int) -> np.ndarray:
    """The last `order` bytes of packed keys."""
    return keys & np.uint64((1 << (8 * order)) - 1)


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sorted distinct keys, how often each stands), from unsorted keys."""
    keys = np.sort(keys)
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.diff(np.append(starts, len(keys)))


def lookup(sorted_keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places int64 [n], found bool [n]) of keys in a sorted array."""
    places = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return places, sorted_keys[places] == wanted


@dataclass(frozen=True)
class GramTable:
    """Grams of one order with a count each, and sums over their contexts.

    Attributes:
        keys: uint64 [M], sorted.
        counts: int64 [M].
        contexts: uint64 [C], sorted: keys without the predicted byte.
        starts: int64 [C], first gram of each context.
    """

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    starts: np.ndarray

    @classmethod
    def build(cls, keys: np.ndarray, counts: np.ndarray) -> GramTable:
        """From sorted distinct keys and their counts."""
        contexts = keys >> np.uint64(8)
        starts = np.flatnonzero(np.concatenate([[True], contexts[1:] != contexts[:-1]]))
        return cls(keys, counts, contexts[starts], starts)

    def sum_by_context(self, values: np.ndarray) -> np.ndarray:
        """Sums over the grams of each context, [C], of values [M]."""
        return np.add.reduceat(values, self.starts)
