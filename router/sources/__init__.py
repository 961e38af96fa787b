"""Where data comes from: texts as bytes, or matrices with targets, already split."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.errors import UserError
from . import arrays, digits, stdlib, text
from .corpus import CALIBRATION, HELDOUT, PAD, TRAIN, ArrayCorpus, Corpus, TextCorpus, load_corpus
from .splits import split_documents

SOURCES = ("stdlib", "text", "digits", "arrays")

__all__ = [
    "CALIBRATION",
    "HELDOUT",
    "PAD",
    "SOURCES",
    "TRAIN",
    "ArrayCorpus",
    "Corpus",
    "SourceConfig",
    "TextCorpus",
    "load_corpus",
    "load_source",
    "split_documents",
]


@dataclass(frozen=True)
class SourceConfig:
    """Which data.

    Attributes:
        name: one of `SOURCES`.
        path: file, folder or glob (text), .npz file (arrays).
        split_seed: salts the hashes that assign splits.
    """

    name: str = "stdlib"
    path: str | None = None
    split_seed: int = 0


def load_source(config: SourceConfig) -> Corpus:
    """Read and split; UserError says what is wrong with the data or its path."""
    if config.name == "stdlib":
        return split_documents("stdlib", stdlib.read_documents(), config.split_seed)
    if config.name == "text":
        return split_documents(f"source.path={config.path}", text.read_documents(config.path), config.split_seed)
    if config.name == "digits":
        return digits.read(config.split_seed)
    if config.name == "arrays":
        return arrays.read(config.path, config.split_seed)
    raise UserError(f"source={config.name}: unknown; known: {', '.join(SOURCES)}")
