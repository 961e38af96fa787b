"""The resident MLP loop for CPUs: one expert in one thread, all of it in cache, from first step to last.

Sixteen lanes hold the ends of sixteen one-sided probes of the hidden layer, or of eight antithetic pairs (lane j the
loss under +v_j, lane 8 + j under -v_j), so a forward pass per example updates eight head rows with sixteen products
each and never leaves registers. P is rounded up to whole vectors; spare lanes are ignored. No perturbation is ever
written into the weights.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from .. import simd
from ..compile import jit
from ..philox.reference import split_seed
from .contract import (
    ACTIVATIONS,
    CALCULUS,
    CENTRAL,
    CURVE_POINTS,
    HADAMARD,
    HEAD_DELTA,
    HEAD_REGRESSION,
    HEAD_SAME,
    HEAD_SOFTMAX,
    HEAD_TREE,
    LOSS_LIKELIHOOD,
    LOWRANK,
    MAX_TREE_DEPTH,
    NORMALISED,
    PLAIN,
    RANKS,
    SIGN,
    STATUS_NO_FINITE_PAIR,
    STATUS_NONFINITE_WEIGHT,
    STATUS_OK,
    SUBSPACE,
    WEIGHTS,
    GroupState,
    Inputs,
    MlpShape,
    Recipe,
)
from .draws import (
    DRAW_BATCH,
    DRAW_NORMAL,
    draw_normals,
    draw_words,
    fill_signs,
    flat_direction,
    hadamard_word,
    input_basis,
)
from .layers import (
    LANES,
    NO_BIAS,
    activate_rows,
    add_memory_gradient,
    add_memory_logits,
    body_forward,
    data_of,
    dims_of,
    eight_rows,
    exact_head,
    gather,
    logits,
    read_only,
    regression_head_pairs,
    regression_lane_losses,
    row_starts,
    softmax_head_pairs,
    softmax_lane_losses,
    softplus,
    target_rows,
    tile,
    tree_head_pairs,
    tree_lane_losses,
    wanted_values,
)
from .optimizers import clip, decay, round_to_grid, update

_PAIRS = LANES // 2
_EPSILON = np.float32(2**-23)

# the recipe's settings as the loop takes them
_Rule = namedtuple(
    "_Rule", "site directions probes size head_size difference fitness head_rule density rescale rank "
    "optimizer beta1 beta2 epsilon clip_norm weight_decay train_body use_body batch levels"
)  # fmt: skip
# arrays of one step, made once a call. Functions called for every example take them one by one: a tuple of arrays is
# copied, and counted, at every call (measured: five times slower)
_Work = namedtuple(
    "_Work", "x h a delta gradient trial z words signs lanes z_lanes logits starts memory slopes scratch losses "
    "plus minus shares rows path_signs halves targets positions wanted unit_mask basis factored"
)  # fmt: skip
# factors of a direction, bases of the layers' inputs, and x A
_Factored = namedtuple("_Factored", "factors basis1 basis2 product columns")


@jit
def _work(dims, rule):
    head_rows = MAX_TREE_DEPTH if dims.head == HEAD_TREE else dims.padded_rows
    padded_batch = (rule.batch + 7) // 8 * 8
    lanes = _PAIRS if rule.difference == CENTRAL else LANES
    blocks = (rule.probes + lanes - 1) // lanes
    words = rule.batch * dims.sign_words
    by_weights = rule.site == WEIGHTS
    probing = rule.site == ACTIVATIONS
    factored = by_weights and (rule.directions == LOWRANK or rule.directions == SUBSPACE)
    rank = rule.rank if factored else 0
    factors = (dims.num_features + dims.hidden + dims.num_rows + dims.hidden) * rank
    factors += dims.hidden + dims.num_rows + dims.depth * dims.memory
    drawn = dims.size if by_weights else 0
    if not factored:
        factors = 0
    parts = _Factored(
        np.zeros(factors, np.float32),
        np.zeros(dims.features * rank, np.float32),
        np.zeros(dims.hidden * rank, np.float32),
        np.zeros(padded_batch * rank, np.float32),
        np.zeros(rank * (2 * dims.hidden + dims.features + LANES) + dims.hidden, np.float32),
    )
    sign_count = blocks * words * LANES if probing else 0
    halves = np.ones(LANES, np.float32)
    halves[_PAIRS:] = -1
    rows = np.empty(head_rows, np.int64)
    for r in range(head_rows):
        rows[r] = dims.padded_rows - 1 if dims.head == HEAD_TREE else r
    unit_mask = np.zeros(dims.hidden, np.float32)
    unit_mask[: dims.true_hidden] = 1
    basis = np.zeros(rule.probes * dims.sign_words, np.uint32)
    if probing and rule.directions == HADAMARD:
        for j in range(rule.probes):
            for word in range(dims.sign_words):
                basis[j * dims.sign_words + word] = hadamard_word(j, word)
    return _Work(
        np.zeros(padded_batch * dims.features + LANES, np.float32),
        np.zeros(padded_batch * dims.hidden, np.float32),
        np.zeros(padded_batch * dims.hidden, np.float32),
        np.zeros(padded_batch * dims.hidden, np.float32),
        np.zeros(dims.size, np.float32),
        np.zeros(drawn, np.float32),
        np.zeros(drawn, np.float32),
        np.zeros(max(drawn + 4, words + 4, rule.batch + 4), np.uint32),
        np.zeros(sign_count, np.uint32),
        np.zeros(dims.hidden * LANES, np.float32),
        np.zeros(head_rows * LANES, np.float32),
        np.full(head_rows + LANES, NO_BIAS, np.float32),
        np.zeros(head_rows + LANES, np.float32),
        np.zeros(LANES, np.float32),
        np.zeros(head_rows + LANES, np.float32),
        np.zeros(head_rows + LANES, np.float32),
        np.zeros(LANES, np.float32),
        np.zeros(rule.probes),
        np.zeros(rule.probes),
        np.zeros(blocks * lanes, np.float32),
        rows,
        np.zeros(LANES, np.float32),
        halves,
        np.zeros(rule.batch, np.int64),
        np.zeros(rule.batch, np.int64),
        np.zeros(head_rows + LANES, np.float32),
        unit_mask,
        basis,
        parts,
    )


@jit
def _ranks(values, held, out):
    """Centred ranks of values[held]; ties share their mean rank."""
    count = 0
    for i in range(values.size):
        count += held[i]
    for i in range(values.size):
        out[i] = 0
        if held[i] and count > 1:
            below = 0
            equal = 0
            for j in range(values.size):
                if held[j]:
                    below += values[j] < values[i]
                    equal += values[j] == values[i]
            out[i] = (below + (equal - 1) / 2) / (count - 1) - 0.5


@jit
def _coefficients(plus, minus, base, central, size, fitness, shares):
    """shares[j]: see `fitness.coefficients`; what was dropped has 0. Returns how many are finite."""
    probes = plus.size
    finite = 0
    total = 0.0
    for j in range(probes):
        other = minus[j] if central else base
        shares[j] = 0
        if np.isfinite(plus[j] - other):
            finite += 1
            if fitness == PLAIN:
                shares[j] = (plus[j] - other) / (2.0 * size if central else size)
            else:
                total += plus[j] + (minus[j] if central else 0.0)
    if fitness == PLAIN or finite == 0:
        return finite
    ends = np.empty(2 * probes if central else probes)
    held = np.zeros(ends.size, np.bool_)
    ends[:probes] = plus
    if central:
        ends[probes:] = minus
    for j in range(probes):
        held[j] = np.isfinite(plus[j] - (minus[j] if central else base))
        if central:
            held[probes + j] = held[j]
    shaped = np.zeros(ends.size)
    if fitness == RANKS:
        _ranks(ends, held, shaped)
    else:
        count = 2 * finite if central else finite
        mean = total / count
        spread = 0.0
        for i in range(ends.size):
            if held[i]:
                spread += (ends[i] - mean) ** 2
        spread = np.sqrt(spread / count)
        if spread > 4 * _EPSILON * abs(mean):
            centre = mean if fitness == NORMALISED or central else base
            for i in range(ends.size):
                if held[i]:
                    shaped[i] = (ends[i] - centre) / spread
    for j in range(probes):
        if held[j]:
            shares[j] = ((shaped[j] - shaped[probes + j]) / 2 if central else shaped[j]) / size
    return finite


@jit
def _exact_loss(head, num_rows, padded_rows, z, path_signs, wanted, target):
    """Loss of one example from its logits, float64."""
    if head == HEAD_TREE:
        missed = simd.sub(simd.splat(np.float32(0)), simd.mul(simd.load(path_signs, 0), simd.load(z, 0)))
        held = simd.absolute(simd.load(path_signs, 0))
        return np.float64(np.float32(0.5) * simd.sum_lanes(simd.mul(softplus(missed), held)))
    if head == HEAD_REGRESSION:
        total = 0.0
        for r in range(num_rows):
            total += np.float64(z[r] - wanted[r]) ** 2
        return total
    highest = z[0]
    for r in range(1, num_rows):
        if not z[r] <= highest:
            highest = z[r]
    terms = np.float32(0)
    for r in range(0, padded_rows, LANES):
        terms += simd.sum_lanes(simd.exp_of_negative(simd.sub(simd.load(z, r), simd.splat(highest))))
    return np.log(np.float64(terms)) + highest - z[target]


@jit
def _batch_loss(theta, dims, data, rule, work):
    """Mean loss of a batch under the weights `theta`, float64; its activations are left in work.a."""
    padded_batch = (rule.batch + 7) // 8 * 8
    rows, path_signs, wanted, starts, z, a = (
        work.rows, work.path_signs, work.wanted, work.starts, work.logits, work.a)  # fmt: skip
    values, memory, targets, positions = data.values, data.memory, work.targets, work.positions
    depth, head, num_rows, hidden = dims.depth, dims.head, dims.num_rows, dims.hidden
    if rule.use_body:
        body_forward(theta, work.x, work.h, padded_batch, dims.features, dims.hidden, dims.b1)
        activate_rows(work.h, a, padded_batch * dims.hidden, dims.activation)
    total = 0.0
    for b in range(rule.batch):
        target_rows(targets[b], depth, head, rows, path_signs)
        if head == HEAD_REGRESSION:
            wanted_values(values, positions[b], num_rows, wanted)
        row_starts(theta, rows, dims.b2, starts)
        if dims.memory > 0:
            add_memory_logits(theta, dims.u, memory, positions[b], depth, starts)
        if rule.use_body:
            logits(theta, rows, rows.size, hidden, dims.w2, starts, a, b * hidden, z)
        else:
            z[: rows.size] = starts[: rows.size]
            if head == HEAD_TREE:
                z[_PAIRS:LANES] = z[:_PAIRS]
        total += _exact_loss(head, num_rows, dims.padded_rows, z, path_signs, wanted, targets[b])
    return total / rule.batch


@jit
def _factored_losses(theta, dims, data, rule, work, sides):
    """Mean losses (plus, minus) with W +- e A B^T / sqrt(r) and vectors +- e z, never forming the product; the second
    is 0 where `sides` is 1.

    work.delta holds x W1 + b1, product x A1; A1 [F, r], B1 [H, r], b1, A2 [R, r], B2 [H, r], b2 and U follow one
    another in the factors. What both ends share is found once an example.
    """
    rank, units = rule.rank, dims.true_hidden
    depth, head, num_rows, hidden = dims.depth, dims.head, dims.num_rows, dims.hidden
    a2_at = dims.num_features * rank + units * rank + units
    z2_at = a2_at + dims.num_rows * rank + units * rank
    u_at = z2_at + dims.num_rows
    factors, product, columns = work.factored.factors, work.factored.product, work.factored.columns
    rows, path_signs, wanted, starts, z, a, h = (
        work.rows, work.path_signs, work.wanted, work.starts, work.logits, work.a, work.delta)  # fmt: skip
    slopes, memory_z, values, memory = work.slopes, work.memory, data.values, data.memory
    targets, positions = work.targets, work.positions
    bias_at = 2 * rank * hidden
    moves_body = rule.train_body and rule.use_body
    along_head = rule.head_rule == HEAD_SAME
    count = dims.depth if head == HEAD_TREE else num_rows
    plus = minus = 0.0
    for b in range(rule.batch):
        unit = b * hidden
        target_rows(targets[b], depth, head, rows, path_signs)
        if head == HEAD_REGRESSION:
            wanted_values(values, positions[b], num_rows, wanted)
        row_starts(theta, rows, dims.b2, starts)
        if dims.memory > 0:
            add_memory_logits(theta, dims.u, memory, positions[b], depth, starts)
        if along_head:
            for k in range(count):
                slopes[k] = factors[z2_at + rows[k]]
            if dims.memory > 0:
                memory_z[:] = 0
                add_memory_logits(factors, u_at, memory, positions[b], depth, memory_z)
                for k in range(count):
                    slopes[k] += memory_z[k]
        for side in range(sides):
            shift = np.float32(rule.size if side == 0 else -rule.size)
            scale = np.float32(shift / np.sqrt(rank))
            if rule.use_body:
                for i in range(0, hidden, LANES):
                    moved = simd.load(h, unit + i)
                    if moves_body:
                        moved = simd.fma(simd.splat(shift), simd.load(columns, bias_at + i), moved)
                        for r in range(rank):
                            along = simd.splat(scale * product[b * rank + r])
                            moved = simd.fma(along, simd.load(columns, r * hidden + i), moved)
                    simd.store(a, unit + i, simd.sign(moved) if dims.activation == SIGN else simd.relu(moved))
                logits(theta, rows, rows.size, hidden, dims.w2, starts, a, unit, z)
            else:
                z[: rows.size] = starts[: rows.size]
            if along_head:
                for k in range(count):
                    z[k] += shift * slopes[k]
                if rule.use_body:
                    for r in range(rank):
                        along = simd.splat(np.float32(0))
                        for i in range(0, hidden, LANES):
                            along = simd.fma(simd.load(a, unit + i), simd.load(columns, (rank + r) * hidden + i), along)
                        seen = scale * simd.sum_lanes(along)
                        for k in range(count):
                            z[k] += seen * factors[a2_at + rows[k] * rank + r]
            if head == HEAD_TREE:
                z[_PAIRS:LANES] = z[:_PAIRS]
            loss = _exact_loss(head, num_rows, dims.padded_rows, z, path_signs, wanted, targets[b])
            if side == 0:
                plus += loss
            else:
                minus += loss
    return plus / rule.batch, minus / rule.batch


@jit
def _spread_factors(dims, rank, batch, x, factors, product, columns):
    """product [B, r] = x A1; columns: B1^T [r, H], B2^T [r, H], z1 [H] and A1^T [r, F]: inner loops run along rows."""
    hidden, units = dims.hidden, dims.true_hidden
    b1_at = dims.num_features * rank
    b2_at = b1_at + units * rank + units + dims.num_rows * rank
    bias_at = 2 * rank * hidden
    a1_at = bias_at + hidden
    columns[:] = 0
    for i in range(units):
        columns[bias_at + i] = factors[b1_at + units * rank + i]
    for r in range(rank):
        for i in range(units):
            columns[r * hidden + i] = factors[b1_at + i * rank + r]
            columns[(rank + r) * hidden + i] = factors[b2_at + i * rank + r]
        for f in range(dims.num_features):
            columns[a1_at + r * dims.features + f] = factors[f * rank + r]
    whole = dims.features // LANES * LANES
    for b in range(batch):
        for r in range(rank):
            along = simd.splat(np.float32(0))
            row = a1_at + r * dims.features
            for f in range(0, whole, LANES):
                along = simd.fma(simd.load(x, b * dims.features + f), simd.load(columns, row + f), along)
            total = simd.sum_lanes(along)
            for f in range(whole, dims.num_features):
                total += x[b * dims.features + f] * columns[row + f]
            product[b * rank + r] = total


@jit
def _draw_factors(dims, rule, work, j, step, expert, key_0, key_1):
    count = (dims.num_features + dims.true_hidden + dims.num_rows + dims.true_hidden) * rule.rank
    count += dims.true_hidden + dims.num_rows + dims.depth * dims.memory
    draw_normals(work.factored.factors, count, np.uint32(DRAW_NORMAL + np.uint32(j)), step, expert, key_0, key_1)


@jit
def _expand_factors(dims, rule, work, z):
    """z [T] of the factors: A B^T / sqrt(r), or with SUBSPACE basis1 B1^T and A2 basis2^T."""
    rank, hidden = rule.rank, dims.true_hidden
    b1_at = dims.num_features * rank
    z1_at = b1_at + hidden * rank
    a2_at = z1_at + hidden
    b2_at = a2_at + dims.num_rows * rank
    z2_at = b2_at + hidden * rank
    u_at = z2_at + dims.num_rows
    factors, basis1, basis2 = work.factored.factors, work.factored.basis1, work.factored.basis2
    z[:] = 0
    subspace = rule.directions == SUBSPACE
    scale = np.float32(1 if subspace else 1 / np.sqrt(rank))
    if rule.train_body and rule.use_body:
        for f in range(dims.num_features):
            for r in range(rank):
                left = scale * (basis1[f * rank + r] if subspace else factors[f * rank + r])
                for i in range(hidden):
                    z[f * dims.hidden + i] += left * factors[b1_at + i * rank + r]
        for i in range(hidden):
            z[dims.b1 + i] = factors[z1_at + i]
    if rule.head_rule != HEAD_SAME:
        return
    if rule.use_body:
        for row in range(dims.num_rows):
            for r in range(rank):
                left = scale * factors[a2_at + row * rank + r]
                for i in range(hidden):
                    right = basis2[i * rank + r] if subspace else factors[b2_at + i * rank + r]
                    z[dims.w2 + row * dims.hidden + i] += left * right
    for row in range(dims.num_rows):
        z[dims.b2 + row] = factors[z2_at + row]
    for k in range(dims.depth * dims.memory):
        z[dims.u + k] = factors[u_at + k]


@jit
def _estimate_weights(theta, dims, data, rule, work, probed, step, expert, key_0, key_1):
    """Gradient over the perturbed weights; returns (mean loss, finite probes)."""
    central = rule.difference == CENTRAL
    x, z, trial, gradient, factors, product = (
        work.x, work.z, work.trial, work.gradient, work.factored.factors, work.factored.product)  # fmt: skip
    factored = rule.directions == LOWRANK
    base = _batch_loss(theta, dims, data, rule, work)
    if rule.directions == SUBSPACE:
        input_basis(x, rule.batch, dims.features, dims.num_features, rule.rank, 0, product, work.factored.basis1,
                    step, expert, key_0, key_1)  # fmt: skip
        input_basis(work.a, rule.batch, dims.hidden, dims.true_hidden, rule.rank, 1, product, work.factored.basis2,
                    step, expert, key_0, key_1)  # fmt: skip
    if factored and rule.use_body:
        work.delta[:] = work.h
    for j in range(rule.probes):
        if factored:
            _draw_factors(dims, rule, work, j, step, expert, key_0, key_1)
            _spread_factors(dims, rule.rank, rule.batch, x, factors, product, work.factored.columns)
            work.plus[j], work.minus[j] = _factored_losses(theta, dims, data, rule, work, 2 if central else 1)
            continue
        if rule.directions == SUBSPACE:
            _draw_factors(dims, rule, work, j, step, expert, key_0, key_1)
            _expand_factors(dims, rule, work, work.z)
        else:
            flat_direction(work.z, probed, rule.directions, rule.density, work.words, j, step, expert, key_0, key_1)
        for side in range(2 if central else 1):
            reach = simd.splat(np.float32(rule.size if side == 0 else -rule.size))
            for i in range(0, dims.size, LANES):
                simd.store(trial, i, simd.fma(reach, simd.load(z, i), simd.load(theta, i)))
            loss = _batch_loss(work.trial, dims, data, rule, work)
            if side == 0:
                work.plus[j] = loss
            else:
                work.minus[j] = loss
    finite = _coefficients(work.plus, work.minus, base, central, rule.size, rule.fitness, work.shares)
    loss = 0.0
    for j in range(rule.probes):
        other = work.minus[j] if central else base
        if not np.isfinite(work.plus[j] - other):
            continue
        loss += 0.5 * (work.plus[j] + work.minus[j]) if central else base
        if factored or rule.directions == SUBSPACE:
            _draw_factors(dims, rule, work, j, step, expert, key_0, key_1)
            _expand_factors(dims, rule, work, work.z)
        else:
            flat_direction(work.z, probed, rule.directions, rule.density, work.words, j, step, expert, key_0, key_1)
        share = np.float32(work.shares[j] / finite)
        if rule.rescale:
            share /= np.float32(rule.density)
        weight = simd.splat(share)
        for i in range(0, dims.size, LANES):
            simd.store(gradient, i, simd.fma(weight, simd.load(z, i), simd.load(gradient, i)))
    if rule.head_rule != HEAD_SAME:
        # the head's own rule starts from the unperturbed hidden layer
        _batch_loss(theta, dims, data, rule, work)
    return (loss / finite if finite else 0.0), finite


@jit
def _estimate_examples(theta, dims, data, rule, work, body_by_weights, dropped, e, step, expert, key_0, key_1):
    """Gradient from slopes at every example's logits and hidden layer; returns (mean loss, finite probes).

    With `body_by_weights` the body's gradient is there already.
    """
    padded_batch = (rule.batch + 7) // 8 * 8
    per_batch = np.float32(1.0 / rule.batch)
    depth, head, num_rows, hidden = dims.depth, dims.head, dims.num_rows, dims.hidden
    body = rule.train_body and rule.use_body and not body_by_weights
    exact = rule.site == CALCULUS or rule.head_rule == HEAD_DELTA
    head_size = np.float32(rule.head_size)
    central = rule.difference == CENTRAL
    lanes = _PAIRS if central else LANES
    blocks = (rule.probes + lanes - 1) // lanes
    words = rule.batch * dims.sign_words
    size = np.float32(rule.size)
    probe = simd.splat(size)
    probing = rule.site == ACTIVATIONS and body
    active_rows = dims.depth if dims.head == HEAD_TREE else dims.num_rows
    x, h, a, delta, gradient, z, starts, slopes, scratch = (
        work.x, work.h, work.a, work.delta, work.gradient, work.logits, work.starts, work.slopes,
        work.scratch)  # fmt: skip
    rows, path_signs, halves, targets, positions, wanted, unit_mask = (
        work.rows, work.path_signs, work.halves, work.targets, work.positions, work.wanted,
        work.unit_mask)  # fmt: skip
    signs, lanes_of_unit, z_lanes, losses, shares, plus, minus = (
        work.signs, work.lanes, work.z_lanes, work.losses, work.shares, work.plus, work.minus)  # fmt: skip
    values, memory = data.values, data.memory
    if probing:
        fill_signs(signs, work.words, work.basis, rule.batch, dims.sign_words, rule.probes, lanes,
                   rule.directions, step, expert, key_0, key_1)  # fmt: skip
    if rule.use_body and not body_by_weights:
        body_forward(theta, x, h, padded_batch, dims.features, hidden, dims.b1)
        activate_rows(h, a, padded_batch * hidden, dims.activation)
    finite, counted, step_loss = 0, 0, 0.0
    for b in range(rule.batch):
        unit = b * hidden
        target_rows(targets[b], depth, head, rows, path_signs)
        if head == HEAD_REGRESSION:
            wanted_values(values, positions[b], num_rows, wanted)
        row_starts(theta, rows, dims.b2, starts)
        if dims.memory > 0:
            add_memory_logits(theta, dims.u, memory, positions[b], depth, starts)
        if rule.use_body:
            logits(theta, rows, rows.size, hidden, dims.w2, starts, a, unit, z)
        else:
            z[: rows.size] = starts[: rows.size]
            if head == HEAD_TREE:
                z[_PAIRS:LANES] = z[:_PAIRS]
        if exact:
            loss = exact_head(z, num_rows, dims.padded_rows, head, path_signs, targets[b], wanted, slopes)
        elif head == HEAD_TREE:
            loss = tree_head_pairs(z, path_signs, halves, head_size, slopes)
        elif head == HEAD_SOFTMAX:
            loss = softmax_head_pairs(z, num_rows, dims.padded_rows, targets[b], head_size, scratch, slopes)
        else:
            loss = regression_head_pairs(z, dims.padded_rows, wanted, head_size, slopes)
        if np.isfinite(loss):
            step_loss += loss
            counted += 1

        finite_here = 0
        for r in range(active_rows):
            if not np.isfinite(slopes[r]):
                dropped[e] += 1
                slopes[r] = 0
                continue
            finite_here += 1
            if rule.use_body:
                weight = simd.splat(slopes[r] * per_batch)
                row = dims.w2 + rows[r] * hidden
                for i in range(0, hidden, LANES):
                    moved = simd.fma(weight, simd.load(a, unit + i), simd.load(gradient, row + i))
                    simd.store(gradient, row + i, moved)
            gradient[dims.b2 + rows[r]] += slopes[r] * per_batch
        if dims.memory > 0:
            add_memory_gradient(gradient, dims.u, memory, positions[b], depth, slopes,
                                per_batch)  # fmt: skip

        if probing:
            base = loss
            if not central:
                base = np.float32(_exact_loss(head, num_rows, dims.padded_rows, z, path_signs, wanted, targets[b]))
            good_here = 0
            for block in range(blocks):
                word_base = (block * words + b * dims.sign_words) * LANES
                if dims.activation == SIGN:
                    for i in range(hidden):
                        moved = simd.signed_by_words(probe, signs, word_base + (i // 32) * LANES, i % 32)
                        simd.store(lanes_of_unit, i * LANES, simd.sign(simd.add(simd.broadcast(h, unit + i), moved)))
                else:
                    for i in range(hidden):
                        moved = simd.signed_by_words(probe, signs, word_base + (i // 32) * LANES, i % 32)
                        simd.store(lanes_of_unit, i * LANES, simd.relu(simd.add(simd.broadcast(h, unit + i), moved)))
                for r in range(0, rows.size, 8):
                    eight_rows(theta, rows, r, hidden, dims.w2, starts, lanes_of_unit, z_lanes)
                if head == HEAD_TREE:
                    tree_lane_losses(z_lanes, path_signs, losses)
                elif head == HEAD_SOFTMAX:
                    softmax_lane_losses(z_lanes, dims.padded_rows, targets[b], losses)
                else:
                    regression_lane_losses(z_lanes, dims.num_rows, wanted, losses)
                for lane in range(lanes):
                    j = block * lanes + lane
                    if rule.fitness == PLAIN:
                        shares[j] = 0
                        if j < rule.probes:
                            if central:
                                slope = (losses[lane] - losses[_PAIRS + lane]) / (np.float32(2) * size)
                            else:
                                slope = (losses[lane] - base) / size
                            if np.isfinite(slope):
                                shares[j] = slope
                                good_here += 1
                    elif j < rule.probes:
                        plus[j] = losses[lane]
                        if central:
                            minus[j] = losses[_PAIRS + lane]
            if rule.fitness != PLAIN:
                good_here = _coefficients(plus, minus, base, central, rule.size, rule.fitness, shares)
            share = simd.splat(np.float32(1.0 / (rule.batch * max(good_here, 1))))
            for i in range(0, hidden, LANES):
                total = simd.splat(np.float32(0))
                for j in range(rule.probes):
                    word = signs[((j // lanes) * words + b * dims.sign_words + i // 32) * LANES + j % lanes]
                    bits = np.uint16(word >> np.uint32(i % 32))
                    total = simd.add(total, simd.signed_by_bits(simd.splat(shares[j]), bits))
                # units that no probe can have moved
                here = simd.load(h, unit + i)
                if dims.activation == SIGN:
                    movable = simd.sub(
                        simd.splat(np.float32(1)), simd.positive_mask(simd.sub(simd.absolute(here), probe))
                    )
                else:
                    movable = simd.positive_mask(simd.add(here, probe))
                total = simd.mul(simd.mul(total, share), simd.mul(movable, simd.load(unit_mask, i)))
                simd.store(delta, unit + i, total)
            dropped[e] += rule.probes - good_here
            finite_here += good_here
        elif body:
            for i in range(0, hidden, LANES):
                total = simd.splat(np.float32(0))
                for r in range(active_rows):
                    weights = simd.load(theta, dims.w2 + rows[r] * hidden + i)
                    total = simd.fma(simd.splat(slopes[r] * per_batch), weights, total)
                here = simd.load(h, unit + i)
                if dims.activation == SIGN:
                    above = simd.positive_mask(simd.sub(simd.absolute(here), simd.splat(np.float32(1))))
                    through = simd.sub(simd.load(unit_mask, i), above)
                else:
                    through = simd.positive_mask(here)
                simd.store(delta, unit + i, simd.mul(total, through))
        if finite_here == 0 and body:
            # 0 * NaN is NaN: what gave no finite probe must not meet the products below
            x[b * dims.features : b * dims.features + dims.num_features] = 0
            delta[unit : unit + hidden] = 0
        finite += finite_here

    if body:
        zero = simd.splat(np.float32(0))
        for f in range(0, dims.features, 8):
            for column in range(0, hidden, LANES):
                tile(x, f, 1, dims.features, padded_batch, delta, column, hidden,
                     gradient, f * hidden + column, hidden, zero)  # fmt: skip
        for column in range(0, hidden, LANES):
            total = zero
            for b in range(rule.batch):
                total = simd.add(total, simd.load(delta, b * hidden + column))
            simd.store(gradient, dims.b1 + column, total)
    return (step_loss / counted if counted else 0.0), finite


@jit
def _all_finite(values):
    return np.isfinite(values).all()


@jit
def _draw_batch(data, dims, rule, work, indices, first, count, step, expert, key_0, key_1):
    words, positions, targets, x = work.words, work.positions, work.targets, work.x
    text, embedding, matrix, labels = data.text, data.embedding, data.matrix, data.labels
    draw_words(words, rule.batch, DRAW_BATCH, step, expert, key_0, key_1)
    for b in range(rule.batch):
        chosen = (np.uint64(words[b]) * np.uint64(count)) >> np.uint64(32)
        position = np.int64(indices[first + np.int64(chosen)])
        positions[b] = position
        if rule.use_body:
            gather(position, b, dims.num_features, dims.features, data.is_text, text, embedding, data.width,
                   data.context, matrix, x)  # fmt: skip
        if data.is_text:
            targets[b] = text[position]
        elif dims.head != HEAD_REGRESSION:
            targets[b] = labels[position]


@jit
def _train_group(
    data, dims, rule, indices, offsets, expert_ids, packed, first_moment, second_moment, curve, dropped, status,
    failed_step, mask, probed, anchor, grid, rates, first_step, last_step, total_steps, key_0, key_1,
):  # fmt: skip
    work = _work(dims, rule)
    update_from = 0 if rule.train_body and rule.use_body else dims.w2 if rule.use_body else dims.b2
    for e in range(expert_ids.size):
        if status[e] != STATUS_OK:
            continue
        count = offsets[e + 1] - offsets[e]
        if count == 0:
            continue
        expert = np.uint32(expert_ids[e])
        theta = packed[e]
        if dims.head == HEAD_SOFTMAX:
            theta[dims.b2 + dims.num_rows : dims.b2 + dims.padded_rows] = NO_BIAS
        for step in range(first_step, last_step):
            word = np.uint32(step)
            _draw_batch(data, dims, rule, work, indices, offsets[e], count, word, expert, key_0, key_1)
            work.gradient[:] = 0
            finite = 0
            loss = 0.0
            by_weights = rule.site == WEIGHTS
            if by_weights and rule.probes > 0:
                loss, finite = _estimate_weights(theta, dims, data, rule, work, probed, word, expert, key_0, key_1)
                dropped[e] += rule.probes - finite
            if not by_weights or rule.head_rule != HEAD_SAME:
                head_loss, more = _estimate_examples(
                    theta, dims, data, rule, work, by_weights and rule.probes > 0, dropped, e, word, expert,
                    key_0, key_1)  # fmt: skip
                finite += more
                if not by_weights or rule.probes == 0:
                    loss = head_loss
            if finite == 0:
                status[e] = STATUS_NO_FINITE_PAIR
                failed_step[e] = step
                break
            curve[e, step * CURVE_POINTS // total_steps] += loss
            if dims.activation == SIGN:
                # the sign of a padding unit is not zero
                for i in range(0, dims.size, LANES):
                    simd.store(work.gradient, i, simd.mul(simd.load(work.gradient, i), simd.load(mask, i)))
            if rule.clip_norm > 0:
                clip(work.gradient, update_from, dims.size - update_from, rule.clip_norm)
            if rule.weight_decay > 0:
                pull = rates[step] * rule.weight_decay
                if rule.use_body:
                    decay(theta, anchor, dims.w2, dims.b2 - dims.w2, pull)
                    if rule.train_body:
                        decay(theta, anchor, 0, dims.b1, pull)
                decay(theta, anchor, dims.u, dims.size - dims.u, pull)
            update(theta, work.gradient, first_moment[e], second_moment[e], update_from, dims.size - update_from,
                   rule.optimizer, rates[step], rule.beta1, rule.beta2, rule.epsilon, step)  # fmt: skip
            if rule.levels > 0:
                round_to_grid(theta, grid, mask, rule.levels, word, expert, key_0, key_1)
        if dims.head == HEAD_SOFTMAX:
            theta[dims.b2 + dims.num_rows : dims.b2 + dims.padded_rows] = 0
        if status[e] == STATUS_OK and not _all_finite(theta):
            status[e] = STATUS_NONFINITE_WEIGHT
            failed_step[e] = last_step - 1


def can_run(recipe: Recipe) -> bool:
    """Whether this loop knows the recipe: black-box losses are left to the reference."""
    return recipe.loss == LOSS_LIKELIHOOD


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
    """Run steps [first_step, last_step) of every expert of a group; `state` is changed in place.

    Args:
        shape: sizes of an expert.
        recipe: how it is trained.
        inputs: the corpus.
        indices: uint32 [n], inputs of the experts, one expert after another.
        offsets: int64 [G + 1] into `indices`.
        expert_ids: int64 [G], global ids: with the seed they name every draw.
        state: weights, moments, counts.
        first_step: first step to run.
        last_step: one past the last step to run.
    """
    assert can_run(recipe)
    key_0, key_1 = split_seed(recipe.seed)
    mask = shape.parameter_mask()
    head_alone = recipe.site == WEIGHTS and recipe.head_rule != HEAD_SAME
    if not recipe.train_body or not recipe.use_body:
        mask[: shape.offset_w2] = 0
    if not recipe.use_body:
        mask[: shape.offset_b2] = 0
    # what the probes of a weight-space estimator move; the rest of the mask is what rounding moves
    probed = mask.copy()
    if head_alone:
        probed[shape.offset_w2 :] = 0
    probes = recipe.num_perturbations
    if recipe.site == CALCULUS or not probed.any():
        probes = 0
    rule = _Rule(
        recipe.site,
        recipe.directions,
        probes,
        float(recipe.perturbation_size),
        float(recipe.head_perturbation_size),
        recipe.difference,
        recipe.fitness,
        recipe.head_rule,
        float(recipe.density),
        recipe.rescale,
        recipe.rank,
        recipe.optimizer,
        recipe.beta1,
        recipe.beta2,
        recipe.epsilon,
        recipe.clip_norm,
        recipe.weight_decay,
        recipe.train_body,
        recipe.use_body,
        recipe.batch,
        recipe.levels if recipe.grid is not None else 0,
    )
    _train_group(
        data_of(inputs),
        dims_of(shape),
        rule,
        read_only(indices),
        read_only(offsets),
        read_only(expert_ids),
        state.packed,
        state.first_moment,
        state.second_moment,
        state.curve,
        state.dropped,
        state.status,
        state.failed_step,
        read_only(mask),
        read_only(probed),
        read_only(np.zeros(shape.packed_size, np.float32) if recipe.anchor is None else recipe.anchor),
        read_only(np.zeros(shape.packed_size, np.float32) if recipe.grid is None else recipe.grid),
        read_only(recipe.learning_rates),
        first_step,
        last_step,
        len(recipe.learning_rates),
        np.uint32(key_0),
        np.uint32(key_1),
    )
