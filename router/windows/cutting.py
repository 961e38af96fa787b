"""Windows of equal length, cut from single documents."""

from __future__ import annotations

import numpy as np

from ...kernels.errors import UserError
from ..sources.corpus import SPLIT_NAMES, TextCorpus


def windows(corpus: TextCorpus, split: int, length: int) -> tuple[np.ndarray, int]:
    """Non-overlapping windows of exactly `length` bytes, each inside one document.

    Every document is cut from its first byte on; what remains at its end and is shorter than a window is dropped.

    Args:
        corpus: a text.
        split: TRAIN, CALIBRATION or HELDOUT.
        length: bytes in a window.

    Returns:
        int64 [n] first bytes of the windows in `corpus.data`, ascending, and how many bytes of the split were dropped.

    Raises:
        UserError: a length below 1, or a split without any window.
    """
    if length < 1:
        raise UserError(f"window length={length}: must be at least 1 byte")
    documents = corpus.documents(split)
    parts = [np.arange(start, end - length + 1, length, dtype=np.int64) for start, end in documents]
    starts = np.concatenate([np.zeros(0, np.int64), *parts])
    if not len(starts):
        longest = max((end - start for start, end in documents), default=0)
        raise UserError(
            f"{corpus.name}: no document of the {SPLIT_NAMES[split]} split holds a window of {length} bytes (the "
            f"longest has {longest}); give longer documents or a smaller window length"
        )
    return starts, corpus.count(split) - length * len(starts)
