"""The resident MLP loop as a specification: one expert at a time, NumPy, any float dtype.

Legend as in `contract`. Products have shapes that depend on the expert alone. Estimates:

* activation: d_h = mean_j (L(h + e v_j) - L(h - e v_j)) / 2e * v_j per example, dW1 = x d_h^T (forward gradients
  with per-layer activation perturbation: Ren, Kornblith, Liao, Hinton, "Scaling forward gradient with local losses",
  2022). The head's gradient comes from one +/- pair at each scalar logit, the same rule with a full basis.
* spsa: mean_j (L(theta + e z_j) - L(theta - e z_j)) / 2e * z_j (Spall 1992), z_j Rademacher, L the batch mean.
* backprop: the analytic gradient, for comparison.
"""

from __future__ import annotations

import numpy as np

from ..philox import reference as philox
from .contract import (
    ACTIVATION,
    ADAM,
    BACKPROP,
    CURVE_POINTS,
    HADAMARD,
    HEAD_TREE,
    LAYER_ALL,
    LAYER_BODY,
    SGD,
    SPSA,
    STATUS_NO_FINITE_PAIR,
    STATUS_NONFINITE_WEIGHT,
    STATUS_OK,
    GroupState,
    Inputs,
    MlpShape,
    Recipe,
    tree_rows,
    tree_signs,
)

Weights = dict[str, np.ndarray]


