"""Memory features: fitted on the training split, computed for any text.

For every context (orders 1 to 6 and 8, the current word, the current and the previous word) the counts of the two
branches at each of a byte's eight decisions become one calibrated log-odds: how often the branch was taken in the
training split at such counts. A position's own observation is left out in training, or its whole document (the
default): nothing of a held-out document is in the tables either, so both see the same kind of evidence.

Legend as in `kernels.ngram_memory.numba`.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident.contract import MEMORY_FEATURES, MEMORY_UNIT
from ...kernels.ngram_memory import numba as loops
from ..artifact import load_state, save_state
from ..sources.corpus import TRAIN, TextCorpus
from .tables import ALL, Context, Table

CONTEXTS = (*(Context(order=order) for order in (1, 2, 3, 4, 5, 6, 8)), Context(words=1), Context(words=2))
CHAINED = np.array([0, 1, 2, 3, 4, 5, 6])
BINS = MEMORY_FEATURES - len(CONTEXTS)
LEAVE_OUT = ("document", "position")
# positions that calibration looks at, evenly spread
_CALIBRATED = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)
# positions at a time: their evidence stays in cache
_BLOCK = 1 << 11


@dataclass(frozen=True)
class Memory:
    """Fitted tables and calibration.

    Attributes:
        tables: one a context, counts of the whole training split.
        odds: int8 [O, 8, Q, Q], log-odds of the branch whose count comes first, in units of `MEMORY_UNIT`.
        leave_out: what training leaves out: `document` or `position`.
    """

    tables: tuple[Table, ...]
    odds: np.ndarray
    leave_out: str

    @property
    def nbytes(self) -> int:
        """Bytes of tables and calibration."""
        return sum(table.nbytes for table in self.tables) + self.odds.nbytes

    def rows(self, data: np.ndarray, positions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Features of positions outside the training split, as towards each target: int8 [n, 8, M]."""
        rows = np.zeros((len(positions), loops.DEPTH, MEMORY_FEATURES), np.int8)
        _fill(self, None, data, np.asarray(positions, np.int64), np.asarray(targets, np.uint8), rows)
        return rows

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        save_state(directory, "memory", {**_named(self.tables), "odds": self.odds}, {"leave_out": self.leave_out})


