"""Training a group of experts: initial weights, the resident loop, and what became of each expert."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..kernels.errors import UserError
from ..kernels.mlp_resident.contract import (
    CURVE_POINTS,
    DIRECTIONS,
    ESTIMATORS,
    HADAMARD,
    HEADS,
    OPTIMIZERS,
    REASONS,
    STATUS_OK,
    GroupState,
    Inputs,
    MlpShape,
    Recipe,
)
from .config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from .mlp import count_biases, initial_body

BACKENDS = ("numba", "reference")


@dataclass(frozen=True)
class TrainSpec:
    """All that decides an expert's result besides its id and its inputs.

    Attributes:
        shape: sizes of an expert.
        recipe: the loop's settings.
        frequencies: float64 [V], class frequencies of the training split.
        prior_strength: see `ExpertConfig`.
        backend: `numba` or `reference`.
    """

    shape: MlpShape
    recipe: Recipe
    frequencies: np.ndarray
    prior_strength: float
    backend: str

    @property
    def evaluations_per_step(self) -> int:
        """Forward passes of a batch in one step of the body's estimate; the head's scalar pairs are not passes."""
        if self.recipe.estimator == ESTIMATORS["spsa"]:
            return 2 * self.recipe.num_perturbations
        if self.recipe.estimator == ESTIMATORS["activation"] and self.recipe.train_body:
            return 1 + 2 * self.recipe.num_perturbations
        return 1


@dataclass(frozen=True)
class GroupResult:
    """A trained group.

    Attributes:
        weights: float32 by role, leading axis G: w1, b1, w2, b2, and b0, the biases before training. An expert
            that failed or holds no inputs has zeros, with its b0.
        columns: lists of length G: expert, size, loss_first, loss_last (nats, first and last tenth of the run; None
            where there is none), dropped_pairs, seconds, state (done, failed or cold), reason.
    """

    weights: dict[str, np.ndarray]
    columns: dict[str, list]


def build_spec(
    expert: ExpertConfig,
    estimator: EstimatorConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    num_features: int,
    frequencies: np.ndarray,
    backend: str = "numba",
) -> TrainSpec:
    """The spec of a run; UserError where the parts do not fit together."""
    if backend not in BACKENDS:
        raise UserError(f"backend={backend}: unknown; known: {', '.join(BACKENDS)}")
    shape = MlpShape(num_features, expert.hidden, expert.num_outputs, HEADS[expert.head])
    basis = 32 * shape.sign_words
    basis = 1 << (basis - 1).bit_length()
    if (
        estimator.name == "activation"
        and DIRECTIONS[estimator.directions] == HADAMARD
        and estimator.num_perturbations > basis
    ):
        raise UserError(
            f"estimator.num_perturbations={estimator.num_perturbations}: the Hadamard basis of "
            f"expert.hidden={expert.hidden} has {basis} rows; use fewer, or estimator.directions=signs"
        )
    recipe = Recipe(
        estimator=ESTIMATORS[estimator.name],
        directions=DIRECTIONS[estimator.directions],
        num_perturbations=estimator.num_perturbations,
        perturbation_size=estimator.perturbation_size,
        head_perturbation_size=estimator.head_perturbation_size,
        optimizer=OPTIMIZERS[optimizer.name],
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        clip_norm=optimizer.clip_norm,
        weight_decay=optimizer.weight_decay,
        train_body=expert.train_body,
        batch=train.batch,
        learning_rates=learning_rates(optimizer, train.steps),
        seed=train.seed,
    )
    return TrainSpec(shape, recipe, frequencies, expert.prior_strength, backend)


def learning_rates(optimizer: OptimizerConfig, steps: int) -> np.ndarray:
    """Rate of every step, float32 [steps]."""
    last = optimizer.final_fraction if optimizer.schedule == "linear" else 1.0
    return (optimizer.learning_rate * np.linspace(1.0, last, steps)).astype(np.float32)


def parameter_split(spec: TrainSpec) -> tuple[int, int]:
    """(sampled, exact): parameters whose gradient is estimated from few random directions, and those whose gradient
    comes from a difference at a scalar of their own (or from calculus)."""
    body, total = spec.shape.num_body_parameters, spec.shape.num_parameters
    if spec.recipe.estimator == ESTIMATORS["spsa"]:
        return (total if spec.recipe.train_body else total - body), 0
    if spec.recipe.estimator == ESTIMATORS["activation"] and spec.recipe.train_body:
        return body, total - body
    return 0, total


def _loop(backend: str):
    # each backend brings its own heavy imports
    if backend == "numba":
        from ..kernels.mlp_resident import numba as module
    else:
        from ..kernels.mlp_resident import reference as module
    return module.train_group


def targets_of(inputs: Inputs, positions: np.ndarray) -> np.ndarray:
    """Targets of the inputs at `positions`, int [n]."""
    if inputs.text is not None:
        return inputs.text[positions]
    assert inputs.y is not None
    return inputs.y[positions]


def initial_weights(
    spec: TrainSpec, inputs: Inputs, indices: np.ndarray, offsets: np.ndarray, expert_ids: np.ndarray
) -> dict[str, np.ndarray]:
    """Weights by role of a group before its first step; b0 is the count bias."""
    shape = spec.shape
    group = len(expert_ids)
    weights = {role: np.zeros((group, *sizes), np.float32) for role, sizes in shape.roles.items()}
    counts = np.zeros((group, shape.num_outputs), np.int64)
    for e, expert in enumerate(expert_ids):
        own = indices[offsets[e] : offsets[e + 1]]
        counts[e] = np.bincount(targets_of(inputs, own), minlength=shape.num_outputs)
        weights["w1"][e] = initial_body(shape, spec.recipe.seed, int(expert))
    weights["b0"] = count_biases(shape, counts, spec.frequencies, spec.prior_strength)
    weights["b2"][...] = weights["b0"]
    return weights


@dataclass
class GroupProgress:
    """A group between two stretches of steps: what a checkpoint holds.

    Attributes:
        step: steps done.
        state: weights, moments and counts.
        b0: float32 [G, R] count biases.
        seconds: float64 [G] in the loop.
    """

    step: int
    state: GroupState
    b0: np.ndarray
    seconds: np.ndarray


def start_group(
    spec: TrainSpec, inputs: Inputs, indices: np.ndarray, offsets: np.ndarray, expert_ids: np.ndarray
) -> GroupProgress:
    """A group before its first step."""
    weights = initial_weights(spec, inputs, indices, offsets, expert_ids)
    state = GroupState.fresh(spec.shape.pack(weights), spec.recipe.optimizer)
    return GroupProgress(0, state, weights["b0"], np.zeros(len(expert_ids)))


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
    loop = _loop(spec.backend)
    state = progress.state
    for e in range(len(expert_ids)):
        alone = slice(e, e + 1)
        one = GroupState(
            packed=state.packed[alone],
            first_moment=state.first_moment[alone],
            second_moment=state.second_moment[alone],
            curve=state.curve[alone],
            dropped=state.dropped[alone],
            status=state.status[alone],
            failed_step=state.failed_step[alone],
        )
        own = indices[offsets[e] : offsets[e + 1]]
        began = time.perf_counter()
        loop(
            spec.shape,
            spec.recipe,
            inputs,
            own,
            np.array([0, len(own)]),
            expert_ids[alone],
            one,
            progress.step,
            last_step,
        )
        progress.seconds[e] += time.perf_counter() - began
        if report:
            report(e + 1)
    progress.step = last_step


def finish_group(spec: TrainSpec, offsets: np.ndarray, expert_ids: np.ndarray, progress: GroupProgress) -> GroupResult:
    """Weights and columns of a group whose last step is done."""
    state = progress.state
    sizes = np.diff(offsets)
    usable = (state.status == STATUS_OK) & (sizes > 0)
    weights = spec.shape.unpack(state.packed)
    for values in weights.values():
        values[~usable] = 0
    weights["b0"] = progress.b0
    steps = len(spec.recipe.learning_rates)
    tenths = np.bincount(np.arange(steps) * CURVE_POINTS // steps, minlength=CURVE_POINTS)
    columns: dict[str, list] = {
        "expert": [int(expert) for expert in expert_ids],
        "size": [int(size) for size in sizes],
        "loss_first": [],
        "loss_last": [],
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
    return GroupResult(weights, columns)


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
    advance_group(spec, inputs, indices, offsets, expert_ids, progress, len(spec.recipe.learning_rates), report)
    return finish_group(spec, offsets, expert_ids, progress)


def warm_up(spec: TrainSpec, inputs: Inputs) -> None:
    """Compile the loop (or load it from the cache) before workers fan out, on a group without inputs."""
    if spec.backend == "reference":
        return
    progress = start_group(spec, inputs, np.zeros(0, np.uint32), np.zeros(2, np.int64), np.zeros(1, np.int64))
    advance_group(spec, inputs, np.zeros(0, np.uint32), np.zeros(2, np.int64), np.zeros(1, np.int64), progress, 0)
