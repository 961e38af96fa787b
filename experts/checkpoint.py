"""Checkpoints inside a group: two slots, written alternately, so that one is whole at every moment.

A slot holds weights, moments and counts as safetensors; the group's marker (state `running`) names the slot, its
step and its digest, holds the diagnostics so far, and is renamed into place after the slot is on disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from ..kernels.files import file_digest, write_bytes_atomic
from ..kernels.mlp_resident.contract import GroupState
from .bank import Marker, commit, read_marker
from .training import GroupProgress

_STATE_FIELDS = ("packed", "first_moment", "second_moment", "curve", "dropped", "status", "failed_step", "rate_scale",
                 "stale")  # fmt: skip
_PROGRESS_FIELDS = ("seconds", "best", "best_loss", "best_step")


def _slot_path(directory: Path, group: int, slot: int) -> Path:
    return directory / "groups" / f"{group}.slot{slot}.safetensors"


def save_checkpoint(directory: str | os.PathLike[str], group: int, slot: int, progress: GroupProgress) -> None:
    """Write a slot, then the marker that names it."""
    directory = Path(directory)
    arrays = {field: getattr(progress.state, field) for field in _STATE_FIELDS}
    arrays |= {field: getattr(progress, field) for field in _PROGRESS_FIELDS}
    arrays |= {f"fixed.{role}": values for role, values in progress.fixed.items()}
    # safetensors writes the buffer as it lies, whatever the strides
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    path = _slot_path(directory, group, slot)
    write_bytes_atomic(path, save(arrays))
    name = str(path.relative_to(directory))
    commit(
        directory,
        group,
        {
            "state": "running",
            "step": progress.step,
            "slot": slot,
            "digests": {name: file_digest(path)},
            "diagnostics": progress.diagnostics,
        },
    )


def load_checkpoint(directory: str | os.PathLike[str], group: int) -> tuple[GroupProgress, int] | None:
    """The last whole checkpoint of an unfinished group and its slot; None if there is none or it is damaged."""
    directory = Path(directory)
    marker: Marker | None = read_marker(directory, group)
    if marker is None or marker["state"] != "running":
        return None
    slot = marker["slot"]
    path = _slot_path(directory, group, slot)
    if not path.is_file() or file_digest(path) != marker["digests"].get(str(path.relative_to(directory))):
        return None
    arrays = load(path.read_bytes())
    state = GroupState(**{field: arrays[field] for field in _STATE_FIELDS})
    fixed = {name.removeprefix("fixed."): values for name, values in arrays.items() if name.startswith("fixed.")}
    progress = GroupProgress(
        step=int(marker["step"]),
        state=state,
        fixed=fixed,
        seconds=arrays["seconds"],
        best=arrays["best"],
        best_loss=arrays["best_loss"],
        best_step=arrays["best_step"],
        diagnostics=list(marker.get("diagnostics", [])),
    )
    return progress, slot


def remove_checkpoints(directory: str | os.PathLike[str], group: int) -> None:
    """Drop both slots of a group that is finished."""
    for slot in (0, 1):
        _slot_path(Path(directory), group, slot).unlink(missing_ok=True)
