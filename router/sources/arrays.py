"""Matrices: `x` [N, F0] and `y` [N] of an .npz file, or given directly."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from ...kernels.errors import UserError
from .corpus import SPLIT_NAMES, ArrayCorpus
from .splits import split_rows


def build(name: str, x: np.ndarray, y: np.ndarray, split: np.ndarray | None, seed: int) -> ArrayCorpus:
    """Check and split a matrix and its targets.

    Args:
        name: for messages.
        x: numbers [N, F0], finite.
        y: [N]; integers are classes 0, 1, ..., floats a quantity.
        split: [N] of 0, 1, 2 or of train, calibration, heldout; None to split by hashes of the row numbers.
        seed: salts those hashes.

    Raises:
        UserError: a shape, type or value that cannot be used, with the rows concerned.
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim != 2 or x.shape[1] < 1:
        raise UserError(f"{name}: x has shape {x.shape}, expected [examples, features]")
    if y.shape != (len(x),):
        raise UserError(f"{name}: y has shape {y.shape}, expected ({len(x)},): one target for each row of x")
    if x.dtype.kind not in "fiub":
        raise UserError(f"{name}: x has dtype {x.dtype}, expected numbers")
    if y.dtype.kind not in "fiub":
        raise UserError(f"{name}: y has dtype {y.dtype}, expected integers (classes) or floats")
    x = np.ascontiguousarray(x, np.float32)
    bad = np.flatnonzero(~np.isfinite(x).all(1))
    if len(bad):
        raise UserError(f"{name}: x is not finite in {len(bad)} row(s), the first {_rows(bad)}; clean or drop them")
    if y.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(y))
        if len(bad):
            raise UserError(f"{name}: y is not finite in {len(bad)} row(s), the first {_rows(bad)}; drop them")
        splits = split_rows(len(x), seed) if split is None else _given_split(name, np.asarray(split), len(x))
        return ArrayCorpus(name, x, y.astype(np.float32), splits, 0)
    y = y.astype(np.int64)
    bad = np.flatnonzero(y < 0)
    if len(bad):
        raise UserError(f"{name}: y is negative in {len(bad)} row(s), the first {_rows(bad)}; number classes from 0")
    num_classes = int(y.max(initial=0)) + 1
    missing = np.flatnonzero(np.bincount(y, minlength=num_classes) == 0)
    if len(missing) or num_classes < 2:
        what = f"class {missing[0]} never occurs" if len(missing) else "there is only one class"
        raise UserError(f"{name}: y goes up to {num_classes - 1}, but {what}; number the classes 0, 1, ...")
    splits = split_rows(len(x), seed) if split is None else _given_split(name, np.asarray(split), len(x))
    return ArrayCorpus(name, x, y, splits, num_classes)


def _rows(rows: np.ndarray) -> str:
    return ", ".join(str(row) for row in rows[:5])


def _given_split(name: str, split: np.ndarray, count: int) -> np.ndarray:
    if split.shape != (count,):
        raise UserError(f"{name}: split has shape {split.shape}, expected ({count},)")
    if split.dtype.kind == "U":
        unknown = sorted(set(split.tolist()) - set(SPLIT_NAMES))
        if unknown:
            raise UserError(f"{name}: split holds {unknown[0]!r}; known: {', '.join(SPLIT_NAMES)}")
        split = np.array([SPLIT_NAMES.index(entry) for entry in split.tolist()])
    if split.dtype.kind not in "iu" or not np.isin(split, (0, 1, 2)).all():
        raise UserError(f"{name}: split must hold 0, 1, 2 or {', '.join(SPLIT_NAMES)}")
    for number, label in enumerate(SPLIT_NAMES):
        if not (split == number).any():
            raise UserError(f"{name}: split leaves {label} empty; give every split at least one row")
    return split.astype(np.uint8)


def read(path: str | None, seed: int) -> ArrayCorpus:
    """The corpus of an .npz file with `x`, `y` and, if it brings its own splits, `split`."""
    if not path:
        raise UserError("source.path: not given; name an .npz file with arrays x [n, f] and y [n]")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"source.path={path}: no such file; name an .npz file with arrays x [n, f] and y [n]")
    try:
        with np.load(file, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UserError(f"source.path={path}: one bare array; save with numpy.savez(path, x=..., y=...)")
            arrays = {key: archive[key] for key in archive.files if key in ("x", "y", "split")}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"source.path={path}: not an .npz file of plain arrays ({error})") from None
    for key in ("x", "y"):
        if key not in arrays:
            raise UserError(f"source.path={path}: has no array {key}; save with numpy.savez(path, x=..., y=...)")
    return build(f"source.path={path}", arrays["x"], arrays["y"], arrays.get("split"), seed)
