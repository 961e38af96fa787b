"""What an expert is and how it is trained, as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.errors import UserError
from ..kernels.mlp_resident.contract import DIRECTIONS, ESTIMATORS, HEADS, MAX_TREE_DEPTH, OPTIMIZERS

SCHEDULES = ("constant", "linear")


def _known(field: str, value: str, known) -> None:
    if value not in known:
        raise UserError(f"{field}={value}: unknown; known: {', '.join(sorted(known))}")


def _positive(field: str, value: float) -> None:
    if not value > 0 or value == float("inf"):
        raise UserError(f"{field}={value}: must be a finite number above 0")


@dataclass(frozen=True)
class ExpertConfig:
    """One hidden layer of `hidden` ReLU units under a head.

    Attributes:
        head: `tree` (binary decisions over the bits of the target) or `softmax`.
        hidden: H.
        num_outputs: V; a power of two up to 256 for `tree`.
        train_body: False leaves the hidden layer at its random start.
        prior_strength: pseudo-counts of the whole training split in an expert's count biases.
    """

    head: str = "tree"
    hidden: int = 32
    num_outputs: int = 256
    train_body: bool = True
    prior_strength: float = 2.0

    def __post_init__(self) -> None:
        _known("expert.head", self.head, HEADS)
        if not 1 <= self.hidden <= 4096:
            raise UserError(f"expert.hidden={self.hidden}: must be between 1 and 4096")
        if self.num_outputs < 2:
            raise UserError(f"the targets have {self.num_outputs} classes: an expert needs at least 2")
        if self.head == "tree" and (
            self.num_outputs & (self.num_outputs - 1) or self.num_outputs > 1 << MAX_TREE_DEPTH
        ):
            raise UserError(
                f"expert.head=tree with {self.num_outputs} classes: needs a power of two up to "
                f"{1 << MAX_TREE_DEPTH}; use expert.head=softmax"
            )
        _positive("expert.prior_strength", self.prior_strength)


@dataclass(frozen=True)
class EstimatorConfig:
    """How the gradient is estimated.

    Attributes:
        name: `activation`, `spsa`, or `backprop` (the first-order reference).
        num_perturbations: antithetic pairs a step.
        directions: `signs` or `hadamard`; activation only.
        perturbation_size: e, in units of a pre-activation (activation) or of a weight (spsa).
        head_perturbation_size: e of the scalar pairs at the head's logits (activation).
    """

    name: str = "activation"
    num_perturbations: int = 8
    directions: str = "hadamard"
    perturbation_size: float = 0.1
    head_perturbation_size: float = 0.05

    def __post_init__(self) -> None:
        _known("estimator.name", self.name, ESTIMATORS)
        _known("estimator.directions", self.directions, DIRECTIONS)
        if not 1 <= self.num_perturbations < 1 << 16:
            raise UserError(f"estimator.num_perturbations={self.num_perturbations}: must be between 1 and 65535")
        _positive("estimator.perturbation_size", self.perturbation_size)
        _positive("estimator.head_perturbation_size", self.head_perturbation_size)


@dataclass(frozen=True)
class OptimizerConfig:
    """How the estimate moves the weights.

    Attributes:
        name: `sgd`, `momentum` or `adam`.
        learning_rate: at the first step.
        schedule: `constant`, or `linear` down to `final_fraction` of it at the last step.
        final_fraction: see `schedule`.
        beta1: decay of the first moment (momentum, adam).
        beta2: decay of the second moment (adam).
        epsilon: adam's denominator term.
        clip_norm: largest norm of an expert's gradient; 0 for no limit.
        weight_decay: decoupled decay of the weight matrices, as a factor of the learning rate.
    """

    name: str = "sgd"
    learning_rate: float = 2.5
    schedule: str = "linear"
    final_fraction: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-6
    clip_norm: float = 0.5
    weight_decay: float = 0.001

    def __post_init__(self) -> None:
        _known("optimizer.name", self.name, OPTIMIZERS)
        _known("optimizer.schedule", self.schedule, SCHEDULES)
        _positive("optimizer.learning_rate", self.learning_rate)
        _positive("optimizer.epsilon", self.epsilon)
        for field in ("clip_norm", "weight_decay"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise UserError(f"optimizer.{field}={getattr(self, field)}: must be a finite number, 0 or more")
        if self.learning_rate * self.weight_decay > 1:
            raise UserError(
                f"optimizer.weight_decay={self.weight_decay}: times optimizer.learning_rate={self.learning_rate} "
                "it must not exceed 1"
            )
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"optimizer.{field}={getattr(self, field)}: must be at least 0 and below 1")
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"optimizer.final_fraction={self.final_fraction}: must be between 0 and 1")


@dataclass(frozen=True)
class TrainConfig:
    """How long and on what seed.

    Attributes:
        steps: updates of every expert.
        batch: inputs a step, drawn with replacement from the expert's own.
        seed: run seed, 64 bits.
        checkpoint_every: steps between checkpoints of an unfinished group; 0 for none.
    """

    steps: int = 500
    batch: int = 64
    seed: int = 0
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.steps < 1 << 32:
            raise UserError(f"train.steps={self.steps}: must be between 1 and 2**32 - 1")
        if not 1 <= self.batch <= 65536:
            raise UserError(f"train.batch={self.batch}: must be between 1 and 65536")
        if not 0 <= self.seed < 1 << 64:
            raise UserError(f"seed={self.seed}: must be between 0 and 2**64 - 1")
        if self.checkpoint_every < 0:
            raise UserError(f"train.checkpoint_every={self.checkpoint_every}: must be 0 (none) or more")
