"""The running interpreter's own standard library: real text on every machine, nothing to download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from ...kernels.errors import UserError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_documents() -> list[tuple[str, bytes]]:
    """(path below the library, content) of every .py file, without packages installed on top and without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts) and path.is_file():
            documents.append((name.as_posix(), path.read_bytes()))
    if not documents:
        raise UserError(f"source=stdlib: no .py files in {root}; use source=text source.path=...")
    return documents
