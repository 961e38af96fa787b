"""Training one group of a training directory, from whatever is left of it to its commit marker."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from .bank import Bank, commit
from .checkpoint import load_checkpoint, remove_checkpoints, save_checkpoint
from .families.base import Inputs, TrainSpec
from .training import advance_group, finish_group, start_group


def train_and_commit(
    directory: str | os.PathLike[str],
    bank: Bank,
    group: int,
    area: int,
    spec: TrainSpec,
    inputs: Inputs,
    indices: np.ndarray,
    offsets: np.ndarray,
    expert_ids: np.ndarray,
    checkpoint_every: int = 0,
    report: Callable[[int], None] | None = None,
) -> dict:
    """Train group `group` of `directory` and commit it; returns the marker's content.

    With `checkpoint_every` the state is saved every so many steps, and an earlier checkpoint is continued: the
    result is the same bit for bit. `report(k)` is called as experts finish a stretch of steps.
    """
    steps = spec.train.steps
    found = load_checkpoint(directory, group) if checkpoint_every else None
    progress, slot = found or (start_group(spec, inputs, indices, offsets, expert_ids), 1)
    while checkpoint_every and progress.step + checkpoint_every < steps:
        stop = (progress.step // checkpoint_every + 1) * checkpoint_every
        advance_group(spec, inputs, indices, offsets, expert_ids, progress, stop)
        slot = 1 - slot
        save_checkpoint(directory, group, slot, progress)
    advance_group(spec, inputs, indices, offsets, expert_ids, progress, steps, report)
    result = finish_group(spec, offsets, expert_ids, progress)
    digests = bank.write_group(group, result.weights)
    columns = result.columns
    marker = {
        "state": "done",
        "step": steps,
        "area": area,
        "first_expert": int(expert_ids[0]),
        "num_experts": len(expert_ids),
        "digests": digests,
        "failed": [
            {"expert": expert, "reason": reason}
            for expert, state, reason in zip(columns["expert"], columns["state"], columns["reason"], strict=True)
            if state == "failed"
        ],
        "experts": columns,
        "diagnostics": result.diagnostics,
    }
    commit(directory, group, marker)
    remove_checkpoints(directory, group)
    return marker
