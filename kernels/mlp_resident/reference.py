"""The resident MLP loop as a specification: one expert at a time, NumPy, any float dtype.

Legend as in `contract`. Products have shapes that depend on the expert alone. Estimates, by site:

* activations: d_h = mean_j c_j v_j for every example, c_j the coefficient of probe j (see `fitness`), dW1 = x d_h^T
  (forward gradients with activation perturbation: Ren, Kornblith, Liao, Hinton, "Scaling forward gradient with local
  losses", 2022). A unit whose activation is the same at both ends of every probe cannot have moved the loss: its
  entry is zero, which takes the noise of the others from it and no signal. With HEAD_PAIRS the head's gradient comes
  from one +/- pair at each scalar logit, the same rule with a full basis.
* weights: mean_j c_j z_j with z_j over all weights (Spall 1992, and the directions of `directions`).
* calculus: the analytic gradient, for comparison. Sign activations pass the gradient straight through where |h| <= 1
  (Hubara, Courbariaux, Soudry, El-Yaniv, Bengio, "Binarized neural networks", 2016, eq. 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..philox import reference as philox
from .contract import (
    ACTIVATIONS,
    ADAM,
    CALCULUS,
    CENTRAL,
    CURVE_POINTS,
    HEAD_DELTA,
    HEAD_PAIRS,
    HEAD_REGRESSION,
    HEAD_SAME,
    HEAD_TREE,
    LOSS_FUNCTION,
    LOSS_LIKELIHOOD,
    LOSS_ZERO_ONE,
    MEMORY_UNIT,
    RELU,
    SGD,
    STATUS_NO_FINITE_PAIR,
    STATUS_NONFINITE_WEIGHT,
    STATUS_OK,
    WEIGHTS,
    GroupState,
    Inputs,
    MlpShape,
    Recipe,
    tree_rows,
    tree_signs,
)
from .directions import draw_directions, weight_direction
from .fitness import coefficients

Weights = dict[str, np.ndarray]
# gradient by role, mean loss (nats), finite probes, dropped probes
Estimate = tuple[Weights, float, int, int]


@dataclass(frozen=True)
class Batch:
    """Examples of one step.

    Attributes:
        x: [B, F].
        targets: int64 [B], or [B, V] for regression.
        memory: [B, K, M] in nats, or None.
    """

    x: np.ndarray
    targets: np.ndarray
    memory: np.ndarray | None = None


def gather(inputs: Inputs, positions: np.ndarray, dtype: np.dtype) -> Batch:
    """The inputs at `positions`."""
    memory = None
    if inputs.memory is not None:
        assert isinstance(inputs.memory, np.ndarray)
        memory = inputs.memory[positions].astype(dtype) * dtype.type(MEMORY_UNIT)
    if inputs.text is None:
        assert inputs.x is not None
        assert inputs.y is not None
        kind = dtype if inputs.y.ndim == 2 else np.int64
        return Batch(inputs.x[positions].astype(dtype), inputs.y[positions].astype(kind), memory)
    assert inputs.embedding is not None
    before = inputs.text[positions[:, None] - 1 - np.arange(inputs.context)]
    features = inputs.embedding[before].reshape(len(positions), -1)
    return Batch(features.astype(dtype), inputs.text[positions].astype(np.int64), memory)


def activate(shape: MlpShape, h: np.ndarray) -> np.ndarray:
    """max(h, 0), or +1 / -1 by the sign of h; both hand NaN on."""
    if shape.activation == RELU:
        return np.where(h < 0, 0, h)
    return np.where(np.isnan(h), h, np.where(h < 0, -1, 1)).astype(h.dtype)


def memory_logits(shape: MlpShape, weights: Weights, batch: Batch) -> np.ndarray | float:
    """U_k m_k: [B, K], or 0 without memory."""
    if not shape.num_memory:
        return 0.0
    assert batch.memory is not None
    return np.einsum("bkm,km->bk", batch.memory, weights["u"])


def head_logits(shape: MlpShape, weights: Weights, active: np.ndarray, batch: Batch) -> np.ndarray:
    """Logits that decide the loss: [B, K] along each target's path (tree) or [B, V]."""
    if shape.head == HEAD_TREE:
        rows = tree_rows(batch.targets, shape.tree_depth)
        logits = np.einsum("bkh,bh->bk", weights["w2"][rows], active) + weights["b2"][rows]
        return logits + memory_logits(shape, weights, batch)
    return active @ weights["w2"].T + weights["b2"]


