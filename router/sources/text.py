"""Bytes of any files: one file, a folder, or a glob pattern."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from ...kernels.errors import UserError


def read_documents(path: str | None) -> list[tuple[str, bytes]]:
    """(name, content) of the files that `path` names; hidden files and folders below a folder are left out.

    Raises:
        UserError: nothing given, nothing there, nothing readable, or nothing in it.
    """
    if not path:
        raise UserError("source.path: not given; name a file, a folder or a glob, as in source.path=corpus/*.txt")
    given = Path(path).expanduser()
    if given.is_file():
        files, root = [given], given.parent
    elif given.is_dir():
        files = [
            file
            for file in sorted(given.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(given).parts)
        ]
        root = given
        if not files:
            raise UserError(f"source.path={path}: the folder holds no files; name one that does")
    else:
        files = sorted(Path(found) for found in glob.glob(str(given), recursive=True) if os.path.isfile(found))
        if not files:
            raise UserError(f"source.path={path}: no such file or folder, and no file matches it; check the path")
        root = Path(os.path.commonpath([file.parent for file in files]))
    try:
        documents = [(file.relative_to(root).as_posix(), file.read_bytes()) for file in files]
    except OSError as error:
        raise UserError(f"source.path={path}: cannot read {error.filename}: {error.strerror}; mend it") from None
    if not any(content for _, content in documents):
        raise UserError(f"source.path={path}: {len(documents)} empty file(s); give some text")
    return documents
