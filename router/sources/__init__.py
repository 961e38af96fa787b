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
        fraction: share of a text's documents to use, chosen by hashes of their names.
    """

    name: str = "stdlib"
    path: str | None = None
    split_seed: int = 0
    fraction: float = 1.0


def load_source(config: SourceConfig) -> Corpus:
    """Read and split; UserError says what is wrong with the data or its path."""
    if not 0 < config.fraction <= 1:
        raise UserError(f"source.fraction={config.fraction}: must be above 0 and at most 1")
    if config.name in ("stdlib", "text"):
        is_stdlib = config.name == "stdlib"
        documents = stdlib.read_documents() if is_stdlib else text.read_documents(config.path)
        name = "stdlib" if is_stdlib else f"source.path={config.path}"
        return split_documents(name, documents, config.split_seed, config.fraction)
    if config.fraction != 1:
        raise UserError(f"source.fraction={config.fraction}: only texts can be thinned; leave it at 1 for arrays")
    if config.name == "digits":
        return digits.read(config.split_seed)
    if config.name == "arrays":
        return arrays.read(config.path, config.split_seed)
    raise UserError(f"source={config.name}: unknown; known: {', '.join(SOURCES)}")