def gather(inputs: Inputs, positions: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Features [B, F] and targets int64 [B] of the inputs at `positions`."""
    if inputs.text is None:
        assert inputs.x is not None
        assert inputs.y is not None
        return inputs.x[positions].astype(dtype), inputs.y[positions].astype(np.int64)
    assert inputs.embedding is not None
    before = inputs.text[positions[:, None] - 1 - np.arange(inputs.context)]
    features = inputs.embedding[before].reshape(len(positions), -1)
    return features.astype(dtype), inputs.text[positions].astype(np.int64)


def tree_path(targets: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Head rows int64 [B, K] on the way to each target, and signs [B, K]: +1 where the branch taken is bit 1."""
    return tree_rows(targets, depth), tree_signs(targets, depth)


def relu(h: np.ndarray) -> np.ndarray:
    """max(h, 0) that hands NaN on."""
    return np.where(h < 0, 0, h)


def head_logits(shape: MlpShape, weights: Weights, active: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Logits that decide the loss: [B, K] along each target's path (tree) or [B, V] (softmax)."""
    if shape.head == HEAD_TREE:
        rows, _ = tree_path(targets, shape.tree_depth)
        return np.einsum("bkh,bh->bk", weights["w2"][rows], active) + weights["b2"][rows]
    return active @ weights["w2"].T + weights["b2"]


def logit_losses(shape: MlpShape, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Losses [B, ...] in nats from logits [B, K or V, ...] as `head_logits` gives them; trailing axes are kept."""
    if shape.head == HEAD_TREE:
        _, signs = tree_path(targets, shape.tree_depth)
        return np.logaddexp(0, -_trail(signs, logits) * logits).sum(1)
    chosen = np.take_along_axis(logits, _trail(targets[:, None], logits), 1)[:, 0]
    return np.logaddexp.reduce(logits, axis=1) - chosen


def _trail(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def losses(shape: MlpShape, weights: Weights, x: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Losses [B] of a batch x [B, F]."""
    active = relu(x @ weights["w1"] + weights["b1"])
    return logit_losses(shape, head_logits(shape, weights, active, targets), targets)


def hidden_directions(shape: MlpShape, recipe: Recipe, step: int, expert: int) -> np.ndarray:
    """v: int8 [B, P, H] of +1 and -1, random signs or rows of a Hadamard basis under random flips per example."""
    return draw_directions(
        recipe.seed, expert, step, recipe.batch, shape.hidden, recipe.num_perturbations, recipe.directions
    )


def draw_directions(
    seed: int, expert: int, step: int, batch: int, hidden: int, pairs: int, directions: int
) -> np.ndarray:
    """As `hidden_directions`: int8 [B, P, H]; every example's units are padded to whole 32-bit words of signs."""
    padded = -(-hidden // 32) * 32

    def draw(perturbation: int) -> np.ndarray:
        word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_BODY, perturbation)
        return philox.signs(seed, word, step, expert, batch * padded).reshape(batch, padded)

    if directions == HADAMARD:
        basis = hadamard_rows(pairs, padded)
        # the sign bit of a product is the XOR of the bits; a set bit means +1 in `signs` and -1 in the basis
        drawn = draw(0)[:, None, :] * basis[None]
    else:
        drawn = np.stack([draw(j) for j in range(pairs)], axis=1)
    return drawn[:, :, :hidden]


def hadamard_rows(count: int, width: int) -> np.ndarray:
    """Rows of Sylvester's Hadamard matrix, int8 [count, width]: -1 where popcount(row & column) is odd."""
    common = np.arange(count)[:, None] & np.arange(width)[None, :]
    return (1 - 2 * (np.bitwise_count(common) & 1)).astype(np.int8)


def weight_direction(shape: MlpShape, recipe: Recipe, step: int, expert: int, pair: int) -> Weights:
    """z by role, +1 and -1: sign i belongs to float i of the packed vector, padding included."""
    word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_ALL, pair)
    return shape.views(philox.signs(recipe.seed, word, step, expert, shape.packed_size))


def estimate_activation(
    shape: MlpShape, recipe: Recipe, weights: Weights, x: np.ndarray, targets: np.ndarray, step: int, expert: int
) -> tuple[Weights, float, int, int]:
    """Gradient by role, mean loss (nats) at the head's pairs, finite pairs, dropped pairs."""
    h = x @ weights["w1"] + weights["b1"]
    active = relu(h)
    logits = head_logits(shape, weights, active, targets)
    reach = recipe.head_perturbation_size
    shifts = reach * np.eye(logits.shape[1], dtype=logits.dtype)
    plus = logit_losses(shape, logits[:, :, None] + shifts, targets)
    minus = logit_losses(shape, logits[:, :, None] - shifts, targets)
    head = (plus - minus) / (2 * reach)
    head_finite = np.isfinite(head)
    base_losses = logit_losses(shape, logits, targets)
    delta = np.zeros_like(h)
    finite = head_finite.sum(1)
    dropped = head_finite.size - int(finite.sum())
    if recipe.train_body:
        v = hidden_directions(shape, recipe, step, expert)
        slopes = np.empty(v.shape[:2], h.dtype)
        for j in range(recipe.num_perturbations):
            moved = [relu(h + side * recipe.perturbation_size * v[:, j]) for side in (1, -1)]
            ends = [logit_losses(shape, head_logits(shape, weights, a, targets), targets) for a in moved]
            slopes[:, j] = (ends[0] - ends[1]) / (2 * recipe.perturbation_size)
        good = np.isfinite(slopes)
        shares = np.where(good, slopes, 0) / np.maximum(good.sum(1), 1)[:, None]
        delta = np.einsum("bp,bph->bh", shares, v)
        finite = finite + good.sum(1)
        dropped += good.size - int(good.sum())
    head = np.where(head_finite, head, 0)
    x = np.where((finite == 0)[:, None], 0, x)
    delta[finite == 0] = 0
    gradient = _gradient(shape, weights, x, active, head, delta, targets, recipe.train_body)
    if shape.head == HEAD_TREE:
        base_losses = base_losses + ((plus + minus) / 2 - base_losses[:, None]).sum(1)
    return gradient, _finite_mean(base_losses), int(finite.sum()), dropped


def estimate_backprop(
    shape: MlpShape, recipe: Recipe, weights: Weights, x: np.ndarray, targets: np.ndarray
) -> tuple[Weights, float, int, int]:
    """As `estimate_activation`, analytically; a logit whose gradient is not finite is dropped likewise."""
    h = x @ weights["w1"] + weights["b1"]
    active = relu(h)
    logits = head_logits(shape, weights, active, targets)
    if shape.head == HEAD_TREE:
        rows, signs = tree_path(targets, shape.tree_depth)
        head = -signs * np.exp(-np.logaddexp(0, signs * logits))
        used = weights["w2"][rows]
    else:
        head = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None])
        head[np.arange(len(targets)), targets] -= 1
        used = np.broadcast_to(weights["w2"], (len(targets), *weights["w2"].shape))
    good = np.isfinite(head)
    head = np.where(good, head, 0)
    delta = np.einsum("bk,bkh->bh", head, used) * (h > 0)
    nothing = good.sum(1) == 0
    delta[nothing] = 0
    x = np.where(nothing[:, None], 0, x)
    gradient = _gradient(shape, weights, x, active, head, delta, targets, recipe.train_body)
    mean_loss = _finite_mean(logit_losses(shape, logits, targets))
    return gradient, mean_loss, int(good.sum()), good.size - int(good.sum())


