"""Experts with one hidden layer: float weights and ReLU, or integer weights and sign activations.

Legend as in `kernels.mlp_resident.contract`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident import contract as codes
from ...kernels.mlp_resident.contract import GroupState, Inputs, MlpShape, Recipe
from ..config import LEVELS, SITES, EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from ..schedules import learning_rates
from .starts import count_biases, initial_body, mean_biases

BACKENDS = ("numba", "reference")
# spacing of an integer expert's weights by role, powers of two
GRIDS = {"int8": {"w1": 2.0**-6, "b1": 2.0**-5, "w2": 2.0**-6, "b2": 2.0**-3, "u": 2.0**-6}}
GRIDS["ternary"] = {**GRIDS["int8"], "w1": 2.0**-2, "w2": 2.0**-2}


@dataclass(frozen=True)
class MlpSpec:
    """See `base.TrainSpec`.

    Attributes:
        expert: what an expert is.
        train: steps, batch, seed.
        shape: sizes of an expert.
        recipe: the loop's settings.
        frequencies: float64 [V], class frequencies of the training split; its mean targets for regression.
        backend: `numba` or `reference`.
        seed_expert: float32 [T], the weights that every expert starts from, or None.
    """

    expert: ExpertConfig
    train: TrainConfig
    shape: MlpShape
    recipe: Recipe
    frequencies: np.ndarray
    backend: str
    seed_expert: np.ndarray | None = None

    @property
    def optimizer(self) -> int:
        """See `base.TrainSpec`."""
        return self.recipe.optimizer

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """The shape's, and b0: the biases before training."""
        return {**self.shape.roles, "b0": self.shape.roles["b2"]}

    @property
    def num_parameters(self) -> int:
        """Those that the expert uses."""
        if self.recipe.use_body:
            return self.shape.num_parameters
        roles = self.shape.roles
        return sum(int(np.prod(roles[role])) for role in ("b2", "u"))

    @property
    def evaluations_per_step(self) -> int:
        """Forward passes of a batch in one step of the body's estimate; the head's scalar pairs are not passes."""
        recipe = self.recipe
        if recipe.site == codes.CALCULUS or (recipe.site == codes.ACTIVATIONS and not self.probes_body):
            return 1
        ends = 2 if recipe.difference == codes.CENTRAL else 1
        return 1 + ends * recipe.num_perturbations

    @property
    def probes_body(self) -> bool:
        """Whether the hidden layer is trained."""
        return self.recipe.train_body and self.recipe.use_body

    def parameter_split(self) -> tuple[int, int]:
        """(sampled, exact): parameters whose gradient is estimated from few random directions, and those whose
        gradient comes from a difference at a scalar of their own (or from calculus)."""
        total = self.num_parameters
        body = self.shape.num_body_parameters if self.probes_body else 0
        if self.recipe.site == codes.CALCULUS:
            return 0, total
        if self.recipe.site == codes.WEIGHTS and self.recipe.head_rule == codes.HEAD_SAME:
            frozen = self.shape.num_body_parameters if self.recipe.use_body and not self.recipe.train_body else 0
            return total - frozen, 0
        return body, total - body

    def initial(
        self, inputs: Inputs, indices: np.ndarray, offsets: np.ndarray, expert_ids: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Weights before the first step: random or cloned from the seed expert; b0 is the count bias."""
        shape = self.shape
        group = len(expert_ids)
        weights = {role: np.zeros((group, *sizes), np.float32) for role, sizes in shape.roles.items()}
        own = [indices[offsets[e] : offsets[e + 1]].astype(np.int64) for e in range(group)]
        if self.shape.head == codes.HEAD_REGRESSION:
            assert inputs.y is not None
            b0 = mean_biases([inputs.y[places] for places in own], self.frequencies, self.expert.prior_strength)
        else:
            counts = np.stack([np.bincount(targets_of(inputs, p), minlength=shape.num_outputs) for p in own])
            b0 = count_biases(shape, counts, self.frequencies, self.expert.prior_strength)
        weights["b2"][...] = b0
        if self.seed_expert is not None:
            packed = np.repeat(self.seed_expert[None], group, axis=0)
            return packed, {"b0": b0}
        if self.recipe.use_body:
            for e, expert in enumerate(expert_ids):
                weights["w1"][e] = initial_body(shape, self.recipe.seed, int(expert))
        packed = shape.pack(weights)
        if self.recipe.grid is not None:
            # what the loop does after a step: the first weights lie on the grid too
            spacing = np.where(self.recipe.grid > 0, self.recipe.grid, 1)
            level = np.clip(np.rint(packed / spacing), -self.recipe.levels, self.recipe.levels)
            packed = np.where(self.recipe.grid > 0, level * spacing, packed).astype(np.float32)
        return packed, {"b0": b0}

    patience = 0
    coupled = False

    def run(
        self,
        inputs: Inputs,
        own: np.ndarray,
        expert_ids: np.ndarray,
        state: GroupState,
        first: int,
        last: int,
        fixed: dict[str, np.ndarray] | None = None,
    ) -> None:
        """See `base.TrainSpec`."""
        offsets = np.array([0, len(own)])
        seen = codes.seen_inputs(self.shape, inputs)
        loop(self.backend)(self.shape, self.recipe, seen, own, offsets, expert_ids, state, first, last)

    def run_together(self, inputs, own, expert_ids, state, first, last, fixed=None) -> None:
        """Never: the resident loop trains experts alone."""
        raise AssertionError("experts of the resident loop are never coupled")

    def loss(
        self, inputs: Inputs, positions: np.ndarray, packed: np.ndarray, offset: np.ndarray | None = None
    ) -> float:
        """Mean loss (nats) of weights packed [T] on inputs: the training loss, black box included."""
        from ...kernels.mlp_forward.numba import path_logits, row_logits
        from ...kernels.mlp_resident.reference import logit_losses

        positions = np.asarray(positions, np.int64)
        here = np.zeros(len(positions), np.int64)
        seen = codes.seen_inputs(self.shape, inputs)
        if self.shape.head == codes.HEAD_TREE:
            targets = targets_of(inputs, positions).astype(np.int64)
            logits = path_logits(self.shape, seen, positions, here, targets, packed[None])
        else:
            assert inputs.y is not None
            targets = inputs.y[positions]
            if targets.ndim == 1:
                targets = targets.astype(np.int64)
            logits = row_logits(self.shape, seen, positions, here, packed[None])
        return float(logit_losses(self.shape, self.recipe, logits, targets).mean(dtype=np.float64))

    def diagnose(
        self, inputs: Inputs, own: np.ndarray, expert: int, packed: np.ndarray, step: int
    ) -> dict[str, float | int | None] | None:
        """See `base.TrainSpec`."""
        from ..diagnostics import diagnose

        return diagnose(self.shape, self.recipe, codes.seen_inputs(self.shape, inputs), own, expert, packed, step)

    def unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """See `base.TrainSpec`."""
        return self.shape.unpack(packed)


def check_loss(expert: ExpertConfig) -> None:
    """Call a black-box loss once; UserError where it does not give one number an example."""
    if expert.loss_function is None:
        return
    examples = 3
    outputs = np.zeros((examples, expert.num_outputs), np.float32)
    targets = np.zeros((examples, expert.num_outputs), np.float32)
    if expert.head != "regression":
        targets = np.zeros(examples, np.int64)
    try:
        found = np.asarray(expert.loss_function(outputs, targets))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"loss={expert.loss}: fails on outputs {outputs.shape} ({error})") from None
    if found.shape != (examples,):
        raise UserError(
            f"loss={expert.loss}: gives shape {found.shape} for {examples} examples, expected ({examples},): one "
            "number an example, not their mean"
        )


def loop(backend: str):
    """`train_group` of a backend; each brings its own heavy imports."""
    if backend == "numba":
        from ...kernels.mlp_resident import numba as module
    else:
        from ...kernels.mlp_resident import reference as module
    return module.train_group


def build_spec(
    expert: ExpertConfig,
    estimator: EstimatorConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    num_features: int,
    frequencies: np.ndarray,
    backend: str = "auto",
    seed_expert: np.ndarray | None = None,
) -> MlpSpec:
    """The spec of a run; UserError where the parts do not fit together."""
    shape = MlpShape(
        num_features,
        expert.hidden,
        expert.num_outputs,
        codes.HEADS[expert.head],
        codes.MEMORY_FEATURES if expert.memory else 0,
        codes.SIGN if expert.family == "integer" else codes.RELU,
    )
    _check_fit(shape, expert, estimator, optimizer, seed_expert)
    black_box = expert.loss != "likelihood"
    if backend == "auto":
        backend = "reference" if black_box else "numba"
    if backend not in BACKENDS:
        raise UserError(f"backend={backend}: unknown; known: {', '.join(BACKENDS)}")
    if backend == "numba" and black_box:
        raise UserError(f"backend=numba: loss={expert.loss} is a black box; use backend=reference or auto")
    recipe = Recipe(
        site=SITES[estimator.site],
        directions=codes.DIRECTIONS[estimator.directions],
        num_perturbations=estimator.num_perturbations,
        perturbation_size=estimator.perturbation_size,
        head_perturbation_size=estimator.head_perturbation_size,
        optimizer=codes.OPTIMIZERS[optimizer.name],
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        clip_norm=optimizer.clip_norm,
        weight_decay=optimizer.weight_decay,
        train_body=expert.train_body and estimator.name != "delta",
        batch=train.batch,
        learning_rates=learning_rates(optimizer, train.steps),
        seed=train.seed,
        difference=codes.DIFFERENCES[estimator.difference],
        fitness=codes.FITNESS[estimator.fitness],
        head_rule=codes.HEAD_RULES[estimator.head],
        density=estimator.density if estimator.directions == "sparse" else 1.0,
        rescale=estimator.rescale,
        rank=estimator.rank,
        loss=_LOSS_CODES.get(expert.loss, codes.LOSS_FUNCTION),
        loss_function=expert.loss_function,
        anchor=seed_expert if optimizer.anchored else None,
        grid=_grid(shape, expert),
        levels=LEVELS[expert.weights],
        use_body=expert.use_body,
    )
    return MlpSpec(expert, train, shape, recipe, frequencies, backend, seed_expert)


_LOSS_CODES = {"likelihood": codes.LOSS_LIKELIHOOD, "zero_one": codes.LOSS_ZERO_ONE}


def _grid(shape: MlpShape, expert: ExpertConfig) -> np.ndarray | None:
    if expert.family != "integer":
        return None
    grid = np.zeros(shape.packed_size, np.float32)
    for role, view in shape.views(grid).items():
        view[...] = GRIDS[expert.weights][role]
    return grid


def _check_fit(
    shape: MlpShape,
    expert: ExpertConfig,
    estimator: EstimatorConfig,
    optimizer: OptimizerConfig,
    seed_expert: np.ndarray | None,
) -> None:
    if estimator.directions == "hadamard":
        basis = 1 << (32 * shape.sign_words - 1).bit_length()
        if estimator.num_perturbations > basis:
            raise UserError(
                f"estimator.num_perturbations={estimator.num_perturbations}: the Hadamard basis of "
                f"expert.hidden={expert.hidden} has {basis} rows; use fewer, or estimator.directions=signs"
            )
    if estimator.directions in ("lowrank", "subspace"):
        sides = {"relay features": shape.num_features, "expert.hidden": shape.hidden, "head rows": shape.num_rows}
        # a direction confined to no layer is none
        tightest = min(sides, key=lambda side: sides[side])
        if estimator.rank > sides[tightest]:
            raise UserError(
                f"estimator.rank={estimator.rank}: above {sides[tightest]}, the smaller side of a layer "
                f"({tightest}); use at most that"
            )
    if optimizer.coupled:
        raise UserError(
            f"optimizer.coupled=true: the resident loop of expert.family={expert.family} decays apart from the "
            "gradient; leave it false, or use expert=lstm or module"
        )
    if optimizer.schedule == "plateau":
        raise UserError(
            f"optimizer.schedule=plateau: the resident loop of expert.family={expert.family} has its rates fixed "
            "beforehand; use linear or cosine"
        )
    if optimizer.anchored and seed_expert is None:
        raise UserError("optimizer.anchored=true: needs a seed to decay towards; set seed_expert.steps above 0")
    black_box = expert.loss != "likelihood"
    if black_box and estimator.name in ("backprop", "delta"):
        raise UserError(
            f"estimator.name={estimator.name}: needs the derivative of the loss, loss={expert.loss} has none; "
            "use activation or spsa"
        )
    if black_box and estimator.head == "delta":
        raise UserError(
            f"estimator.head=delta: is the derivative of the likelihood, the loss is loss={expert.loss}; use pairs"
        )


def targets_of(inputs: Inputs, positions: np.ndarray) -> np.ndarray:
    """Targets of the inputs at `positions`, int [n]."""
    if inputs.text is not None:
        return inputs.text[positions]
    assert inputs.y is not None
    return inputs.y[positions]