def logit_losses(shape: MlpShape, recipe: Recipe, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Losses [B] from logits [B, K or V] as `head_logits` gives them.

    Cross entropy in nats, or squared error summed over the outputs. LOSS_ZERO_ONE is 1 where the greedy answer is
    wrong: a decision on the path (tree; at odds of one, wrong) or the highest logit (softmax; ties count as wrong).
    """
    if recipe.loss == LOSS_FUNCTION:
        assert recipe.loss_function is not None
        return recipe.loss_function(logits, targets).astype(logits.dtype)
    if shape.head == HEAD_REGRESSION:
        assert recipe.loss == LOSS_LIKELIHOOD
        return ((logits - targets) ** 2).sum(1)
    if shape.head == HEAD_TREE:
        margins = tree_signs(targets, shape.tree_depth) * logits
        if recipe.loss == LOSS_ZERO_ONE:
            wrong = ~(margins > 0).all(1)
            return np.where(np.isnan(margins).any(1), np.nan, wrong).astype(logits.dtype)
        return np.logaddexp(0, -margins).sum(1)
    chosen = np.take_along_axis(logits, targets[:, None], 1)
    if recipe.loss == LOSS_ZERO_ONE:
        rivals = np.where(np.arange(logits.shape[1]) == targets[:, None], -np.inf, logits)
        wrong = ~(chosen[:, 0] > rivals.max(1))
        return np.where(np.isnan(logits).any(1), np.nan, wrong).astype(logits.dtype)
    return np.logaddexp.reduce(logits, axis=1) - chosen[:, 0]


def losses(shape: MlpShape, recipe: Recipe, weights: Weights, batch: Batch) -> np.ndarray:
    """Losses [B] of a batch."""
    active = hidden_layer(shape, recipe, weights, batch.x)[1]
    return logit_losses(shape, recipe, head_logits(shape, weights, active, batch), batch.targets)


def hidden_layer(shape: MlpShape, recipe: Recipe, weights: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pre-activations and activations [B, H]; zeros where the recipe leaves the hidden layer out."""
    if not recipe.use_body:
        nothing = np.zeros((len(x), shape.hidden), x.dtype)
        return nothing, nothing
    h = x @ weights["w1"] + weights["b1"]
    return h, activate(shape, h)


def pair_gradient(
    shape: MlpShape, recipe: Recipe, logits: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Slope [B, K or V] of the loss at each scalar logit by one +/- pair, and mean loss [B] around it.

    The mean is over the pairs where the loss is a sum over the logits (tree), else that of the logits themselves.
    """
    reach = recipe.head_perturbation_size
    slopes = np.empty_like(logits)
    loss = logit_losses(shape, recipe, logits, targets)
    middle = np.zeros_like(loss)
    for k in range(logits.shape[1]):
        shift = reach * (np.arange(logits.shape[1]) == k).astype(logits.dtype)
        plus = logit_losses(shape, recipe, logits + shift, targets)
        minus = logit_losses(shape, recipe, logits - shift, targets)
        slopes[:, k] = (plus - minus) / (2 * reach)
        middle += (plus + minus) / 2 - loss
    additive = shape.head == HEAD_TREE and recipe.loss == LOSS_LIKELIHOOD
    return slopes, loss + middle if additive else loss


def exact_gradient(shape: MlpShape, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Derivative [B, K or V] of the loss at each logit, in closed form."""
    if shape.head == HEAD_REGRESSION:
        return 2 * (logits - targets)
    if shape.head == HEAD_TREE:
        signs = tree_signs(targets, shape.tree_depth)
        return -signs * np.exp(-np.logaddexp(0, signs * logits))
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None])
    p[np.arange(len(targets)), targets] -= 1
    return p


def can_move(shape: MlpShape, h: np.ndarray, size: float) -> np.ndarray:
    """Whether a unit's activation differs between h + e and h - e, bool [B, H]; True where h is not finite."""
    if shape.activation == RELU:
        return ~(h + size <= 0)
    return ~(np.abs(h) > size)


