"""Memory features of a run: fitted once, their rows stored where there is room, else computed for each expert."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ..kernels.errors import UserError
from ..kernels.files import write_json_atomic
from ..kernels.mlp_resident.contract import MEMORY_FEATURES
from ..kernels.ngram_memory.numba import DEPTH
from ..router.memory.memory import CorpusMemory, fit_memory
from ..router.sources import Corpus, TextCorpus
from .progress import say
from .rundir import read_json

_ROWS = "rows.int8"


def _shape(corpus: TextCorpus) -> tuple[int, int, int]:
    return (len(corpus.data), DEPTH, MEMORY_FEATURES)


def make(run: Path, corpus: TextCorpus, leave_out: str, most_bytes: int) -> None:
    """Fit the memory of a run, and write its rows, one of 128 bytes a position, if they fit in `most_bytes`."""
    began = time.perf_counter()
    shape = _shape(corpus)
    size = int(np.prod(shape))
    stored = size <= most_bytes
    directory = run / "memory"
    directory.mkdir(parents=True, exist_ok=True)
    fitted = fit_memory(corpus, leave_out)
    if stored:
        fitted.memory.save(directory)
        rows = np.memmap(directory / _ROWS, np.int8, "w+", shape=shape)
        fitted.fill(rows)
        rows.flush()
    else:
        fitted.save(directory)
    seconds = time.perf_counter() - began
    facts = {
        "table_bytes": fitted.memory.nbytes,
        "row_bytes": size if stored else 0,
        "seconds": seconds,
        "shape": shape,
    }
    write_json_atomic(directory / "rows.json", facts)
    kept = f"{size / 1e6:.0f} MB of rows" if stored else f"rows of {size / 1e6:.0f} MB computed for each expert"
    say(f"memory: {facts['table_bytes'] / 1e6:.0f} MB of tables, {kept} in {seconds:.1f} s")


def facts(run: Path) -> dict | None:
    """Sizes and seconds of a run's memory, None where it has none."""
    path = run / "memory" / "rows.json"
    return read_json(path, "start a new run") if path.exists() else None


def open_rows(run: Path) -> np.ndarray | None:
    """The stored rows int8 [N, 8, M], memory-mapped; None where they are computed."""
    known = facts(run)
    if known is not None and not known["row_bytes"]:
        return None
    path = run / "memory" / _ROWS
    if known is None or not path.exists() or path.stat().st_size != known["row_bytes"]:
        raise UserError(f"{path}: missing or damaged; start a new run")
    return np.memmap(path, np.int8, "r", shape=tuple(known["shape"]))


def open_for_training(run: Path, corpus: Corpus) -> np.ndarray | CorpusMemory:
    """The stored rows, or what computes them."""
    assert isinstance(corpus, TextCorpus)
    rows = open_rows(run)
    return CorpusMemory.load(run / "memory", corpus) if rows is None else rows
