"""What an expert is and how it is trained, as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.errors import UserError
from ..kernels.mlp_resident import contract as codes
from ..kernels.mlp_resident.contract import (
    DIFFERENCES,
    DIRECTIONS,
    FITNESS,
    HEAD_RULES,
    HEADS,
    MAX_TREE_DEPTH,
    OPTIMIZERS,
    LossFunction,
)

SCHEDULES = ("constant", "linear", "cosine", "plateau")
POSITION_FAMILIES = ("mlp", "integer", "module")
# the widest weight of an integer expert, in spacings of its grid
LEVELS = {"int8": 127, "ternary": 1}
LOSSES = ("likelihood", "zero_one")


@dataclass(frozen=True)
class Rule:
    """What an estimator is made of.

    Attributes:
        site: where it perturbs: `weights`, `activations`, or `none` (calculus).
        directions: along what it may.
        needs: what it asks of an expert's family: `weights`, `layer inputs` or `gradients`.
    """

    site: str
    directions: tuple[str, ...]
    needs: str


RULES = {
    "spsa": Rule("weights", ("signs", "sparse", "gaussian"), "weights"),
    "fzoo": Rule("weights", ("signs", "sparse", "gaussian"), "weights"),
    "lowrank": Rule("weights", ("lowrank",), "layer inputs"),
    "agzo": Rule("weights", ("subspace",), "layer inputs"),
    "activation": Rule("activations", ("hadamard", "signs"), "layer inputs"),
    "delta": Rule("none", ("signs",), "layer inputs"),
    "backprop": Rule("none", ("signs",), "gradients"),
}
SITES = {"weights": codes.WEIGHTS, "activations": codes.ACTIVATIONS, "none": codes.CALCULUS}


def _known(field: str, value: str, known) -> None:
    if value not in known:
        raise UserError(f"{field}={value}: unknown; known: {', '.join(sorted(known))}")


def _positive(field: str, value: float) -> None:
    if not value > 0 or value == float("inf"):
        raise UserError(f"{field}={value}: must be a finite number above 0")


@dataclass(frozen=True)
class ExpertConfig:
    """One hidden layer under a head.

    Attributes:
        head: `tree` (binary decisions over the bits of the target), `softmax` or `regression`.
        hidden: H units.
        num_outputs: V; a power of two up to 256 for `tree`, targets a row for `regression`.
        train_body: False leaves the hidden layer at its random start.
        prior_strength: pseudo-counts of the whole training split in an expert's biases.
        family: `mlp` (float weights, ReLU), `integer` (weights on a grid, sign activations) or `module`.
        weights: of an integer expert: `int8` (-127 .. 127 spacings) or `ternary` (-1, 0, 1).
        use_body: False leaves out the hidden layer: an expert that mixes memory alone.
        memory: whether memory is part of the input.
        loss: `likelihood` (cross entropy, or squared error for regression), `zero_one`, or a function
            (outputs [n, V], targets [n]) -> float [n].
        loss_function: the function, where `loss` names one.
    """

    head: str = "tree"
    hidden: int = 32
    num_outputs: int = 256
    train_body: bool = True
    prior_strength: float = 2.0
    family: str = "mlp"
    weights: str = "int8"
    use_body: bool = True
    memory: bool = False
    loss: str = "likelihood"
    loss_function: LossFunction | None = None

    def __post_init__(self) -> None:
        _known("expert.head", self.head, HEADS)
        _known("expert.family", self.family, POSITION_FAMILIES)
        _known("expert.weights", self.weights, LEVELS)
        if self.loss_function is None:
            _known("expert.loss", self.loss, LOSSES)
        elif self.head == "tree":
            raise UserError(
                f"loss={self.loss}: a function of the outputs needs expert.head=softmax or regression; a tree "
                "has outputs along its path alone"
            )
        if self.loss == "zero_one" and self.head == "regression":
            raise UserError("loss=zero_one: regression has no classes to get wrong; use expert.head=softmax")
        if self.memory and self.head != "tree":
            raise UserError(f"relay.memory=true: goes with expert.head=tree, not with {self.head}")
        if not self.use_body and not self.memory:
            raise UserError("expert.use_body=false: without relay.memory=true nothing is left to learn but biases")
        if not 1 <= self.hidden <= 4096:
            raise UserError(f"expert.hidden={self.hidden}: must be between 1 and 4096")
        if self.num_outputs < 2 and self.head != "regression":
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
        name: a registered rule, see `RULES`.
        num_perturbations: P directions a step.
        directions: see the rule.
        perturbation_size: e, in units of a pre-activation (activation) or of a weight.
        head_perturbation_size: e of the scalar pairs at the head's logits.
        difference: `central` or `one_sided`.
        fitness: `plain`, `std`, `ranks` or `normalised`.
        head: the head's own rule: `pairs` (a +/- pair at every scalar logit), `delta` (the exact local rule), or
            `same` (perturbed with the body; weight space only).
        density: share of entries that sparse directions hold.
        rescale: divide sparse estimates by the density, which makes them unbiased.
        rank: of low-rank and subspace directions.
    """

    name: str = "activation"
    num_perturbations: int = 16
    directions: str = "hadamard"
    perturbation_size: float = 0.1
    head_perturbation_size: float = 0.05
    difference: str = "one_sided"
    fitness: str = "plain"
    head: str = "pairs"
    density: float = 0.5
    rescale: bool = True
    rank: int = 1

    def __post_init__(self) -> None:
        _known("estimator.name", self.name, RULES)
        rule = RULES[self.name]
        if self.directions not in rule.directions:
            raise UserError(
                f"estimator.directions={self.directions}: estimator.name={self.name} takes "
                f"{' or '.join(rule.directions)}"
            )
        _known("estimator.directions", self.directions, DIRECTIONS)
        _known("estimator.difference", self.difference, DIFFERENCES)
        _known("estimator.fitness", self.fitness, FITNESS)
        _known("estimator.head", self.head, HEAD_RULES)
        if self.head == "same" and rule.site != "weights":
            raise UserError(
                f"estimator.head=same: estimator.name={self.name} perturbs no weights of the head; use pairs or delta"
            )
        if not 1 <= self.num_perturbations < 1 << 16:
            raise UserError(f"estimator.num_perturbations={self.num_perturbations}: must be between 1 and 65535")
        if self.fitness != "plain" and self.difference == "one_sided" and self.num_perturbations < 2:
            raise UserError(
                f"estimator.fitness={self.fitness} with estimator.difference=one_sided: compares probes with one "
                "another and needs estimator.num_perturbations of 2 or more"
            )
        _positive("estimator.perturbation_size", self.perturbation_size)
        _positive("estimator.head_perturbation_size", self.head_perturbation_size)
        if not 0 < self.density <= 1:
            raise UserError(f"estimator.density={self.density}: must be above 0 and at most 1")
        if self.rank < 1:
            raise UserError(f"estimator.rank={self.rank}: must be at least 1")

    @property
    def site(self) -> str:
        """Where it perturbs."""
        return RULES[self.name].site