def estimate_activations(
    shape: MlpShape, recipe: Recipe, weights: Weights, batch: Batch, step: int, expert: int
) -> Estimate:
    """See the module's docstring."""
    h, active = hidden_layer(shape, recipe, weights, batch.x)
    logits = head_logits(shape, weights, active, batch)
    head, base = _head_gradient(shape, recipe, logits, batch.targets)
    head_finite = np.isfinite(head)
    delta = np.zeros_like(h)
    finite = head_finite.sum(1)
    dropped = head_finite.size - int(finite.sum())
    if recipe.train_body and recipe.use_body:
        size = recipe.perturbation_size
        v = draw_directions(
            recipe.seed, expert, step, recipe.batch, shape.hidden, recipe.num_perturbations, recipe.directions
        )

        def moved(reach: float) -> np.ndarray:
            ends = [activate(shape, h + reach * v[:, j]) for j in range(recipe.num_perturbations)]
            return np.stack(
                [logit_losses(shape, recipe, head_logits(shape, weights, a, batch), batch.targets) for a in ends]
            )

        minus = moved(-size) if recipe.difference == CENTRAL else None
        unmoved = logit_losses(shape, recipe, logits, batch.targets)
        slopes, good = coefficients(moved(size), minus, unmoved, size, recipe.fitness)
        shares = slopes / np.maximum(good.sum(0), 1)
        delta = np.where(can_move(shape, h, size), np.einsum("pb,bph->bh", shares, v), 0)
        finite = finite + good.sum(0)
        dropped += good.size - int(good.sum())
    return _assembled(shape, recipe, batch, active, np.where(head_finite, head, 0), delta, finite, dropped, base)


def estimate_calculus(shape: MlpShape, recipe: Recipe, weights: Weights, batch: Batch) -> Estimate:
    """The analytic gradient; a logit whose derivative is not finite is dropped."""
    h, active = hidden_layer(shape, recipe, weights, batch.x)
    logits = head_logits(shape, weights, active, batch)
    head = exact_gradient(shape, logits, batch.targets)
    good = np.isfinite(head)
    head = np.where(good, head, 0)
    if shape.head == HEAD_TREE:
        used = weights["w2"][tree_rows(batch.targets, shape.tree_depth)]
    else:
        used = np.broadcast_to(weights["w2"], (len(batch.x), *weights["w2"].shape))
    through = h > 0 if shape.activation == RELU else np.abs(h) <= 1
    delta = np.einsum("bk,bkh->bh", head, used) * through
    base = logit_losses(shape, recipe, logits, batch.targets)
    finite = good.sum(1)
    return _assembled(shape, recipe, batch, active, head, delta, finite, good.size - int(finite.sum()), base)


def probe(
    shape: MlpShape, recipe: Recipe, weights: Weights, batch: Batch, moving: tuple[str, ...], step: int, expert: int
) -> tuple[list[Weights], np.ndarray, np.ndarray | None]:
    """Directions over all roles, and the mean losses [P] of the batch where the `moving` ones are moved by +e and -e.

    One-sided recipes have no losses at -e.
    """
    active = hidden_layer(shape, recipe, weights, batch.x)[1]
    drawn = [
        weight_direction(
            shape, recipe.directions, recipe.density, recipe.rank, batch.x, active, recipe.seed, step, expert, j
        )
        for j in range(recipe.num_perturbations)
    ]

    def losses_at(reach: float) -> np.ndarray:
        found = []
        for z in drawn:
            trial = {role: weights[role] + reach * z[role] if role in moving else weights[role] for role in weights}
            found.append(losses(shape, recipe, trial, batch).mean())
        return np.array(found, weights["w1"].dtype)

    size = recipe.perturbation_size
    return drawn, losses_at(size), losses_at(-size) if recipe.difference == CENTRAL else None


