"""Durable small files: a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to a temporary name beside `path`, fsync, rename, fsync the folder."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as JSON (NaN and infinity are refused) with `write_bytes_atomic`."""
    write_bytes_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames inside the folder `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
