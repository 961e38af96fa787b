"""Experts over windows: each window's last bytes under the experts nearest to its prefix.

Legend: n windows, k experts asked for each, L bytes of a window of which the first `prefix` are not scored.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..kernels.lstm_forward.contract import LstmShape
from ..kernels.lstm_forward.numba import window_log_proba
from .metrics import LOG2

if TYPE_CHECKING:
    from ..router.windows.router import WindowRouter

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


@dataclass(frozen=True)
class WindowModel:
    """Trained experts over windows and their router.

    Attributes:
        shape: sizes of an expert.
        router: asked with a window's prefix.
        weights_of: expert -> float32 [T].
        usable: int [u], experts that may be asked.
        embedding: shared by all, or None where every expert brings its own.
        top_k: k experts asked for each window, at most u.
    """

    shape: LstmShape
    router: WindowRouter
    weights_of: Callable[[int], np.ndarray]
    usable: np.ndarray
    embedding: np.ndarray | None
    top_k: int

    def log_proba(self, text: np.ndarray, starts: np.ndarray, length: int | None = None) -> np.ndarray:
        """Log-probabilities (nats) of windows under the experts nearest to their prefixes, float32 [n, L - prefix, k].

        Args:
            text: uint8 [N].
            starts: int64 [n].
            length: L, or None for that of the router; above the prefix.
        """
        prefix, length = self.router.prefix, length or self.router.length
        # every expert's rank, so that those that cannot be used are passed over
        ids, _ = self.router.assign([text[s : s + prefix].tobytes() for s in starts], self.router.num_experts)
        order = np.argsort(~np.isin(ids, self.usable), axis=1, kind="stable")[:, : self.top_k]
        nearest = np.take_along_axis(ids, order, 1)
        return score_windows(self.shape, self.weights_of, self.embedding, text, starts, length, prefix, nearest)

    def text_bits(self, content: bytes) -> np.ndarray:
        """Bits float64 [n - prefix] of a text's bytes after its first `prefix`, which only say whom to ask.

        Windows overlap by the prefix, so that every later byte is scored once; the last one may be shorter.
        """
        text = np.frombuffer(content, np.uint8)
        prefix, length = self.router.prefix, self.router.length
        starts = np.arange(0, max(len(text) - prefix, 0), length - prefix)
        if not len(starts):
            return np.zeros(0)
        whole = starts[starts + length <= len(text)]
        parts = [mean_probability(self.log_proba(text, whole), self.top_k).reshape(-1)] if len(whole) else []
        if len(whole) < len(starts):
            rest = starts[len(whole) :]
            tail = self.log_proba(text, rest, int(len(text) - rest[0]))
            parts.append(mean_probability(tail, self.top_k).reshape(-1))
        return -np.concatenate(parts) / LOG2