def estimate_weights(
    shape: MlpShape, recipe: Recipe, weights: Weights, batch: Batch, step: int, expert: int
) -> Estimate:
    """See the module's docstring; the loss of a probe is the mean over the batch."""
    body = ("w1", "b1") if recipe.train_body and recipe.use_body else ()
    head = tuple(role for role in weights if role not in ("w1", "b1"))
    if not recipe.use_body:
        head = tuple(role for role in head if role != "w2")
    moving = (*body, *head) if recipe.head_rule == HEAD_SAME else body
    active = hidden_layer(shape, recipe, weights, batch.x)[1]
    logits = head_logits(shape, weights, active, batch)
    base = logit_losses(shape, recipe, logits, batch.targets)
    probes = recipe.num_perturbations if moving else 0
    size, dtype = recipe.perturbation_size, weights["w1"].dtype
    total = {role: np.zeros_like(value) for role, value in weights.items()}
    finite, dropped, mean_loss = 0, 0, _finite_mean(base)
    if probes:
        drawn, plus, minus = probe(shape, recipe, weights, batch, moving, step, expert)
        shares, good = coefficients(plus, minus, base.mean(), size, recipe.fitness)
        finite, dropped = int(good.sum()), probes - int(good.sum())
        if finite:
            around = (plus + minus) / 2 if minus is not None else plus * 0 + base.mean()
            mean_loss = float(around[good].mean())
        for j in np.flatnonzero(good):
            for role in moving:
                total[role] += shares[j] / finite * drawn[j][role]
    if recipe.rescale:
        total = {role: value / dtype.type(recipe.density) for role, value in total.items()}
    if recipe.head_rule != HEAD_SAME:
        slopes, loss = _head_gradient(shape, recipe, logits, batch.targets)
        good = np.isfinite(slopes)
        exact, head_loss, count, lost = _assembled(
            shape, recipe, batch, active, np.where(good, slopes, 0), np.zeros_like(active), good.sum(1),
            good.size - int(good.sum()), loss,
        )  # fmt: skip
        total = {role: exact[role] if role in head else value for role, value in total.items()}
        finite, dropped = finite + count, dropped + lost
        mean_loss = mean_loss if probes else head_loss
    return total, mean_loss, finite, dropped


def _head_gradient(shape: MlpShape, recipe: Recipe, logits: np.ndarray, targets: np.ndarray):
    if recipe.head_rule == HEAD_DELTA:
        return exact_gradient(shape, logits, targets), logit_losses(shape, recipe, logits, targets)
    assert recipe.head_rule == HEAD_PAIRS
    return pair_gradient(shape, recipe, logits, targets)


def _finite_mean(values: np.ndarray) -> float:
    good = np.isfinite(values)
    return float(values[good].mean()) if good.any() else 0.0


def _assembled(shape, recipe, batch, active, head, delta, finite, dropped, loss) -> Estimate:
    """The estimate from slopes at the logits and at the hidden layer, what gave no finite probe left out."""
    count = len(batch.x)
    silent = finite == 0
    x = np.where(silent[:, None], 0, batch.x)
    delta = np.where(silent[:, None], 0, delta)
    if not (recipe.train_body and recipe.use_body):
        x, delta = np.zeros_like(x), np.zeros_like(delta)
    w2 = np.zeros((shape.num_rows, shape.hidden), x.dtype)
    b2 = np.zeros(shape.num_rows, x.dtype)
    if shape.head == HEAD_TREE:
        rows = tree_rows(batch.targets, shape.tree_depth)
    else:
        rows = np.broadcast_to(np.arange(shape.num_rows), head.shape)
    for b in range(count):
        used = head[b] != 0
        w2[rows[b, used]] += head[b, used, None] * active[b]
        b2[rows[b, used]] += head[b, used]
    if not recipe.use_body:
        w2[:] = 0
    gradient = {"w1": x.T @ delta / count, "b1": delta.sum(0) / count, "w2": w2 / count, "b2": b2 / count}
    if shape.num_memory:
        gradient["u"] = np.einsum("bk,bkm->km", head, batch.memory) / count
    return gradient, _finite_mean(loss), int(finite.sum()), dropped


def estimate(shape: MlpShape, recipe: Recipe, weights: Weights, batch: Batch, step: int, expert: int) -> Estimate:
    """The recipe's gradient estimate: (gradient by role, mean loss in nats, finite probes, dropped probes)."""
    if recipe.site == ACTIVATIONS:
        return estimate_activations(shape, recipe, weights, batch, step, expert)
    if recipe.site == WEIGHTS:
        return estimate_weights(shape, recipe, weights, batch, step, expert)
    assert recipe.site == CALCULUS
    return estimate_calculus(shape, recipe, weights, batch)


class Following(Protocol):
    """What an optimiser step reads of a recipe."""

    @property
    def optimizer(self) -> int:
        """SGD, MOMENTUM or ADAM."""
        ...

    @property
    def beta1(self) -> float:
        """Decay of the first moment."""
        ...

    @property
    def beta2(self) -> float:
        """Decay of the second moment."""
        ...

    @property
    def epsilon(self) -> float:
        """Adam's denominator term."""
        ...


