"""Where trained experts lie on disk, and what says that a group is finished.

Weights are zarr v3 arrays, one a role, a chunk an expert, a shard a group: row g * group_size + i is the i-th expert
of group g. A group's writer writes its shards whole, fsyncs them, then renames the marker `groups/<g>.json` into
place, which names every file with its digest. Readers believe markers only.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels.errors import UserError
from ..kernels.files import file_digest, fsync_directory, write_json_atomic

SCHEMA = 1
Marker = dict[str, Any]


class Bank:
    """Weights of all experts of a training directory.

    Args:
        directory: the training directory; weights go to `bank/` in it.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._arrays: dict[str, Any] = {}

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        shapes: dict[str, tuple[int, ...]],
        num_groups: int,
        group_size: int,
    ) -> Bank:
        """Make the empty arrays; those that exist already are kept if they have the same shapes.

        Args:
            directory: the training directory.
            shapes: shape of one expert's weights by role.
            num_groups: groups in the plan.
            group_size: experts in a full group.
        """
        import zarr

        bank = cls(directory)
        for role, shape in shapes.items():
            full = (num_groups * group_size, *shape)
            path = bank.directory / "bank" / role
            if path.exists():
                existing = tuple(zarr.open_array(path, mode="r").shape)
                if existing != full:
                    raise UserError(f"{path}: has shape {existing}, the plan needs {full}; start a new run directory")
                continue
            zarr.create_array(
                path,
                shape=full,
                chunks=(1, *shape),
                shards=(group_size, *shape),
                dtype="float32",
                compressors=None,
                fill_value=0,
            )
        (bank.directory / "groups").mkdir(exist_ok=True)
        return bank

    def _array(self, role: str) -> Any:
        import zarr

        if role not in self._arrays:
            path = self.directory / "bank" / role
            if not path.exists():
                raise UserError(f"{path}: missing; train the run again, or copy the run directory whole")
            self._arrays[role] = zarr.open_array(path, mode="r+")
        return self._arrays[role]

    def roles(self) -> list[str]:
        """Roles that the bank holds, sorted."""
        return sorted(path.name for path in (self.directory / "bank").iterdir() if path.is_dir())

    def write_group(self, group: int, weights: dict[str, np.ndarray]) -> dict[str, str]:
        """Write a group's shards whole, fsync them, and return their digests by path relative to the directory.

        Args:
            group: its number in the plan.
            weights: float32 by role, leading axis the group's experts (a short group's shard is filled with zeros).
        """
        digests = {}
        for role, values in weights.items():
            array = self._array(role)
            size = array.shards[0]
            whole = np.zeros((size, *array.shape[1:]), np.float32)
            whole[: len(values)] = values
            array[group * size : (group + 1) * size] = whole
            shard = self.shard_path(role, group)
            if not shard.exists():
                # zarr leaves out a shard that holds nothing but the fill value
                continue
            with open(shard, "rb+") as file:
                os.fsync(file.fileno())
            fsync_directory(shard.parent)
            digests[str(shard.relative_to(self.directory))] = file_digest(shard)
        return digests

    def read_group(self, group: int, count: int) -> dict[str, np.ndarray]:
        """Weights by role of the first `count` experts of a group."""
        return self.read_experts(group, np.arange(count))

    def read_experts(self, group: int, places: np.ndarray) -> dict[str, np.ndarray]:
        """Weights by role of the experts at `places`, int [n], of a group; of its files only theirs is read."""
        read = {}
        for role in self.roles():
            array = self._array(role)
            shape = tuple(array.shape[1:])
            path = self.shard_path(role, group)
            if not path.exists():
                read[role] = np.zeros((len(places), *shape), np.float32)
                continue
            read[role] = _read_shard(path, array.shards[0], shape, places)
        return read

    def shard_path(self, role: str, group: int) -> Path:
        """File of a group's shard."""
        array = self._array(role)
        return self.directory / "bank" / role / "c" / str(group) / "/".join("0" for _ in array.shape[1:])


def _read_shard(path: Path, size: int, shape: tuple[int, ...], places: np.ndarray) -> np.ndarray:
    """Some experts of a shard, float32 [n, *shape]: fifty times as fast as asking zarr for its chunks one by one.

    A shard file holds its chunks, here uncompressed, in any order, then the index: offset and length of every chunk
    as 64-bit numbers (both all ones where it is left out) and a CRC-32C (zarr specification, sharding codec 1.0).
    """
    content = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    index_bytes = 16 * size
    chunk_bytes = 4 * int(np.prod(shape))
    values = np.zeros((len(places), chunk_bytes), np.uint8)
    index = np.array(content[-index_bytes - 4 : -4])
    if index.size != index_bytes:
        raise UserError(f"{path}: is cut short; train its group again with colonnade launch resume=true")
    for row, (offset, length) in enumerate(index.view("<u8").reshape(size, 2)[places].tolist()):
        if offset == (1 << 64) - 1:
            continue
        if length != chunk_bytes or offset + length > content.size:
            raise UserError(f"{path}: its index is damaged; train its group again with colonnade launch resume=true")
        values[row] = content[offset : offset + length]
    return values.view("<f4").reshape(len(places), *shape)


def marker_path(directory: str | os.PathLike[str], group: int) -> Path:
    """`groups/<g>.json` of a training directory."""
    return Path(directory) / "groups" / f"{group}.json"


def commit(directory: str | os.PathLike[str], group: int, marker: Marker) -> None:
    """Make a group's state visible: from here on readers believe it, and it survives a crash."""
    full = {"schema": SCHEMA, "version": version("colonnade"), "group": group, **marker}
    write_json_atomic(marker_path(directory, group), full)


def read_marker(directory: str | os.PathLike[str], group: int) -> Marker | None:
    """The marker of a group, None if it has none; UserError if it cannot be believed."""
    path = marker_path(directory, group)
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        marker = json.loads(text)
        schema, number = marker["schema"], marker["group"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is not a group marker; delete it and launch again with resume=true") from None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema {schema}, this version reads {SCHEMA}; use the version that wrote the run")
    if number != group:
        raise UserError(f"{path}: speaks of group {number}; delete it and launch again with resume=true")
    return marker


def damaged_files(directory: str | os.PathLike[str], marker: Marker) -> list[str]:
    """Files of a marker that are missing or whose bytes are not those committed, by relative path."""
    directory = Path(directory)
    damaged = []
    for name, digest in marker["digests"].items():
        path = directory / name
        if not path.is_file() or file_digest(path) != digest:
            damaged.append(name)
    return damaged