def estimate_spsa(
    shape: MlpShape, recipe: Recipe, weights: Weights, x: np.ndarray, targets: np.ndarray, step: int, expert: int
) -> tuple[Weights, float, int, int]:
    """Gradient by role, mean loss (nats) of the pairs, finite pairs, dropped pairs."""
    total = {role: np.zeros_like(value) for role, value in weights.items()}
    loss, finite = 0.0, 0
    moving = [role for role in weights if recipe.train_body or role in ("w2", "b2")]
    for j in range(recipe.num_perturbations):
        z = weight_direction(shape, recipe, step, expert, j)
        ends = []
        for reach in (recipe.perturbation_size, -recipe.perturbation_size):
            trial = {role: weights[role] + reach * z[role] if role in moving else weights[role] for role in weights}
            ends.append(losses(shape, trial, x, targets).mean())
        slope = (ends[0] - ends[1]) / (2 * recipe.perturbation_size)
        if not np.isfinite(slope):
            continue
        finite += 1
        loss += (ends[0] + ends[1]) / 2
        for role in moving:
            total[role] += slope * z[role]
    if finite:
        loss /= finite
        total = {role: value / finite for role, value in total.items()}
    return total, loss, finite, recipe.num_perturbations - finite


def _finite_mean(values: np.ndarray) -> float:
    good = np.isfinite(values)
    return float(values[good].mean()) if good.any() else 0.0


def _gradient(shape, weights, x, active, head, delta, targets, train_body) -> Weights:
    batch = len(x)
    w2, b2 = np.zeros_like(weights["w2"]), np.zeros_like(weights["b2"])
    if shape.head == HEAD_TREE:
        rows, _ = tree_path(targets, shape.tree_depth)
    else:
        rows = np.broadcast_to(np.arange(shape.num_rows), head.shape)
    for b in range(batch):
        used = head[b] != 0
        w2[rows[b, used]] += head[b, used, None] * active[b]
        b2[rows[b, used]] += head[b, used]
    if not train_body:
        delta = np.zeros_like(delta)
        x = np.zeros_like(x)
    return {"w1": x.T @ delta / batch, "b1": delta.sum(0) / batch, "w2": w2 / batch, "b2": b2 / batch}


def estimate(
    shape: MlpShape, recipe: Recipe, weights: Weights, x: np.ndarray, targets: np.ndarray, step: int, expert: int
) -> tuple[Weights, float, int, int]:
    """The recipe's gradient estimate: (gradient by role, mean loss in nats, finite pairs, dropped pairs)."""
    if recipe.estimator == ACTIVATION:
        return estimate_activation(shape, recipe, weights, x, targets, step, expert)
    if recipe.estimator == SPSA:
        return estimate_spsa(shape, recipe, weights, x, targets, step, expert)
    assert recipe.estimator == BACKPROP
    return estimate_backprop(shape, recipe, weights, x, targets)


def update(recipe: Recipe, weight, gradient, first, second, step: int) -> None:
    """One optimiser step in place; Adam with bias correction (Kingma and Ba 2015, algorithm 1)."""
    rate = float(recipe.learning_rates[step])
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
    moving = ("w1", "b1", "w2", "b2") if recipe.train_body else ("w2", "b2")
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
                x, targets = gather(inputs, own[chosen].astype(np.int64), state.packed.dtype)
                gradient, loss, finite, dropped = estimate(shape, recipe, weights, x, targets, step, int(expert))
                state.dropped[e] += dropped
                if finite == 0:
                    state.status[e] = STATUS_NO_FINITE_PAIR
                    state.failed_step[e] = step
                    break
                state.curve[e, step * CURVE_POINTS // total_steps] += loss
                if recipe.clip_norm:
                    norm = np.sqrt(sum((gradient[role] ** 2).sum() for role in moving))
                    gradient = {role: value * min(1.0, recipe.clip_norm / norm) for role, value in gradient.items()}
                for role in moving:
                    if role in ("w1", "w2"):
                        weights[role] *= 1 - float(recipe.learning_rates[step]) * recipe.weight_decay
                    update(recipe, weights[role], gradient[role], first[role], second[role], step)
        if state.status[e] == STATUS_OK and not np.isfinite(state.packed[e]).all():
            state.status[e] = STATUS_NONFINITE_WEIGHT
            state.failed_step[e] = last_step - 1
