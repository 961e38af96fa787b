"""Training a group of experts: initial weights, the family's loop, and what became of each expert."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..kernels.mlp_resident.contract import CURVE_POINTS, REASONS, STATUS_OK, GroupState
from .families.base import Inputs, TrainSpec

# inputs held back are looked at up to this many at a time
_LOOK_INPUTS = 512


@dataclass(frozen=True)
class GroupResult:
    """A trained group.

    Attributes:
        weights: float32 by role, leading axis G. An expert that failed or holds no inputs has zeros in what is
            trained.
        columns: lists of length G: expert, size, loss_first, loss_last (nats, first and last tenth of the run; None
            where there is none), kept_step (steps behind the weights that are kept), dropped_pairs, seconds, state
            (done, failed or cold), reason.
        diagnostics: of the experts looked at; see `diagnostics.diagnose`.
    """

    weights: dict[str, np.ndarray]
    columns: dict[str, list]
    diagnostics: list[dict]


@dataclass
class GroupProgress:
    """A group between two stretches of steps: what a checkpoint holds.

    Attributes:
        step: steps done.
        state: weights, moments and counts.
        fixed: roles that are not trained, each [G, ...].
        seconds: float64 [G], CPU-seconds of the thread in the loop.
        best: float32 [G, T] weights with the lowest loss on the slice held back, or [G, 0] where none is.
        best_loss: float64 [G].
        best_step: int64 [G], steps done then.
        diagnostics: what was found of the estimates.
    """

    step: int
    state: GroupState
    fixed: dict[str, np.ndarray]
    seconds: np.ndarray
    best: np.ndarray
    best_loss: np.ndarray
    best_step: np.ndarray
    diagnostics: list[dict] = field(default_factory=list)


def start_group(
    spec: TrainSpec, inputs: Inputs, indices: np.ndarray, offsets: np.ndarray, expert_ids: np.ndarray
) -> GroupProgress:
    """A group before its first step."""
    kept = [_kept(spec, indices[offsets[e] : offsets[e + 1]]) for e in range(len(expert_ids))]
    packed, fixed = spec.initial(
        inputs, np.concatenate(kept) if kept else indices, _offsets([len(own) for own in kept]), expert_ids
    )
    group = len(expert_ids)
    return GroupProgress(
        0,
        GroupState.fresh(packed, spec.optimizer),
        fixed,
        np.zeros(group),
        packed.copy() if spec.train.hold_back else np.zeros((group, 0), np.float32),
        np.full(group, np.inf),
        np.zeros(group, np.int64),
    )


def _offsets(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _kept(spec: TrainSpec, own: np.ndarray) -> np.ndarray:
    """What an expert is trained on; the last inputs, in the order of the corpus, are held back."""
    return own[: len(own) - int(spec.train.hold_back * len(own))]


def advance_group(
    spec: TrainSpec,
    inputs: Inputs,
    indices: np.ndarray,
    offsets: np.ndarray,
    expert_ids: np.ndarray,
    progress: GroupProgress,
    last_step: int,
    report: Callable[[int], None] | None = None,
) -> None:
    """Run every expert of the group up to `last_step`; `report(k)` is called after the k-th expert."""
    if spec.coupled:
        began = time.thread_time()
        own = [indices[offsets[e] : offsets[e + 1]] for e in range(len(expert_ids))]
        spec.run_together(inputs, own, expert_ids, progress.state, progress.step, last_step, progress.fixed)
        progress.seconds += (time.thread_time() - began) / len(expert_ids)
        progress.step = last_step
        if report:
            report(len(expert_ids))
        return
    for e in range(len(expert_ids)):
        own = indices[offsets[e] : offsets[e + 1]]
        began = time.thread_time()
        _advance_expert(spec, inputs, own, expert_ids[e : e + 1], progress, e, last_step)
        progress.seconds[e] += time.thread_time() - began
        if report:
            report(e + 1)
    progress.step = last_step


def _advance_expert(
    spec: TrainSpec,
    inputs: Inputs,
    own: np.ndarray,
    expert_id: np.ndarray,
    progress: GroupProgress,
    e: int,
    last_step: int,
) -> None:
    if getattr(inputs, "memory_is_computed", False):
        inputs, own = inputs.gathered(own), np.arange(len(own), dtype=own.dtype)
    alone = slice(e, e + 1)
    state = progress.state
    one = GroupState(**{name: getattr(state, name)[alone] for name in GroupState.__dataclass_fields__})
    kept = _kept(spec, own)
    fixed = {role: values[alone] for role, values in progress.fixed.items()}
    every = spec.train.diagnose_every
    if not len(kept) or int(expert_id[0]) % spec.train.diagnose_stride:
        every = 0
    holds = 0 < len(kept) < len(own)
    if not holds and not every:
        spec.run(inputs, kept, expert_id, one, progress.step, last_step, fixed)
        return
    held = own[len(kept) :][:_LOOK_INPUTS]
    offset = fixed["b0"][0] if "b0" in fixed else None
    steps, looks = spec.train.steps, spec.train.looks
    if holds and progress.step == 0:
        progress.best_loss[e] = spec.loss(inputs, held, one.packed[0], offset)
    # looks are at fixed steps, wherever a checkpoint cuts the run
    stops = {steps * look // looks for look in range(1, looks + 1)} if holds else set()
    first = progress.step
    pauses = {stop for stop in stops | set(range(0, steps, every or steps)) if first < stop < last_step}
    if every and first == 0:
        _note(spec, inputs, kept, one, int(expert_id[0]), 0, progress)
    for stop in [*sorted(pauses), last_step]:
        spec.run(inputs, kept, expert_id, one, first, stop, fixed)
        first = stop
        if every and stop < steps and stop % every == 0:
            _note(spec, inputs, kept, one, int(expert_id[0]), stop, progress)
        if stop in stops and one.status[0] == STATUS_OK:
            loss = spec.loss(inputs, held, one.packed[0], offset)
            one.stale += 1
            if loss < progress.best_loss[e]:
                progress.best_loss[e], progress.best_step[e] = loss, stop
                progress.best[e] = one.packed[0]
                one.stale[:] = 0
            if spec.patience and one.stale[0] >= spec.patience:
                one.rate_scale /= 2
                one.stale[:] = 0


def _note(
    spec: TrainSpec, inputs: Inputs, own: np.ndarray, one: GroupState, expert: int, step: int, progress: GroupProgress
) -> None:
    found = spec.diagnose(inputs, own, expert, one.packed[0], step) if one.status[0] == STATUS_OK else None
    if found:
        progress.diagnostics.append(found)


def finish_group(spec: TrainSpec, offsets: np.ndarray, expert_ids: np.ndarray, progress: GroupProgress) -> GroupResult:
    """Weights and columns of a group whose last step is done."""
    state = progress.state
    sizes = np.diff(offsets)
    usable = (state.status == STATUS_OK) & (sizes > 0)
    steps = spec.train.steps
    packed, kept_step = state.packed, np.full(len(expert_ids), steps)
    looked = np.isfinite(progress.best_loss)
    if progress.best.shape[1]:
        packed = np.where(looked[:, None], progress.best, packed)
        kept_step = np.where(looked, progress.best_step, steps)
    weights = spec.unpack(packed)
    for values in weights.values():
        values[~usable] = 0
    weights |= progress.fixed
    tenths = np.bincount(np.arange(steps) * CURVE_POINTS // steps, minlength=CURVE_POINTS)
    columns: dict[str, list] = {
        "expert": [int(expert) for expert in expert_ids],
        "size": [int(size) for size in sizes],
        "loss_first": [],
        "loss_last": [],
        "kept_step": [int(step) for step in kept_step],
        "dropped_pairs": [int(count) for count in state.dropped],
        "seconds": [round(float(seconds), 6) for seconds in progress.seconds],
        "state": [],
        "reason": [],
    }
    held = np.flatnonzero(tenths)
    for e in range(len(expert_ids)):
        curve = state.curve[e, held] / tenths[held]
        columns["loss_first"].append(float(curve[0]) if usable[e] else None)
        columns["loss_last"].append(float(curve[-1]) if usable[e] else None)
        failed = state.status[e] != STATUS_OK
        columns["state"].append("failed" if failed else "done" if sizes[e] else "cold")
        columns["reason"].append(f"{REASONS[int(state.status[e])]} (step {state.failed_step[e]})" if failed else "")
    return GroupResult(weights, columns, progress.diagnostics)


def train_group(
    spec: TrainSpec,
    inputs: Inputs,
    indices: np.ndarray,
    offsets: np.ndarray,
    expert_ids: np.ndarray,
    report: Callable[[int], None] | None = None,
) -> GroupResult:
    """Train a group from start to finish in the calling thread.

    Args:
        spec: what decides the result.
        inputs: the corpus.
        indices: uint32 [n], inputs of the experts, one expert after another.
        offsets: int64 [G + 1] into `indices`.
        expert_ids: int64 [G], global.
        report: called with the number of experts done so far.
    """
    progress = start_group(spec, inputs, indices, offsets, expert_ids)
    advance_group(spec, inputs, indices, offsets, expert_ids, progress, spec.train.steps, report)
    return finish_group(spec, offsets, expert_ids, progress)


def train_seed(spec: TrainSpec, inputs: Inputs, positions: np.ndarray, seed_id: int) -> np.ndarray:
    """Weights packed [T] of one expert trained on a sample of everything; UserError if it fails.

    Args:
        spec: of the seed: its steps and rates may differ from the experts'.
        inputs: the corpus.
        positions: uint32 [n], the sample.
        seed_id: names its draws; must be no expert's id.
    """
    from ..kernels.errors import UserError

    offsets, ids = np.array([0, len(positions)]), np.array([seed_id])
    progress = start_group(spec, inputs, positions, offsets, ids)
    advance_group(spec, inputs, positions, offsets, ids, progress, spec.train.steps)
    status = int(progress.state.status[0])
    if status != STATUS_OK:
        raise UserError(
            f"seed_expert: {REASONS[status]} (step {progress.state.failed_step[0]}); lower seed_expert.learning_rate"
        )
    return progress.state.packed[0].copy()


def warm_up(spec: TrainSpec, inputs: Inputs) -> None:
    """Compile the loop (or load it from the cache) before workers fan out, on an expert without inputs."""
    if spec.backend != "numba":
        return
    nothing, ids = np.zeros(0, np.uint32), np.zeros(1, np.int64)
    progress = start_group(spec, inputs, nothing, np.zeros(2, np.int64), ids)
    advance_group(spec, inputs, nothing, np.zeros(2, np.int64), ids, progress, 0)
