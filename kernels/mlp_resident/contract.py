"""What every backend of the resident MLP loop takes and returns.

Legend: G experts of a group, N inputs of the corpus, B batch, F features, H hidden, V outputs, R head rows,
K depth of the tree (log2 V), M memory features of a node, P perturbations, T packed parameters of one expert,
C points of a loss curve.

The expert, for an input x [F] and a target y:

    h = x W1 + b1                      W1 [F, H]
    a = relu(h), or sign(h) with sign(0) = 1
    z = W2 a + b2                      W2 [R, H]
    tree:     R = V - 1, row r is heap node r + 1; the path of y visits node (1 << k) | (y >> (K - k)) at depth k;
              z_k += U_k m_k with memory m [K, M] of the position and U [K, M];
              L = sum_k softplus(-s_k z_k), s_k = +1 where bit K-1-k of y is set, else -1
    softmax:  R = V, L = logsumexp(z) - z_y
    regression: R = V, L = sum_v (z_v - y_v)^2 for y [V]

An estimator is a choice of four things (see `Recipe`): where it perturbs (site), along what (directions), which ends
it compares (difference), and how losses become coefficients (fitness).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

LossFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]

HEAD_TREE, HEAD_SOFTMAX, HEAD_REGRESSION = 0, 1, 2
RELU, SIGN = 0, 1
ACTIVATIONS, WEIGHTS, CALCULUS = 0, 1, 2
SIGNS, HADAMARD, SPARSE, GAUSSIAN, LOWRANK, SUBSPACE = 0, 1, 2, 3, 4, 5
CENTRAL, ONE_SIDED = 0, 1
PLAIN, STD, RANKS, NORMALISED = 0, 1, 2, 3
HEAD_SAME, HEAD_PAIRS, HEAD_DELTA = 0, 1, 2
SGD, MOMENTUM, ADAM = 0, 1, 2
LOSS_LIKELIHOOD, LOSS_ZERO_ONE, LOSS_FUNCTION = 0, 1, 2

STATUS_OK, STATUS_NO_FINITE_PAIR, STATUS_NONFINITE_WEIGHT = 0, 1, 2
REASONS = {
    STATUS_NO_FINITE_PAIR: "no finite pair of losses left in a step",
    STATUS_NONFINITE_WEIGHT: "a weight is not finite after training",
}

CURVE_POINTS = 10
MAX_TREE_DEPTH = 8
# lanes of a vector, and the memory features of a node
MEMORY_FEATURES = 16
# spacing of the features that sign activations see
INPUT_GRID = 2.0**-4
# memory is stored as int8 in these units of log-odds
MEMORY_UNIT = 1 / 16

HEADS = {"tree": HEAD_TREE, "softmax": HEAD_SOFTMAX, "regression": HEAD_REGRESSION}
DIRECTIONS = {
    "signs": SIGNS,
    "hadamard": HADAMARD,
    "sparse": SPARSE,
    "gaussian": GAUSSIAN,
    "lowrank": LOWRANK,
    "subspace": SUBSPACE,
}
DIFFERENCES = {"central": CENTRAL, "one_sided": ONE_SIDED}
FITNESS = {"plain": PLAIN, "std": STD, "ranks": RANKS, "normalised": NORMALISED}
HEAD_RULES = {"same": HEAD_SAME, "pairs": HEAD_PAIRS, "delta": HEAD_DELTA}
OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adam": ADAM}

# layer field of the Philox counter
LAYER_BODY, LAYER_HEAD, LAYER_ALL, LAYER_DENSITY, LAYER_NORMAL, LAYER_BASIS = 0, 1, 2, 3, 4, 5
# rounds of subspace iteration for the basis of a layer's inputs
BASIS_ROUNDS = 3


def tree_rows(targets: np.ndarray, depth: int) -> np.ndarray:
    """Head rows int64 [n, K] on the way to each target."""
    k = np.arange(depth)
    return ((1 << k) | (np.asarray(targets, np.int64)[:, None] >> (depth - k))) - 1


def tree_signs(targets: np.ndarray, depth: int) -> np.ndarray:
    """int64 [n, K]: +1 where the branch taken towards the target is bit 1, else -1."""
    return 2 * ((np.asarray(targets, np.int64)[:, None] >> (depth - 1 - np.arange(depth))) & 1) - 1


@dataclass(frozen=True)
class MlpShape:
    """Sizes of one expert, and where its parameters lie in the packed vector of T floats.

    Every row is padded to 16 floats, F to a multiple of 8 and R to a multiple of 16 with at least one spare row, so
    that loops have no remainders; padding is zero and stays zero.
    """

    num_features: int
    hidden: int
    num_outputs: int
    head: int
    num_memory: int = 0
    activation: int = RELU

    def __post_init__(self) -> None:
        assert self.num_memory in (0, MEMORY_FEATURES)
        assert not self.num_memory or self.head == HEAD_TREE

    @property
    def tree_depth(self) -> int:
        """K: decisions on a path of the tree; 0 for other heads."""
        return self.num_outputs.bit_length() - 1 if self.head == HEAD_TREE else 0

    @property
    def num_rows(self) -> int:
        """R: rows of the head."""
        return self.num_outputs - 1 if self.head == HEAD_TREE else self.num_outputs

    @property
    def padded_features(self) -> int:
        """F rounded up to a multiple of 8."""
        return -(-self.num_features // 8) * 8

    @property
    def padded_hidden(self) -> int:
        """H rounded up to a multiple of 16."""
        return -(-self.hidden // 16) * 16

    @property
    def padded_rows(self) -> int:
        """R + 1 rounded up to a multiple of 16."""
        return (self.num_rows // 16 + 1) * 16

    @property
    def sign_words(self) -> int:
        """32-bit words of signs of one example's hidden layer."""
        return -(-self.hidden // 32)

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of one expert, by role."""
        rows, hidden = self.num_rows, self.hidden
        roles = {"w1": (self.num_features, hidden), "b1": (hidden,), "w2": (rows, hidden), "b2": (rows,)}
        return {**roles, "u": (self.tree_depth, self.num_memory)} if self.num_memory else roles

    @property
    def num_parameters(self) -> int:
        """Parameters of one expert without padding."""
        return sum(int(np.prod(shape)) for shape in self.roles.values())

    @property
    def num_body_parameters(self) -> int:
        """Parameters below the head."""
        return (self.num_features + 1) * self.hidden

    @property
    def offset_b1(self) -> int:
        """Where b1 begins."""
        return self.padded_features * self.padded_hidden

    @property
    def offset_w2(self) -> int:
        """Where W2 begins."""
        return self.offset_b1 + self.padded_hidden

    @property
    def offset_b2(self) -> int:
        """Where b2 begins."""
        return self.offset_w2 + self.padded_rows * self.padded_hidden

    @property
    def packed_size(self) -> int:
        """T: floats of the packed vector, padding included."""
        return self.offset_u + MAX_TREE_DEPTH * self.num_memory

    @property
    def offset_u(self) -> int:
        """Where the memory weights U begin."""
        return self.offset_b2 + self.padded_rows

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """The roles inside packed vectors [..., T], as views without the padding."""
        lead = packed.shape[:-1]
        hidden = self.padded_hidden
        w1 = packed[..., : self.offset_b1].reshape(*lead, self.padded_features, hidden)
        w2 = packed[..., self.offset_w2 : self.offset_b2].reshape(*lead, self.padded_rows, hidden)
        views = {
            "w1": w1[..., : self.num_features, : self.hidden],
            "b1": packed[..., self.offset_b1 : self.offset_b1 + self.hidden],
            "w2": w2[..., : self.num_rows, : self.hidden],
            "b2": packed[..., self.offset_b2 : self.offset_b2 + self.num_rows],
        }
        if self.num_memory:
            u = packed[..., self.offset_u :].reshape(*lead, MAX_TREE_DEPTH, self.num_memory)
            views["u"] = u[..., : self.tree_depth, :]
        return views

    def pack(self, weights: dict[str, np.ndarray]) -> np.ndarray:
        """Packed float32 [G, T] of weights by role, each with a leading axis G."""
        packed = np.zeros((len(weights["w1"]), self.packed_size), np.float32)
        for role, view in self.views(packed).items():
            view[...] = weights[role]
        return packed

    def unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Weights by role (contiguous copies) of packed vectors [G, T]."""
        return {role: np.ascontiguousarray(view) for role, view in self.views(packed).items()}

    def parameter_mask(self) -> np.ndarray:
        """float32 [T]: 1 where a parameter lies, 0 on padding."""
        mask = np.zeros(self.packed_size, np.float32)
        for view in self.views(mask).values():
            view[...] = 1
        return mask


@dataclass(frozen=True)
class Recipe:
    """How an expert is trained; everything but its inputs.

    Attributes:
        site: ACTIVATIONS (of the hidden layer, for every example), WEIGHTS, or CALCULUS (the first-order reference).
        directions: SIGNS; HADAMARD (activations); SPARSE, GAUSSIAN, LOWRANK or SUBSPACE (weights).
        num_perturbations: P directions a step.
        perturbation_size: e, in units of a pre-activation or of a weight.
        head_perturbation_size: e of the scalar pairs at the head's logits.
        optimizer: SGD, MOMENTUM or ADAM.
        beta1: decay of the first moment (MOMENTUM, ADAM).
        beta2: decay of the second moment (ADAM).
        epsilon: ADAM's denominator term.
        clip_norm: largest norm of an expert's gradient; 0 for no limit.
        weight_decay: decoupled decay of W1, W2 and U towards the anchor, or zero without one, as a factor of the
            learning rate.
        train_body: False freezes W1 and b1.
        use_body: False leaves out the hidden layer: biases and memory alone.
        batch: inputs a step, drawn with replacement.
        learning_rates: float32 [steps].
        seed: run seed.
        difference: CENTRAL, (L(+e) - L(-e)) / 2e, or ONE_SIDED, (L(+e) - L) / e.
        fitness: PLAIN; STD divides by the standard deviation of the perturbed losses; RANKS replaces losses by centred
            ranks in [-1/2, 1/2]; NORMALISED by (L - mean) / std.
        head_rule: HEAD_SAME perturbs the head with the body (WEIGHTS); HEAD_PAIRS takes a +/- pair at every scalar
            logit; HEAD_DELTA the exact local rule (p - onehot) a^T.
        density: share of entries that SPARSE directions hold.
        rescale: divide SPARSE estimates by their density, which makes them unbiased.
        rank: of LOWRANK and SUBSPACE.
        loss: LOSS_LIKELIHOOD (cross entropy, or squared error for regression), LOSS_ZERO_ONE, or LOSS_FUNCTION.
        loss_function: of LOSS_FUNCTION: (outputs [n, V], targets [n]) -> float [n].
        anchor: float32 [T] that weights decay towards, or None for zero.
        grid: float32 [T] spacing of the values that weights may take, or None; a step is rounded to it at random,
            up or down with probabilities that keep its mean.
        levels: weights on the grid lie within this many spacings of zero.
    """

    site: int
    directions: int
    num_perturbations: int
    perturbation_size: float
    head_perturbation_size: float
    optimizer: int
    beta1: float
    beta2: float
    epsilon: float
    clip_norm: float
    weight_decay: float
    train_body: bool
    batch: int
    learning_rates: np.ndarray
    seed: int
    difference: int = CENTRAL
    fitness: int = PLAIN
    head_rule: int = HEAD_PAIRS
    density: float = 1.0
    rescale: bool = True
    rank: int = 1
    loss: int = LOSS_LIKELIHOOD
    loss_function: LossFunction | None = None
    anchor: np.ndarray | None = None
    grid: np.ndarray | None = None
    levels: int = 127
    use_body: bool = True


class ComputedMemory(Protocol):
    """Memory features that are made where they are needed."""

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """int8 [n, K, M] of inputs at positions int [n]."""
        ...


@dataclass(frozen=True)
class Inputs:
    """Where examples come from: bytes of a text through an embedding, or rows of a matrix.

    Attributes:
        text: uint8 [N]; the byte at p is predicted from those before it. None for arrays.
        embedding: float32 [256, D].
        context: bytes before p that are features: F = context * D, the previous byte first.
        x: float32 [N, F], or None for text.
        y: int32 [N], or float32 [N, V] for regression; None for text.
        memory: int8 [N, K, M] in units of MEMORY_UNIT, or what computes them, or None. Loops take rows alone: see
            `gathered`.
    """

    text: np.ndarray | None = None
    embedding: np.ndarray | None = None
    context: int = 0
    x: np.ndarray | None = None
    y: np.ndarray | None = None
    memory: np.ndarray | ComputedMemory | None = None

    @property
    def memory_is_computed(self) -> bool:
        """Whether `memory` has no rows yet."""
        return self.memory is not None and not isinstance(self.memory, np.ndarray)

    def gathered(self, positions: np.ndarray) -> Inputs:
        """The inputs at positions int [n] of a text with computed memory as n rows of a matrix, in that order."""
        assert self.text is not None
        assert self.embedding is not None
        assert self.memory is not None
        assert not isinstance(self.memory, np.ndarray)
        positions = np.asarray(positions, np.int64)
        before = self.text[positions[:, None] - 1 - np.arange(self.context)]
        features = self.embedding[before].reshape(len(positions), self.num_features)
        return Inputs(x=features, y=self.text[positions].astype(np.int32), memory=self.memory.rows(positions))

    @property
    def num_features(self) -> int:
        """F."""
        if self.x is not None:
            return self.x.shape[1]
        assert self.embedding is not None
        return self.context * self.embedding.shape[1]


def seen_inputs(shape: MlpShape, inputs: Inputs) -> Inputs:
    """Inputs as an expert sees them: with sign activations their features are int8 in units of `INPUT_GRID`."""
    if shape.activation != SIGN:
        return inputs

    def snap(values: np.ndarray | None) -> np.ndarray | None:
        if values is None:
            return None
        return (np.clip(np.rint(values / INPUT_GRID), -127, 127) * INPUT_GRID).astype(np.float32)

    return replace(inputs, embedding=snap(inputs.embedding), x=snap(inputs.x))


@dataclass
class GroupState:
    """State of a group's experts between two calls of a loop; changed in place.

    Attributes:
        packed: float32 [G, T] weights.
        first_moment: float32 [G, T], or [G, 0] for SGD.
        second_moment: float32 [G, T], or [G, 0] unless ADAM.
        curve: float64 [G, C] sums of the batch losses (nats) in each tenth of the run.
        dropped: int64 [G] pairs dropped because a loss was not finite.
        status: int32 [G] STATUS_*.
        failed_step: int64 [G], -1 where none.
        rate_scale: float64 [G] that a plateau schedule has multiplied rate and perturbation by; 1 in this loop.
        stale: int64 [G] looks since the loss on the slice held back last improved.
    """

    packed: np.ndarray
    first_moment: np.ndarray
    second_moment: np.ndarray
    curve: np.ndarray
    dropped: np.ndarray
    status: np.ndarray
    failed_step: np.ndarray
    rate_scale: np.ndarray
    stale: np.ndarray

    @classmethod
    def fresh(cls, packed: np.ndarray, optimizer: int) -> GroupState:
        """State before the first step, around packed weights [G, T]."""
        group, size = packed.shape
        return cls(
            packed=packed,
            first_moment=np.zeros((group, size if optimizer != SGD else 0), np.float32),
            second_moment=np.zeros((group, size if optimizer == ADAM else 0), np.float32),
            curve=np.zeros((group, CURVE_POINTS)),
            dropped=np.zeros(group, np.int64),
            status=np.zeros(group, np.int32),
            failed_step=np.full(group, -1, np.int64),
            rate_scale=np.ones(group),
            stale=np.zeros(group, np.int64),
        )
