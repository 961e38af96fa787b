"""Held-out bytes that also stand, in long runs, in the training split: a model may have memorised those."""

from __future__ import annotations

import numpy as np

from ...kernels.compile import jit
from .corpus import TRAIN, TextCorpus

# any odd multiplier does: matches are verified
_BASE = np.uint64(0x9E3779B97F4A7C15)


@jit
def _hash_windows(data, start, end, length, out):
    """Polynomial hashes, modulo 2**64, of all windows of `length` bytes inside start .. end."""
    top = np.uint64(1)
    for _ in range(length - 1):
        top *= _BASE
    value = np.uint64(0)
    for p in range(start, end):
        if p - start >= length:
            value -= top * (np.uint64(data[p - length]) + np.uint64(1))
        value = value * _BASE + np.uint64(data[p]) + np.uint64(1)
        if p - start >= length - 1:
            out[p - start - length + 1] = value


@jit
def _mark(data, windows, hashes, sorted_hashes, places, length, matched):
    """Mark the bytes of every window that stands in training too; equal hashes are compared byte by byte."""
    for i in range(windows.size):
        low = np.searchsorted(sorted_hashes, hashes[i])
        while low < sorted_hashes.size and sorted_hashes[low] == hashes[i]:
            same = True
            for k in range(length):
                if data[windows[i] + k] != data[places[low] + k]:
                    same = False
                    break
            if same:
                for k in range(length):
                    matched[windows[i] + k] = True
                break
            low += 1


def _windows(corpus: TextCorpus, split: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts int64, hashes uint64) of all windows of a split's documents."""
    starts, hashes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    for start, end in corpus.documents(split):
        if end - start >= length:
            own = np.empty(end - start - length + 1, np.uint64)
            _hash_windows(corpus.data, start, end, length, own)
            starts.append(np.arange(start, end - length + 1))
            hashes.append(own)
    return np.concatenate(starts), np.concatenate(hashes)


def novel_mask(corpus: TextCorpus, positions: np.ndarray, length: int = 64) -> np.ndarray:
    """bool [n]: False where the byte lies in a run of `length` or more bytes that stands in the training split.

    Args:
        corpus: a text in splits.
        positions: int64 [n], places of bytes that are not in the training split.
        length: shortest run that counts as a match.
    """
    train_starts, train_hashes = _windows(corpus, TRAIN, length)
    order = np.argsort(train_hashes, kind="stable")
    matched = np.zeros(len(corpus.data), np.bool_)
    for split in np.unique(corpus.doc_split):
        if split != TRAIN:
            starts, hashes = _windows(corpus, int(split), length)
            _mark(corpus.data, starts, hashes, train_hashes[order], train_starts[order], length, matched)
    return ~matched[positions]
