"""Slices: where a worker is pinned. Here: processor cores."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Cores of one worker; more workers than cores share them."""

    cores: tuple[int, ...]


def available_cores() -> list[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_slices(workers: int | None) -> list[Slice]:
    """One slice a worker: one core each, the cores taken in turn; None for as many workers as cores."""
    cores = available_cores()
    return [Slice((cores[place % len(cores)],)) for place in range(workers or len(cores))]


def pin(cores: tuple[int, ...]) -> None:
    """Bind this process to its cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


# set before a worker imports anything numerical: one thread each, the slice is the worker's whole world
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
