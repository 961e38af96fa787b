"""Fitted state on disk: arrays as safetensors beside a JSON manifest that states their digest."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from ..kernels.files import file_digest, write_bytes_atomic, write_json_atomic

SCHEMA = 1


def save_state(directory: str | os.PathLike[str], name: str, arrays: dict[str, np.ndarray], facts: dict) -> None:
    """Write `name`.safetensors and `name`.json into a folder, which is made."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.safetensors"
    write_bytes_atomic(path, save({key: np.ascontiguousarray(array) for key, array in arrays.items()}))
    manifest = {"schema": SCHEMA, "version": version("colonnade"), "digest": file_digest(path), **facts}
    write_json_atomic(directory / f"{name}.json", manifest)


def load_state(directory: str | os.PathLike[str], name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, manifest) of what `save_state` wrote.

    Raises:
        OSError, ValueError, KeyError: missing, damaged, or of another schema; the caller knows how to mend it.
    """
    path = Path(directory) / f"{name}.safetensors"
    manifest = json.loads((Path(directory) / f"{name}.json").read_text())
    if manifest["schema"] != SCHEMA:
        raise ValueError(f"schema {manifest['schema']}, this version reads {SCHEMA}")
    if file_digest(path) != manifest["digest"]:
        raise ValueError("digest differs")
    return load(path.read_bytes()), manifest
