"""The general loop: weight-space estimators around any family that can say what candidates lose on a batch.

Legend: K candidates, T parameters of an expert, B examples of a batch, P probes, N experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident.contract import (
    CURVE_POINTS,
    LAYER_NORMAL,
    OPTIMIZERS,
    STATUS_NO_FINITE_PAIR,
    STATUS_NONFINITE_WEIGHT,
    STATUS_OK,
    GroupState,
)
from ...kernels.mlp_resident.reference import update
from ...kernels.philox import reference as philox
from ..config import RULES, EstimatorConfig, OptimizerConfig, TrainConfig
from ..estimators import WeightEstimator
from ..schedules import learning_rates

COUPLINGS = ("independent", "summed")


class Body(Protocol):
    """What an expert is, to the general loop."""

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Shapes of an expert's parameters, in the order in which they lie in the flat vector."""
        ...

    def dense(self) -> np.ndarray | None:
        """bool [T]: parameters that sparse directions always hold, or None."""
        ...

    def initial(self, seed: int, expert: int) -> np.ndarray:
        """float32 [T] before the first step."""
        ...

    def losses(
        self, candidates: np.ndarray, inputs: Any, positions: np.ndarray, offset: np.ndarray, draw: tuple[int, int, int]
    ) -> np.ndarray:
        """Losses float [K, B] (nats) of candidates float32 [K, T] on inputs.

        Args:
            candidates: weight vectors.
            inputs: the corpus.
            positions: int64 [B].
            offset: what is fixed for this expert and not trained (its b0), or empty.
            draw: (seed, step, expert), which names whatever a forward pass draws: the same for all candidates of a
                step, so that both ends of a pair see the same.
        """
        ...


@dataclass(frozen=True)
class RoleLowRank(WeightEstimator):
    """Low-rank directions role by role: A B^T / sqrt(r) for matrices, standard normal for the rest.

    Attributes:
        roles: shapes in the order of the flat vector.
    """

    kind: str = "lowrank"
    roles: tuple[tuple[int, ...], ...] = ()

    kinds = ("lowrank",)

    def direction(self, state, probe: int) -> np.ndarray:
        """z of one probe, flat [T]."""
        counts = [(shape[0] + shape[1]) * self.rank if len(shape) == 2 else int(np.prod(shape)) for shape in self.roles]
        word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_NORMAL, probe)
        drawn = philox.normals(state.seed, word, state.step, state.expert, sum(counts))
        parts, first = [], 0
        for shape, count in zip(self.roles, counts, strict=True):
            own = drawn[first : first + count]
            first += count
            if len(shape) == 2:
                cut = shape[0] * self.rank
                left, right = own[:cut].reshape(-1, self.rank), own[cut:].reshape(-1, self.rank)
                own = (left @ right.T / np.float32(np.sqrt(self.rank))).reshape(-1)
            parts.append(own)
        return np.concatenate(parts)