def update(recipe: Following, rate: float, weight, gradient, first, second, step: int) -> None:
    """One optimiser step in place; Adam with bias correction (Kingma and Ba 2015, algorithm 1)."""
    if recipe.optimizer == SGD:
        weight -= rate * gradient
        return
    if recipe.optimizer != ADAM:
        first *= recipe.beta1
        first += gradient
        weight -= rate * first
        return
    first += (1 - recipe.beta1) * (gradient - first)
    second += (1 - recipe.beta2) * (gradient**2 - second)
    corrected = first / (1 - recipe.beta1 ** (step + 1))
    scale = np.sqrt(second / (1 - recipe.beta2 ** (step + 1)))
    weight -= rate * corrected / (scale + recipe.epsilon)


def round_to_grid(packed: np.ndarray, recipe: Recipe, moving: np.ndarray, step: int, expert: int) -> None:
    """Move the weights [T] in `moving` to the grid, up or down at random so that the mean stays; in place."""
    assert recipe.grid is not None
    word = philox.pack_draw(philox.PURPOSE_ROUNDING)
    chance = philox.words(recipe.seed, word, step, expert, packed.size) >> np.uint32(8)
    chance = chance.astype(packed.dtype) * packed.dtype.type(2**-24)
    spacing = np.where(recipe.grid > 0, recipe.grid, 1).astype(packed.dtype)
    level = np.clip(np.floor(packed / spacing + chance), -recipe.levels, recipe.levels)
    packed[...] = np.where(moving & (recipe.grid > 0), level * spacing, packed)


def moving_roles(recipe: Recipe, roles) -> tuple[str, ...]:
    """Roles that training changes."""
    frozen = {"w1", "b1"} if not (recipe.train_body and recipe.use_body) else set()
    return tuple(role for role in roles if role not in (frozen if recipe.use_body else frozen | {"w2"}))


def train_group(
    shape: MlpShape,
    recipe: Recipe,
    inputs: Inputs,
    indices: np.ndarray,
    offsets: np.ndarray,
    expert_ids: np.ndarray,
    state: GroupState,
    first_step: int,
    last_step: int,
) -> None:
    """Same contract as `numba.train_group`; computes in the dtype of `state.packed`."""
    moving = moving_roles(recipe, shape.roles)
    mask = np.zeros(shape.packed_size, bool)
    for role in moving:
        shape.views(mask)[role][...] = True
    anchor = np.zeros(shape.packed_size, np.float32) if recipe.anchor is None else recipe.anchor
    anchors = shape.views(anchor)
    draw_batch = philox.pack_draw(philox.PURPOSE_BATCH)
    total_steps = len(recipe.learning_rates)
    for e, expert in enumerate(expert_ids):
        own = indices[offsets[e] : offsets[e + 1]]
        if len(own) == 0 or state.status[e] != STATUS_OK:
            continue
        weights = shape.views(state.packed[e])
        first = shape.views(state.first_moment[e]) if state.first_moment.shape[1] else weights
        second = shape.views(state.second_moment[e]) if state.second_moment.shape[1] else weights
        with np.errstate(invalid="ignore", over="ignore"):
            for step in range(first_step, last_step):
                chosen = philox.uniform_ints(recipe.seed, draw_batch, step, int(expert), recipe.batch, len(own))
                batch = gather(inputs, own[chosen].astype(np.int64), state.packed.dtype)
                gradient, loss, finite, dropped = estimate(shape, recipe, weights, batch, step, int(expert))
                state.dropped[e] += dropped
                if finite == 0:
                    state.status[e] = STATUS_NO_FINITE_PAIR
                    state.failed_step[e] = step
                    break
                state.curve[e, step * CURVE_POINTS // total_steps] += loss
                if recipe.clip_norm:
                    norm = np.sqrt(sum((gradient[role] ** 2).sum() for role in moving))
                    shrink = recipe.clip_norm / norm if norm > recipe.clip_norm else 1.0
                    gradient = {role: value * shrink for role, value in gradient.items()}
                for role in moving:
                    if role in ("w1", "w2", "u"):
                        pull = float(recipe.learning_rates[step]) * recipe.weight_decay
                        weights[role] -= pull * (weights[role] - anchors[role])
                    update(
                        recipe,
                        float(recipe.learning_rates[step]),
                        weights[role],
                        gradient[role],
                        first[role],
                        second[role],
                        step,
                    )
                if recipe.grid is not None:
                    round_to_grid(state.packed[e], recipe, mask, step, int(expert))
        if state.status[e] == STATUS_OK and not np.isfinite(state.packed[e]).all():
            state.status[e] = STATUS_NONFINITE_WEIGHT
            state.failed_step[e] = last_step - 1
