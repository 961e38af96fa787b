"""Experts over windows: each window's last bytes under the experts nearest to its prefix.

Legend: n windows, k experts asked for each, L bytes of a window of which the first `prefix` are not scored.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..kernels.lstm_forward.contract import LstmShape
from ..kernels.lstm_forward.numba import window_log_proba

_WINDOWS = 128
_THREADS = min(8, os.cpu_count() or 1)


def score_windows(
    shape: LstmShape,
    weights_of: Callable[[int], np.ndarray],
    embedding: np.ndarray | None,
    text: np.ndarray,
    starts: np.ndarray,
    length: int,
    prefix: int,
    experts: np.ndarray,
) -> np.ndarray:
    """Log-probabilities (nats) of every scored byte under each expert: float32 [n, L - prefix, k].

    Args:
        shape: sizes of an expert.
        weights_of: expert -> float32 [T].
        embedding: shared by all, or None.
        text: uint8 [N].
        starts: int64 [n].
        length: L.
        prefix: bytes at a window's start that are read but not scored.
        experts: int [n, k].
    """
    out = np.empty((len(starts), length - prefix, experts.shape[1]), np.float32)
    jobs = []
    for expert in np.unique(experts):
        rows, ranks = np.nonzero(experts == expert)
        weights = weights_of(int(expert))
        for first in range(0, len(rows), _WINDOWS):
            jobs.append((weights, rows[first : first + _WINDOWS], ranks[first : first + _WINDOWS]))

    def run(job) -> None:
        weights, rows, ranks = job
        found, _ = window_log_proba(shape, weights, embedding, text, starts[rows], length)
        out[rows, :, ranks] = found[:, prefix:]

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(run, jobs))
    return out


def mean_probability(log_proba: np.ndarray, k: int) -> np.ndarray:
    """Log of the mean probability over the first k experts, float64 [n, L - prefix] of [n, L - prefix, K]."""
    return np.logaddexp.reduce(log_proba[:, :, :k].astype(np.float64), axis=2) - np.log(k)