@dataclass(frozen=True)
class GeneralSpec:
    """See `base.TrainSpec`.

    Attributes:
        body: the family.
        family: its name.
        train: steps, batch, seed.
        rule: how losses become a gradient.
        optimizer_config: how it is followed.
        rates: float32 [steps].
        coupling: `independent`, or `summed`: every expert's probes see the sum of all experts' losses (a control).
        fixed: maps a group's inputs to roles that are not trained; None for none.
        seed_expert: float32 [T] that every expert starts from, or None.
        backend: of the body.
    """

    body: Body
    family: str
    train: TrainConfig
    rule: WeightEstimator
    optimizer_config: OptimizerConfig
    rates: np.ndarray
    coupling: str = "independent"
    fixed: Any = None
    seed_expert: np.ndarray | None = None
    backend: str = "numba"

    @property
    def optimizer(self) -> int:
        """See `base.TrainSpec`."""
        return OPTIMIZERS[self.optimizer_config.name]

    @property
    def patience(self) -> int:
        """See `base.TrainSpec`."""
        return self.optimizer_config.patience if self.optimizer_config.schedule == "plateau" else 0

    @property
    def coupled(self) -> bool:
        """See `base.TrainSpec`."""
        return self.coupling == "summed"

    @property
    def frequencies(self) -> np.ndarray:
        """float64 [V], where the family knows classes; else empty."""
        return self.fixed.frequencies if self.fixed is not None else np.zeros(0)

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """See `base.TrainSpec`."""
        more = self.fixed.roles if self.fixed is not None else {}
        return {**self.body.roles, **more}

    @property
    def num_parameters(self) -> int:
        """T."""
        return sum(int(np.prod(shape)) for shape in self.body.roles.values())

    @property
    def evaluations_per_step(self) -> int:
        """Forward passes of a batch in one step."""
        probes = self.rule.num_perturbations
        return 2 * probes if self.rule.difference == "central" else probes + 1

    def parameter_split(self) -> tuple[int, int]:
        """(sampled, exact) parameters."""
        return self.num_parameters, 0

    def initial(
        self, inputs: Any, indices: np.ndarray, offsets: np.ndarray, expert_ids: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """See `base.TrainSpec`."""
        if self.seed_expert is not None:
            packed = np.repeat(self.seed_expert[None], len(expert_ids), axis=0)
        else:
            packed = np.stack([self.body.initial(self.train.seed, int(expert)) for expert in expert_ids])
        fixed = {} if self.fixed is None else self.fixed(inputs, indices, offsets)
        return packed.astype(np.float32), fixed

    def diagnose(self, inputs: Any, own: np.ndarray, expert: int, packed: np.ndarray, step: int) -> None:
        """No analytic gradient to compare with."""

    def unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """See `base.TrainSpec`."""
        found, first = {}, 0
        for role, shape in self.body.roles.items():
            count = int(np.prod(shape))
            found[role] = packed[:, first : first + count].reshape(-1, *shape).copy()
            first += count
        return found

    def loss(self, inputs: Any, positions: np.ndarray, packed: np.ndarray, offset: np.ndarray | None = None) -> float:
        """Mean loss (nats) of weights packed [T] on inputs."""
        offset = np.zeros(0, np.float32) if offset is None else offset
        draw = (self.train.seed, self.train.steps, philox.WHOLE_RUN)
        return float(self.body.losses(packed[None], inputs, np.asarray(positions, np.int64), offset, draw).mean())

    def run(
        self, inputs: Any, own: np.ndarray, expert_ids: np.ndarray, state: GroupState, first: int, last: int,
        fixed: dict[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """See `base.TrainSpec`."""
        self.run_together(inputs, [own], expert_ids, state, first, last, fixed)

    def run_together(
        self, inputs: Any, own: list[np.ndarray], expert_ids: np.ndarray, state: GroupState, first: int, last: int,
        fixed: dict[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """Steps [first, last) of experts side by side; with `summed` coupling they see one another's losses."""
        busy = [e for e in range(len(expert_ids)) if len(own[e]) and state.status[e] == STATUS_OK]
        offset = [np.zeros(0, np.float32) if not fixed else fixed["b0"][e] for e in range(len(expert_ids))]
        with np.errstate(invalid="ignore", over="ignore"):
            for step in range(first, last):
                told = {e: self._losses(inputs, own[e], int(expert_ids[e]), state, e, step, offset[e]) for e in busy}
                if self.coupling == "summed":
                    together = sum(told.values())
                    told = {e: np.asarray(together) for e in told}
                for e in list(busy):
                    if not self._update(told[e], int(expert_ids[e]), state, e, step, len(told)):
                        busy.remove(e)
        for e in busy:
            if not np.isfinite(state.packed[e]).all():
                state.status[e], state.failed_step[e] = STATUS_NONFINITE_WEIGHT, last - 1

    def _scaled(self, state: GroupState, e: int) -> WeightEstimator:
        if state.rate_scale[e] == 1:
            return self.rule
        return replace(self.rule, perturbation_size=self.rule.perturbation_size * float(state.rate_scale[e]))

    def _losses(
        self, inputs: Any, own: np.ndarray, expert: int, state: GroupState, e: int, step: int, offset: np.ndarray
    ) -> np.ndarray:
        """Mean losses [K] of the step's candidates on the step's batch."""
        seed = self.train.seed
        chosen = philox.uniform_ints(
            seed, philox.pack_draw(philox.PURPOSE_BATCH), step, expert, self.train.batch, len(own)
        )
        rule = self._scaled(state, e)
        point = _at(rule, state.packed[e], seed, expert, step)
        positions = own[chosen].astype(np.int64)
        found = self.body.losses(rule.ask(point).astype(np.float32), inputs, positions, offset, (seed, step, expert))
        return found.mean(1, dtype=np.float64)

    def _update(self, losses: np.ndarray, expert: int, state: GroupState, e: int, step: int, experts: int) -> bool:
        rule = self._scaled(state, e)
        point = _at(rule, state.packed[e], self.train.seed, expert, step)
        gradient, after = rule.tell(point, losses)
        probes = rule.num_perturbations
        state.dropped[e] += after.dropped
        if after.dropped == probes:
            state.status[e], state.failed_step[e] = STATUS_NO_FINITE_PAIR, step
            return False
        finite = losses[np.isfinite(losses)]
        share = experts if self.coupling == "summed" else 1
        state.curve[e, step * CURVE_POINTS // self.train.steps] += finite.mean() / share
        config = self.optimizer_config
        gradient = gradient.astype(np.float32)
        norm = float(np.sqrt((gradient.astype(np.float64) ** 2).sum()))
        if config.clip_norm and norm > config.clip_norm:
            gradient *= np.float32(config.clip_norm / norm)
        weights = state.packed[e]
        rate = float(self.rates[step]) * float(state.rate_scale[e])
        if config.weight_decay:
            centre = self.seed_expert if config.anchored and self.seed_expert is not None else 0
            if config.coupled:
                gradient = gradient + np.float32(config.weight_decay) * (weights - centre)
            else:
                weights -= np.float32(rate * config.weight_decay) * (weights - centre)
        first = state.first_moment[e] if state.first_moment.shape[1] else weights
        second = state.second_moment[e] if state.second_moment.shape[1] else weights
        following = _Following(self.optimizer, config.beta1, config.beta2, config.epsilon)
        update(following, rate, weights, gradient, first, second, step)
        return True


@dataclass(frozen=True)
class _Following:
    optimizer: int
    beta1: float
    beta2: float
    epsilon: float


def _at(rule: WeightEstimator, weights: np.ndarray, seed: int, expert: int, step: int):
    return replace(rule.init(weights, seed, expert), step=step)


def make_rule(family: str, estimator: EstimatorConfig, body: Body) -> WeightEstimator:
    """The estimator of a family that knows its weights alone; UserError where more is needed."""
    rule = RULES[estimator.name]
    if estimator.name != "lowrank" and (rule.site != "weights" or rule.needs != "weights"):
        raise UserError(
            f"estimator.name={estimator.name}: needs {rule.needs}, expert.family={family} has none to give; use spsa, "
            "fzoo or lowrank"
        )
    if estimator.head != "same":
        raise UserError(
            f"estimator.head={estimator.head}: expert.family={family} has no head apart from its weights; use same"
        )
    settings = {
        "num_perturbations": estimator.num_perturbations,
        "perturbation_size": estimator.perturbation_size,
        "kind": estimator.directions,
        "difference": estimator.difference,
        "fitness": estimator.fitness,
        "density": estimator.density,
        "rescale": estimator.rescale,
        "rank": estimator.rank,
    }
    if estimator.name == "lowrank":
        shapes = tuple(body.roles.values())
        smallest = min((min(shape) for shape in shapes if len(shape) == 2), default=estimator.rank)
        if estimator.rank > smallest:
            raise UserError(
                f"estimator.rank={estimator.rank}: above {smallest}, the smaller side of the smallest matrix of "
                f"expert.family={family}; use at most that"
            )
        return RoleLowRank(**settings, roles=shapes)
    return WeightEstimator(**settings, dense=body.dense())


def general_spec(
    body: Body,
    family: str,
    estimator: EstimatorConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    coupling: str = "independent",
    fixed: Any = None,
    seed_expert: np.ndarray | None = None,
    backend: str = "numba",
) -> GeneralSpec:
    """The spec of a run; UserError where the parts do not fit together."""
    if coupling not in COUPLINGS:
        raise UserError(f"expert.loss_coupling={coupling}: unknown; known: {', '.join(COUPLINGS)}")
    if optimizer.schedule == "plateau" and not train.hold_back:
        raise UserError("optimizer.schedule=plateau: looks at inputs held back; set train.hold_back above 0")
    if coupling == "summed" and train.hold_back:
        raise UserError("expert.loss_coupling=summed: trains all experts as one, without a slice held back for each")
    if optimizer.anchored and seed_expert is None:
        raise UserError("optimizer.anchored=true: needs a seed to decay towards; set seed_expert.steps above 0")
    return GeneralSpec(
        body,
        family,
        train,
        make_rule(family, estimator, body),
        optimizer,
        learning_rates(optimizer, train.steps),
        coupling,
        fixed,
        seed_expert,
        backend,
    )
