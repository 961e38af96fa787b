"""Memory features of a run: fitted once, their rows stored for as long as they are needed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ..kernels.errors import UserError
from ..kernels.files import write_json_atomic
from ..kernels.mlp_resident.contract import MEMORY_FEATURES
from ..kernels.ngram_memory.numba import DEPTH
from ..router.memory.memory import fit_memory
from ..router.sources import TextCorpus
from .progress import say
from .rundir import read_json

_ROWS = "rows.int8"


def _shape(corpus: TextCorpus) -> tuple[int, int, int]:
    return (len(corpus.data), DEPTH, MEMORY_FEATURES)


def make(run: Path, corpus: TextCorpus, leave_out: str, most_bytes: int) -> None:
    """Fit the memory of a run and write its rows, one of 128 bytes a position.

    Raises:
        UserError: the rows would be larger than `most_bytes`.
    """
    began = time.perf_counter()
    shape = _shape(corpus)
    size = int(np.prod(shape))
    if size > most_bytes:
        raise UserError(
            f"relay.memory_bytes={most_bytes}: the rows of {shape[0]:,} positions take {size:,}; raise it, or use a "
            "part of the text (source.fraction)"
        )
    directory = run / "memory"
    directory.mkdir(parents=True, exist_ok=True)
    rows = np.memmap(directory / _ROWS, np.int8, "w+", shape=shape)
    memory = fit_memory(corpus, leave_out, rows)
    memory.save(directory)
    rows.flush()
    seconds = time.perf_counter() - began
    facts = {"table_bytes": memory.nbytes, "row_bytes": size, "seconds": seconds, "shape": shape}
    write_json_atomic(directory / "rows.json", facts)
    say(f"memory: {memory.nbytes / 1e6:.0f} MB of tables, {size / 1e6:.0f} MB of rows in {seconds:.1f} s")


def facts(run: Path) -> dict | None:
    """Sizes and seconds of a run's memory, None where it has none."""
    path = run / "memory" / "rows.json"
    return read_json(path, "start a new run") if path.exists() else None


def open_rows(run: Path) -> np.ndarray:
    """The stored rows int8 [N, 8, M], memory-mapped."""
    known = facts(run)
    path = run / "memory" / _ROWS
    if known is None or not path.exists() or path.stat().st_size != known["row_bytes"]:
        raise UserError(f"{path}: missing or damaged; start a new run")
    return np.memmap(path, np.int8, "r", shape=tuple(known["shape"]))
