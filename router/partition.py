"""Which inputs each expert trains on, as one CSR an area, in zarr.

Legend: A areas, n training inputs, G experts asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels.compile import jit
from ..kernels.errors import UserError

SCHEMA = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class AreaPartition:
    """One area's inputs, sorted by expert and ascending inside one.

    Attributes:
        offsets: int64 [E_a + 1] into `indices`.
        indices: uint32 [n], positions in the corpus.
    """

    offsets: np.ndarray
    indices: np.ndarray

    def group(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(offsets int64 [G + 1] from 0, indices uint32) of `count` experts from local number `first`."""
        offsets = np.asarray(self.offsets[first : first + count + 1])
        return offsets - offsets[0], np.asarray(self.indices[int(offsets[0]) : int(offsets[-1])])


def build(assigned: np.ndarray, positions: np.ndarray, first_expert: np.ndarray) -> list[AreaPartition]:
    """Partitions of all areas.

    Args:
        assigned: int32 [n, A], global experts.
        positions: int64 [n], ascending.
        first_expert: int64 [A + 1].

    Raises:
        UserError: positions that do not fit 32 bits.
    """
    if len(positions) and positions[-1] >= 1 << 32:
        raise UserError("the source holds more than 2**32 bytes or rows; give a smaller one")
    areas = []
    for a in range(assigned.shape[1]):
        local = assigned[:, a] - np.int32(first_expert[a])
        experts = int(first_expert[a + 1] - first_expert[a])
        offsets = np.concatenate([[0], np.cumsum(np.bincount(local, minlength=experts))]).astype(np.int64)
        indices = np.empty(len(positions), np.uint32)
        _scatter(local, positions, offsets[:-1].copy(), indices)
        areas.append(AreaPartition(offsets, indices))
    return areas


@jit
def _scatter(local, positions, cursors, indices):
    """Counting sort: each position goes to its expert's next place."""
    for i in range(local.size):
        indices[cursors[local[i]]] = positions[i]
        cursors[local[i]] += 1


def save(directory: str | os.PathLike[str], areas: list[AreaPartition]) -> None:
    """Write a zarr group an area into a folder."""
    import zarr

    root = zarr.open_group(Path(directory), mode="w", attributes={"schema": SCHEMA})
    for number, area in enumerate(areas):
        group = root.create_group(str(number))
        for name in ("offsets", "indices"):
            values = getattr(area, name)
            array: Any = group.create_array(
                name,
                shape=values.shape,
                chunks=(min(max(len(values), 1), _CHUNK),),
                dtype=values.dtype,
                compressors=None,
            )
            if len(values):
                array[:] = values


def open_partition(directory: str | os.PathLike[str]) -> list[AreaPartition]:
    """The areas with `offsets` in memory and `indices` read slice by slice; UserError where it cannot be read."""
    import zarr

    try:
        root = zarr.open_group(Path(directory), mode="r")
        if root.attrs.get("schema") != SCHEMA:
            raise ValueError(f"schema {root.attrs.get('schema')}, this version reads {SCHEMA}")
        return [
            AreaPartition(np.asarray(root[f"{number}/offsets"][:]), root[f"{number}/indices"])  # type: ignore[index,arg-type]
            for number in range(len(list(root.group_keys())))
        ]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{directory}: no readable partition ({error}); start a new run") from None


def sizes(areas: list[AreaPartition]) -> np.ndarray:
    """Inputs of every expert, int64 [E]."""
    return np.concatenate([np.diff(area.offsets) for area in areas])
