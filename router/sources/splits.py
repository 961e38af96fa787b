"""Which document goes to train, calibration or held-out: 90 / 5 / 5 by hashes of names, so that nothing moves when
unrelated documents are added. Near copies of one another fall in one split."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import numpy as np

from ...kernels.errors import UserError
from .corpus import CALIBRATION, HELDOUT, TRAIN, TextCorpus

HELDOUT_SHARE = 0.05
CALIBRATION_SHARE = 0.05
MIN_DOCUMENTS = 50
BLOCK_BYTES = 64 << 10
SMALLEST_BLOCK_BYTES = 1 << 10
_WANTED_BLOCKS = 60
# a line found in more documents than this says nothing about copying, and pairs of them would be too many
_MOST_HOLDERS = 20
# short files share a few lines by chance
_FEWEST_SHARED = 5


def fraction(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on the key and the seed alone."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_by_fraction(fractions: np.ndarray) -> np.ndarray:
    """uint8 splits of documents with these fractions.

    Held-out below .05, calibration below .10, else train. A split left empty takes the document with the smallest
    fraction that does not empty another.
    """
    splits = np.full(len(fractions), TRAIN, np.uint8)
    splits[fractions < HELDOUT_SHARE + CALIBRATION_SHARE] = CALIBRATION
    splits[fractions < HELDOUT_SHARE] = HELDOUT
    order = np.argsort(fractions, kind="stable")
    for wanted in (HELDOUT, CALIBRATION, TRAIN):
        if (splits == wanted).any():
            continue
        candidates = order if wanted != TRAIN else order[::-1]
        spare = [i for i in candidates if (splits == splits[i]).sum() > 1]
        splits[spare[0]] = wanted
    return splits


def cluster_near_copies(contents: list[bytes]) -> list[int]:
    """For each document the smallest index of its cluster.

    Two documents that share more than half of the distinct non-blank lines of the smaller one are near copies.
    """
    lines = [{line.strip() for line in content.splitlines()} - {b""} for content in contents]
    holders: dict[bytes, list[int]] = defaultdict(list)
    for i, own in enumerate(lines):
        for line in own:
            holders[line].append(i)
    distinctive = [sum(1 for line in own if len(holders[line]) <= _MOST_HOLDERS) for own in lines]
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for held_by in holders.values():
        if 2 <= len(held_by) <= _MOST_HOLDERS:
            for a, first in enumerate(held_by):
                for second in held_by[a + 1 :]:
                    shared[first, second] += 1
    parent = list(range(len(contents)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for (first, second), count in shared.items():
        if count >= _FEWEST_SHARED and count > 0.5 * min(distinctive[first], distinctive[second]):
            a, b = sorted((root(first), root(second)))
            parent[b] = a
    return [root(i) for i in range(len(contents))]


def thin(documents: list[tuple[str, bytes]], share: float) -> list[tuple[str, bytes]]:
    """About `share` of the documents, by hashes of their names; of a few, no fewer than 60."""
    if share >= 1:
        return documents
    # a salt of its own: which documents are used says nothing of how they are split
    ranked = sorted((fraction(title, -1), place) for place, (title, _) in enumerate(documents))
    kept = {place for rank, (value, place) in enumerate(ranked) if value < share or rank < _WANTED_BLOCKS}
    return [entry for place, entry in enumerate(documents) if place in kept]


def split_documents(name: str, documents: list[tuple[str, bytes]], seed: int, share: float = 1.0) -> TextCorpus:
    """A corpus of (name, content) documents in splits.

    With at least 50 documents each goes whole; near copies share the smallest fraction among them. Fewer are cut
    into blocks of 64 KiB (less, down to 1 KiB, where that gives fewer than 60 blocks), each a document. `share` uses
    a part of the documents only, see `thin`.

    Raises:
        UserError: fewer than three blocks.
    """
    documents = sorted((title, content) for title, content in documents if content)
    if len(documents) >= MIN_DOCUMENTS:
        documents = thin(documents, share)
        own = np.array([fraction(title, seed) for title, _ in documents])
        clusters = np.array(cluster_near_copies([content for _, content in documents]))
        smallest = np.full(len(documents), np.inf)
        np.minimum.at(smallest, clusters, own)
        fractions = smallest[clusters]
    else:
        total = sum(len(content) for _, content in documents)
        size = int(np.clip(total // _WANTED_BLOCKS, SMALLEST_BLOCK_BYTES, BLOCK_BYTES))
        documents = [
            (f"{title}[{start}:{min(start + size, len(content))}]", content[start : start + size])
            for title, content in documents
            for start in range(0, len(content), size)
        ]
        documents = thin(documents, share)
        fractions = np.array([fraction(title, seed) for title, _ in documents])
    if len(documents) < 3:
        total = sum(len(content) for _, content in documents)
        raise UserError(
            f"{name}: {total} bytes are too few to split into train, calibration and held-out; "
            f"give at least {3 * SMALLEST_BLOCK_BYTES} bytes"
        )
    splits = split_by_fraction(fractions)
    laid_out = [(title, content, int(split)) for (title, content), split in zip(documents, splits, strict=True)]
    return TextCorpus.from_documents(name, laid_out)


def split_rows(count: int, seed: int) -> np.ndarray:
    """uint8 [count] splits of the rows of a matrix, by hashes of their numbers."""
    if count < 3:
        raise UserError(f"{count} rows are too few to split into train, calibration and held-out; give at least 3")
    return split_by_fraction(np.array([fraction(f"row {i}", seed) for i in range(count)]))
