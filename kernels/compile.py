"""How Numba functions of this package are compiled, and where the machine code is kept.

Numba notices an edit of the file that holds a function, but not of a helper in another file: it would go on running
the old code. So the cache folder is named by a digest of all sources, and lies in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba
import numpy

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = ("kernels", "router", "experts", "ensemble")


def cache_directory() -> Path:
    """Folder of the compiled code of exactly these sources, Numba and NumPy versions."""
    digest = hashlib.sha256(f"{numba.__version__} {numpy.__version__}".encode())
    for folder in _FOLDERS:
        for source in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(str(source.relative_to(_PACKAGE)).encode())
            digest.update(source.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "colonnade" / f"numba-{digest.hexdigest()[:16]}"


if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = str(cache_directory())  # pyright: ignore

jit = numba.njit(nogil=True, cache=True)
jit_inline = numba.njit(inline="always")