def load_memory(directory: str | os.PathLike[str]) -> Memory | None:
    """Read what `save` wrote; None where there is none, UserError where it is damaged."""
    if not (Path(directory) / "memory.json").exists():
        return None
    try:
        arrays, facts = load_state(directory, "memory")
        return Memory(_restored(arrays), arrays["odds"], str(facts["leave_out"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: no readable memory ({error}); start a new run") from None


def _named(tables: tuple[Table, ...]) -> dict[str, np.ndarray]:
    return {
        f"{context.name}.{name}": array
        for context, table in zip(CONTEXTS, tables, strict=True)
        for name, array in table.arrays().items()
    }


def _restored(arrays: dict[str, np.ndarray]) -> tuple[Table, ...]:
    own = [
        {name.split(".", 1)[1]: array for name, array in arrays.items() if name.split(".", 1)[0] == context.name}
        for context in CONTEXTS
    ]
    return tuple(Table.restore(each) for each in own)


@dataclass(frozen=True)
class _Own:
    """Counts to leave out: of each document alone, or None for the position itself."""

    tables: tuple[Table, ...] | None
    documents: np.ndarray


@dataclass(frozen=True)
class CorpusMemory:
    """The memory of a corpus, with what is to be left out for its own training positions.

    Attributes:
        memory: tables and calibration.
        corpus: what they were fitted on.
        documents: counts of each document alone, where documents are left out; else None.
    """

    memory: Memory
    corpus: TextCorpus
    documents: tuple[Table, ...] | None

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Features int8 [n, 8, M] of positions of one kind, all in the training split or none."""
        positions = np.asarray(positions, np.int64)
        rows = np.zeros((len(positions), loops.DEPTH, MEMORY_FEATURES), np.int8)
        own = None
        if len(positions):
            documents = self.corpus.doc_of(positions)
            if self.corpus.doc_split[documents[0]] == TRAIN:
                own = _Own(self.documents, documents.astype(np.uint64))
        _fill(self.memory, own, self.corpus.data, positions, self.corpus.data[positions], rows, threads=1)
        return rows

    def fill(self, rows: np.ndarray) -> None:
        """Write the features of every position that holds a byte into rows int8 [N, 8, M]."""
        for split in np.unique(self.corpus.doc_split):
            positions = self.corpus.positions(int(split))
            own = _Own(self.documents, self.corpus.doc_of(positions).astype(np.uint64)) if split == TRAIN else None
            _fill(self.memory, own, self.corpus.data, positions, self.corpus.data[positions], rows, by_position=True)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        self.memory.save(directory)
        if self.documents is not None:
            save_state(directory, "documents", _named(self.documents), {})

    @classmethod
    def load(cls, directory: str | os.PathLike[str], corpus: TextCorpus) -> CorpusMemory:
        """Read what `save` wrote; UserError where it is missing or damaged."""
        memory = load_memory(directory)
        if memory is None:
            raise UserError(f"{directory}: no memory; start a new run")
        if memory.leave_out == "position":
            return cls(memory, corpus, None)
        try:
            return cls(memory, corpus, _restored(load_state(directory, "documents")[0]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{directory}: no readable memory ({error}); start a new run") from None


def fit_memory(corpus: TextCorpus, leave_out: str = "document") -> CorpusMemory:
    """Count the training split and calibrate.

    Args:
        corpus: the text.
        leave_out: `document` or `position`.

    Raises:
        UserError: an unknown leave_out.
    """
    if leave_out not in LEAVE_OUT:
        raise UserError(f"relay.leave_out={leave_out}: unknown; known: {', '.join(LEAVE_OUT)}")
    positions = corpus.positions(TRAIN)
    followers = corpus.data[positions]
    documents = corpus.doc_of(positions).astype(np.uint64)
    whole = np.full(len(positions), ALL)

    def count(context: Context) -> tuple[Table, Table | None]:
        table = Table.build(context.hashes(corpus.data, positions, whole), followers)
        if leave_out == "position":
            return table, None
        return table, Table.build(context.hashes(corpus.data, positions, documents), followers)

    with ThreadPoolExecutor(_THREADS) as pool:
        counted = list(pool.map(count, CONTEXTS))
    tables = tuple(table for table, _ in counted)
    own = None if leave_out == "position" else tuple(mine for _, mine in counted if mine is not None)
    sample = positions[:: max(len(positions) // _CALIBRATED, 1)]
    outcomes = np.zeros((len(CONTEXTS), loops.DEPTH, loops.NUM_LEVELS, loops.NUM_LEVELS), np.int64)
    left_out = _Own(own, corpus.doc_of(sample).astype(np.uint64))
    for block in range(0, len(sample), _BLOCK):
        part = slice(block, block + _BLOCK)
        targets = corpus.data[sample[part]]
        evidence, _ = _evidence(tables, _Own(own, left_out.documents[part]), corpus.data, sample[part], targets)
        for o in range(len(CONTEXTS)):
            loops.tally(evidence[o], len(targets), outcomes[o])
    return CorpusMemory(Memory(tables, calibrated(outcomes), leave_out), corpus, own)


def calibrated(outcomes: np.ndarray) -> np.ndarray:
    """Log-odds int8 [O, 8, Q, Q] that the branch with the first count is taken, half a count added to each side.

    outcomes[..., a, b] counts decisions at which the branch taken had count a and the other b.
    """
    seen = outcomes + 0.5
    odds = np.log(seen) - np.log(np.swapaxes(seen, -1, -2))
    return np.clip(np.rint(odds / MEMORY_UNIT), -127, 127).astype(np.int8)


def _evidence(
    tables: tuple[Table, ...], own: _Own | None, data: np.ndarray, positions: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(evidence int32 [O, n, 9], distinct int32 [O, n]) with what is to be left out taken away."""
    evidence = np.zeros((len(CONTEXTS), len(positions), 9), np.int32)
    distinct = np.zeros((len(CONTEXTS), len(positions)), np.int32)
    whole = np.full(len(positions), ALL)
    for o, (context, table) in enumerate(zip(CONTEXTS, tables, strict=True)):
        table.add_evidence(context.hashes(data, positions, whole), targets, 1, evidence[o], distinct[o])
        if own is None:
            continue
        if own.tables is None:
            evidence[o, :, 8] -= 1
        else:
            hashes = context.hashes(data, positions, own.documents)
            own.tables[o].add_evidence(hashes, targets, -1, evidence[o], distinct[o])
    return evidence, distinct


def _fill(
    memory: Memory,
    own: _Own | None,
    data: np.ndarray,
    positions: np.ndarray,
    targets: np.ndarray,
    rows: np.ndarray,
    by_position: bool = False,
    threads: int = _THREADS,
) -> None:
    """rows[i], or rows[position], of every position, in blocks over threads."""

    def run(start: int) -> None:
        part = slice(start, start + _BLOCK)
        here = None if own is None else _Own(own.tables, own.documents[part])
        evidence, distinct = _evidence(memory.tables, here, data, positions[part], targets[part])
        block = np.zeros((len(positions[part]), loops.DEPTH, MEMORY_FEATURES), np.int8)
        loops.write_features(
            evidence, distinct, len(block), targets[part], memory.odds, CHAINED, BINS, MEMORY_UNIT, block
        )
        if by_position:
            rows[positions[part]] = block
        else:
            rows[part] = block

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(0, len(positions), _BLOCK)))
