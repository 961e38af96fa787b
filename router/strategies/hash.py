"""Hash of chosen context positions; what is too heavy for one expert is split by further context.

A context's key is a 64-bit hash, extended byte by byte. A table says of some keys either "split: extend by the next
context position and look again" or "placed with this expert"; any other key goes to expert key mod E. At inference
the same table is walked, so a context lands where it was trained, and an unseen one where its hash says.

Legend: n positions, E experts of the area, L contexts that are not split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.compile import jit
from ...kernels.errors import UserError
from ..relay import Relay
from ..sources.corpus import PAD
from .base import AreaConfig

# context positions that splitting may add, nearest first
_SPLIT_CONTEXT = PAD
# contexts are counted on at most so many positions, evenly spread
_COUNTED = 1 << 22
_WORD_BYTES = 24
_GAP_BYTES = 8
_SPLIT = -1
_ABSENT = -2


def _word_table() -> np.ndarray:
    table = np.zeros(256, np.bool_)
    table[np.frombuffer(b"0123456789_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", np.uint8)] = True
    return table


_IS_WORD = _word_table()


@jit
def _extend(key, value):
    """Hash of (key, value): multiply by the golden ratio's 64 bits, fold the high half into the low one, twice."""
    mixed = (key ^ (np.uint64(value) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(29))


@jit
def _extend_by_words(key, data, position, words, is_word):
    """Extend by the word that ends before `position` and, with `words` 2, by the one before; 0 bytes end all."""
    p = position - 1
    for word in range(words):
        if word:
            stop = p - _GAP_BYTES
            while p > stop and data[p] != 0 and not is_word[data[p]]:
                p -= 1
        stop = p - _WORD_BYTES
        while p > stop and is_word[data[p]]:
            key = _extend(key, data[p])
            p -= 1
        key = _extend(key, 256)
    return key


@jit
def _first_key(data, position, chosen, words, is_word):
    key = np.uint64(1)
    if words:
        key = _extend_by_words(key, data, position, words, is_word)
    for lag in chosen:
        key = _extend(key, data[position - lag])
    return key


@jit
def _first_keys(data, positions, chosen, words, is_word):
    keys = np.empty(positions.size, np.uint64)
    for i in range(positions.size):
        keys[i] = _first_key(data, positions[i], chosen, words, is_word)
    return keys


@jit
def _find(key, table_keys, table_values):
    mask = np.uint64(table_keys.size - 1)
    slot = key & mask
    while table_values[slot] != _ABSENT:
        if table_keys[slot] == key:
            return table_values[slot]
        slot = (slot + np.uint64(1)) & mask
    return np.int32(_ABSENT)


@jit
def _insert(keys, values, table_keys, table_values):
    mask = np.uint64(table_keys.size - 1)
    for i in range(keys.size):
        slot = keys[i] & mask
        while table_values[slot] != _ABSENT:
            slot = (slot + np.uint64(1)) & mask
        table_keys[slot] = keys[i]
        table_values[slot] = values[i]


@jit
def _preferred(key, experts):
    return np.int32((key >> np.uint64(32)) % np.uint64(experts))


@jit
def _extend_heavy(data, positions, keys, lag, table_keys, table_values):
    """Positions whose key is split, with their keys extended by the byte at `lag`."""
    kept = 0
    for i in range(positions.size):
        if _find(keys[i], table_keys, table_values) == _SPLIT:
            positions[kept] = positions[i]
            keys[kept] = _extend(keys[i], data[positions[kept] - lag])
            kept += 1
    return kept


@jit
def _assign(data, positions, chosen, further, words, is_word, table_keys, table_values, experts, out):
    for i in range(positions.size):
        position = positions[i]
        key = _first_key(data, position, chosen, words, is_word)
        found = _find(key, table_keys, table_values)
        level = 0
        while found == _SPLIT:
            key = _extend(key, data[position - further[level]])
            level += 1
            found = _find(key, table_keys, table_values)
        out[i] = _preferred(key, experts) if found == _ABSENT else found


@jit
def _place(keys, counts, experts, capacity, placed):
    """Experts of contexts in falling order of weight; returns the inputs that met a full expert.

    The `experts` heaviest get an expert each, the first free one from where their hash points; the rest go where
    their hash points or, where that would pass the capacity, to the next expert with room.
    """
    loads = np.zeros(experts, np.int64)
    taken = np.zeros(experts, np.bool_)
    overflow = 0
    for i in range(keys.size):
        wanted = _preferred(keys[i], experts)
        expert = wanted
        if i < experts:
            while taken[expert]:
                expert = (expert + 1) % experts
            taken[expert] = True
        else:
            tries = 0
            while loads[expert] + counts[i] > capacity and tries < experts:
                expert = (expert + 1) % experts
                tries += 1
            if tries == experts:
                expert = loads.argmin()
            if expert != wanted:
                overflow += counts[i]
        loads[expert] += counts[i]
        placed[i] = expert
    return overflow


def _build_table(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    size = 1 << max(4, int(2 * len(keys)).bit_length())
    table_keys, table_values = np.zeros(size, np.uint64), np.full(size, _ABSENT, np.int32)
    _insert(keys, values, table_keys, table_values)
    return table_keys, table_values


@dataclass(frozen=True)
class HashArea:
    """A fitted area: split keys (value -1) and placed keys (value the expert).

    Attributes:
        config: as asked for.
        overflow: training inputs whose expert was full (estimated where not all were counted).
        keys: uint64 [n].
        values: int32 [n].
    """

    config: AreaConfig
    overflow: int
    keys: np.ndarray
    values: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", _build_table(self.keys, self.values))

    def assign(self, data: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """See `Area`; `data` is text, with at least `PAD` bytes before every position."""
        chosen, further = _lags(self.config)
        positions = np.ascontiguousarray(positions, np.int64)
        out = np.empty(len(positions), np.int32)
        table_keys, table_values = self._table  # type: ignore[attr-defined]
        _assign(
            data,
            positions,
            chosen,
            further,
            self.config.word,
            _IS_WORD,
            table_keys,
            table_values,
            self.config.experts,
            out,
        )
        return out

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Area`."""
        return {"keys": self.keys, "values": self.values}


def _lags(config: AreaConfig) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.array(config.lags, np.int64)
    further = [lag for lag in range(1, _SPLIT_CONTEXT + 1) if lag not in config.lags]
    return chosen, np.array(further, np.int64)


def fit(config: AreaConfig, data: np.ndarray, positions: np.ndarray, relay: Relay) -> tuple[HashArea, np.ndarray]:
    """Split the heavy contexts, place all, and assign the training positions.

    Raises:
        UserError: rows of a matrix rather than text, or no context position chosen.
    """
    if data.ndim != 1:
        raise UserError(f"router area {config.name}: strategy=hash needs text; use kmeans or random for arrays")
    if not config.lags and not config.word:
        raise UserError(f"router area {config.name}: strategy=hash needs lags=[1,...] or word=1")
    positions = np.ascontiguousarray(positions, np.int64)
    counted = positions[:: -(-len(positions) // _COUNTED)] if len(positions) else positions
    capacity = config.slack * len(counted) / config.experts
    split_at = capacity
    while True:
        split, keys, counts = _split_contexts(config, data, counted, split_at)
        # fewer contexts than experts would leave experts cold: split finer, as long as there is something to split
        if len(keys) >= config.experts or split_at < 1 or counts.max(initial=0) <= 1:
            break
        split_at /= 2
    order = np.lexsort((keys, -counts))
    keys, counts = keys[order], counts[order]
    placed = np.empty(len(keys), np.int32)
    overflow = _place(keys, counts, config.experts, capacity, placed)
    moved = placed != ((keys >> np.uint64(32)) % np.uint64(config.experts)).astype(np.int32)
    values = np.concatenate([np.full(len(split), _SPLIT, np.int32), placed[moved]])
    overflow = int(overflow) * len(positions) // max(len(counted), 1)
    area = HashArea(config, overflow, np.concatenate([split, keys[moved]]), values)
    return area, area.assign(data, positions)


def _split_contexts(
    config: AreaConfig, data: np.ndarray, positions: np.ndarray, split_at: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(keys that are split, keys that are not, counts of the latter)."""
    chosen, further = _lags(config)
    active = positions.copy()
    keys = _first_keys(data, active, chosen, config.word, _IS_WORD)
    split, leaves, leaf_counts = [], [], []
    for level in range(len(further) + 1):
        ordered = np.sort(keys)
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        distinct, counts = ordered[starts], np.diff(np.append(starts, len(ordered)))
        heavy = counts > split_at if level < len(further) else np.zeros(len(counts), bool)
        leaves.append(distinct[~heavy])
        leaf_counts.append(counts[~heavy])
        split.append(distinct[heavy])
        if not heavy.any():
            break
        table = _build_table(distinct[heavy], np.full(int(heavy.sum()), _SPLIT, np.int32))
        kept = _extend_heavy(data, active, keys, further[level], *table)
        active, keys = active[:kept], keys[:kept]
    return np.concatenate(split), np.concatenate(leaves), np.concatenate(leaf_counts)


def restore(config: AreaConfig, arrays: dict[str, np.ndarray], overflow: int, relay: Relay) -> HashArea:
    """See `Strategy`."""
    return HashArea(config, overflow, arrays["keys"], arrays["values"])
