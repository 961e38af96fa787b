"""What the rest of the system sees of a data set: examples, their split, and a digest.

Legend: N bytes or examples, D documents, F0 raw features, n positions asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from ...kernels.errors import UserError
from ...kernels.files import write_bytes_atomic, write_json_atomic

TRAIN, CALIBRATION, HELDOUT = 0, 1, 2
SPLIT_NAMES = ("train", "calibration", "heldout")
SCHEMA = 1

# zeros before every document: no context reaches into the document before it
PAD = 32


@dataclass(frozen=True)
class TextCorpus:
    """Bytes of documents, one after another, each preceded by `PAD` zero bytes.

    The byte at position p is predicted from data[p - 1], data[p - 2], ...; zeros stand before a document's start.

    Attributes:
        name: for tables and logs.
        data: uint8 [N].
        doc_starts: int64 [D], first byte of each document in `data`.
        doc_ends: int64 [D], one past its last byte.
        doc_split: uint8 [D], TRAIN, CALIBRATION or HELDOUT.
        doc_names: D names.
    """

    name: str
    data: np.ndarray
    doc_starts: np.ndarray
    doc_ends: np.ndarray
    doc_split: np.ndarray
    doc_names: tuple[str, ...]

    unit = "byte"

    @classmethod
    def from_documents(cls, name: str, documents: list[tuple[str, bytes, int]]) -> TextCorpus:
        """Lay out documents given as (name, content, split)."""
        lengths = np.array([len(content) for _, content, _ in documents], np.int64)
        starts = np.cumsum(lengths + PAD) - lengths
        data = np.zeros(int((lengths + PAD).sum()), np.uint8)
        for start, (_, content, _) in zip(starts, documents, strict=True):
            data[start : start + len(content)] = np.frombuffer(content, np.uint8)
        split = np.array([split for *_, split in documents], np.uint8)
        return cls(name, data, starts, starts + lengths, split, tuple(title for title, *_ in documents))

    def documents(self, split: int) -> list[tuple[int, int]]:
        """(start, end) of the documents of a split, in order."""
        chosen = self.doc_split == split
        return list(zip(self.doc_starts[chosen].tolist(), self.doc_ends[chosen].tolist(), strict=True))

    def positions(self, split: int) -> np.ndarray:
        """int64 [n]: all positions of a split that hold a byte, ascending."""
        parts = [np.arange(start, end) for start, end in self.documents(split)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def doc_of(self, positions: np.ndarray) -> np.ndarray:
        """Number of the document of each position, int64 [n]."""
        return np.searchsorted(self.doc_starts, positions, side="right") - 1

    def count(self, split: int) -> int:
        """Bytes in a split."""
        chosen = self.doc_split == split
        return int((self.doc_ends - self.doc_starts)[chosen].sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over content and splits."""
        return _digest(self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "data": self.data,
            "doc_starts": self.doc_starts,
            "doc_ends": self.doc_ends,
            "doc_split": self.doc_split,
        }

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        _save(Path(directory), self._arrays(), {"kind": "text", "name": self.name, "doc_names": list(self.doc_names)})


@dataclass(frozen=True)
class ArrayCorpus:
    """Rows of a matrix with a target each.

    Attributes:
        name: for tables and logs.
        x: float32 [N, F0].
        y: int64 [N], classes 0 .. num_classes - 1, or float32 [N] where num_classes is 0.
        split: uint8 [N], TRAIN, CALIBRATION or HELDOUT.
        num_classes: V, or 0 for regression.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    split: np.ndarray
    num_classes: int

    unit = "example"

    def positions(self, split: int) -> np.ndarray:
        """int64 [n]: rows of a split, ascending."""
        return np.flatnonzero(self.split == split)

    def count(self, split: int) -> int:
        """Rows in a split."""
        return int((self.split == split).sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over content and splits."""
        return _digest(self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"x": self.x, "y": self.y, "split": self.split}

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        _save(Path(directory), self._arrays(), {"kind": "arrays", "name": self.name, "num_classes": self.num_classes})


Corpus = TextCorpus | ArrayCorpus


def load_corpus(directory: str | os.PathLike[str]) -> Corpus:
    """Read what `save` wrote; UserError where it is missing, of another schema, or not what its digest says."""
    directory = Path(directory)
    manifest_path, data_path = directory / "source.json", directory / "source.safetensors"
    try:
        manifest = json.loads(manifest_path.read_text())
        content = data_path.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: no readable source ({error}); run colonnade partition on a new run") from None
    if manifest.get("schema") != SCHEMA:
        raise UserError(f"{manifest_path}: schema {manifest.get('schema')}, this version reads {SCHEMA}")
    try:
        arrays = load(content)
        if _digest(arrays) != manifest["digest"]:
            raise ValueError("digest differs")
        if manifest["kind"] == "text":
            return TextCorpus(name=manifest["name"], doc_names=tuple(manifest["doc_names"]), **arrays)
        return ArrayCorpus(name=manifest["name"], num_classes=manifest["num_classes"], **arrays)
    except Exception as error:
        raise UserError(f"{data_path}: damaged ({error}); start a new run") from None


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _save(directory: Path, arrays: dict[str, np.ndarray], facts: dict) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_bytes_atomic(directory / "source.safetensors", save(arrays))
    manifest = {"schema": SCHEMA, "version": version("colonnade"), "digest": _digest(arrays), **facts}
    write_json_atomic(directory / "source.json", manifest)