def level(estimator: EstimatorConfig, expert: ExpertConfig | None) -> str:
    """How much a step is told of the loss: results at different levels are not of one kind."""
    if estimator.name == "backprop":
        return "the gradient"
    head = {"same": "", "pairs": " and one an output decision", "delta": " and the exact gradient at the head"}
    trains_body = expert is None or (expert.train_body and expert.use_body and estimator.name != "delta")
    if not trains_body and estimator.head != "same":
        return "the exact gradient at the head" if estimator.head == "delta" else "one number an output decision"
    return ("one number an example" if estimator.site == "activations" else "one number a batch") + head[estimator.head]


@dataclass(frozen=True)
class OptimizerConfig:
    """How the estimate moves the weights.

    Attributes:
        name: `sgd`, `momentum` or `adam`.
        learning_rate: at the first step.
        schedule: `constant`, `linear` or `cosine` down to `final_fraction` of it at the last step, or `plateau`:
            halved, and the perturbation with it, whenever the loss on the held-back slice has not improved for
            `patience` looks (families with a general loop only).
        final_fraction: see `schedule`.
        beta1: decay of the first moment (momentum, adam).
        beta2: decay of the second moment (adam).
        epsilon: adam's denominator term.
        clip_norm: largest norm of an expert's gradient; 0 for no limit.
        weight_decay: decoupled decay of the weight matrices, as a factor of the learning rate.
        anchored: decay towards the seed expert instead of towards zero.
        coupled: the decay is part of the gradient, before moments and scaling, as in Adam with an L2 penalty, instead
            of a factor of the rate (families with a general loop only).
        patience: looks without improvement before a plateau is called.
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
    anchored: bool = False
    patience: int = 3
    coupled: bool = False

    def __post_init__(self) -> None:
        _known("optimizer.name", self.name, OPTIMIZERS)
        _known("optimizer.schedule", self.schedule, SCHEDULES)
        _positive("optimizer.learning_rate", self.learning_rate)
        _positive("optimizer.epsilon", self.epsilon)
        for field in ("clip_norm", "weight_decay"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise UserError(f"optimizer.{field}={getattr(self, field)}: must be a finite number, 0 or more")
        if not self.coupled and self.learning_rate * self.weight_decay > 1:
            raise UserError(
                f"optimizer.weight_decay={self.weight_decay}: times optimizer.learning_rate={self.learning_rate} "
                "it must not exceed 1"
            )
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"optimizer.{field}={getattr(self, field)}: must be at least 0 and below 1")
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"optimizer.final_fraction={self.final_fraction}: must be between 0 and 1")
        if self.patience < 1:
            raise UserError(f"optimizer.patience={self.patience}: must be at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """How long and on what seed.

    Attributes:
        steps: updates of every expert.
        batch: inputs a step, drawn with replacement from the expert's own.
        seed: run seed, 64 bits.
        checkpoint_every: steps between checkpoints of an unfinished group; 0 for none.
        hold_back: share of an expert's own inputs (the last ones) kept from training, to choose when to stop; 0 for
            none.
        diagnose_every: steps between looks at the estimate itself, 0 for none.
        diagnose_stride: experts whose id is a multiple of it are looked at.
        looks: how often the loss on the slice held back is looked at; the weights of the best look are kept.
    """

    steps: int = 500
    batch: int = 64
    seed: int = 0
    checkpoint_every: int = 0
    hold_back: float = 0.0
    looks: int = 8
    diagnose_every: int = 0
    diagnose_stride: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.steps < 1 << 32:
            raise UserError(f"train.steps={self.steps}: must be between 1 and 2**32 - 1")
        if not 1 <= self.batch <= 65536:
            raise UserError(f"train.batch={self.batch}: must be between 1 and 65536")
        if not 0 <= self.seed < 1 << 64:
            raise UserError(f"seed={self.seed}: must be between 0 and 2**64 - 1")
        if self.checkpoint_every < 0:
            raise UserError(f"train.checkpoint_every={self.checkpoint_every}: must be 0 (none) or more")
        if not 0 <= self.hold_back < 1:
            raise UserError(f"train.hold_back={self.hold_back}: must be at least 0 and below 1")
        if not 1 <= self.looks <= 1000:
            raise UserError(f"train.looks={self.looks}: must be between 1 and 1000")
