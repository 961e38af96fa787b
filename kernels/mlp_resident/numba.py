"""The resident MLP loop for CPUs: one expert in one thread, all of it in cache, from first step to last.

Sixteen lanes hold eight antithetic pairs: lane j is the loss under +v_j, lane 8 + j under -v_j, so a forward pass
per example updates eight head rows with sixteen products each and never leaves registers. P is rounded up to a
multiple of eight lanes; the spare lanes are ignored. No perturbation is ever written into the weights.
"""

from __future__ import annotations

import numpy as np

from .. import simd
from ..compile import jit
from ..philox.numba import philox4x32
from ..philox.reference import PURPOSE_BATCH, PURPOSE_PERTURBATION, pack_draw, split_seed
from .contract import (
    ACTIVATION,
    BACKPROP,
    CURVE_POINTS,
    HADAMARD,
    HEAD_TREE,
    LAYER_ALL,
    LAYER_BODY,
    MAX_TREE_DEPTH,
    MOMENTUM,
    SGD,
    SPSA,
    STATUS_NO_FINITE_PAIR,
    STATUS_NONFINITE_WEIGHT,
    STATUS_OK,
    GroupState,
    Inputs,
    MlpShape,
    Recipe,
)

_LANES = simd.LANES
_PAIRS = _LANES // 2
_DRAW_BATCH = np.uint32(pack_draw(PURPOSE_BATCH))
_DRAW_BODY = np.uint32(pack_draw(PURPOSE_PERTURBATION, LAYER_BODY))
_DRAW_ALL = np.uint32(pack_draw(PURPOSE_PERTURBATION, LAYER_ALL))
_NO_BIAS = np.float32(-1e30)


@jit
def _draw_words(out, count, draw, step, expert, key_0, key_1):
    for block in range((count + 3) // 4):
        a, b, c, d = philox4x32(np.uint32(block), draw, step, expert, key_0, key_1)
        out[4 * block] = a
        out[4 * block + 1] = b
        out[4 * block + 2] = c
        out[4 * block + 3] = d


@jit
def _tile(a, a_offset, row_stride, k_stride, depth, b, b_offset, b_stride, c, c_offset, c_stride, start):
    """C[8, 16] = start + A[8, depth] B[depth, 16] with all of C in registers; `start` is one vector."""
    c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = start
    for k in range(depth):
        row = simd.load(b, b_offset + k * b_stride)
        p = a_offset + k * k_stride
        c0 = simd.fma(simd.broadcast(a, p), row, c0)
        c1 = simd.fma(simd.broadcast(a, p + row_stride), row, c1)
        c2 = simd.fma(simd.broadcast(a, p + 2 * row_stride), row, c2)
        c3 = simd.fma(simd.broadcast(a, p + 3 * row_stride), row, c3)
        c4 = simd.fma(simd.broadcast(a, p + 4 * row_stride), row, c4)
        c5 = simd.fma(simd.broadcast(a, p + 5 * row_stride), row, c5)
        c6 = simd.fma(simd.broadcast(a, p + 6 * row_stride), row, c6)
        c7 = simd.fma(simd.broadcast(a, p + 7 * row_stride), row, c7)
    simd.store(c, c_offset, c0)
    simd.store(c, c_offset + c_stride, c1)
    simd.store(c, c_offset + 2 * c_stride, c2)
    simd.store(c, c_offset + 3 * c_stride, c3)
    simd.store(c, c_offset + 4 * c_stride, c4)
    simd.store(c, c_offset + 5 * c_stride, c5)
    simd.store(c, c_offset + 6 * c_stride, c6)
    simd.store(c, c_offset + 7 * c_stride, c7)


@jit
def _eight_rows(theta, rows, first, hidden, w2, b2, lanes, out):
    """out[8, 16]: logits of rows[first : first + 8] for the sixteen activation vectors in `lanes` [hidden, 16]."""
    r0 = w2 + rows[first] * hidden
    r1 = w2 + rows[first + 1] * hidden
    r2 = w2 + rows[first + 2] * hidden
    r3 = w2 + rows[first + 3] * hidden
    r4 = w2 + rows[first + 4] * hidden
    r5 = w2 + rows[first + 5] * hidden
    r6 = w2 + rows[first + 6] * hidden
    r7 = w2 + rows[first + 7] * hidden
    c0 = simd.broadcast(theta, b2 + rows[first])
    c1 = simd.broadcast(theta, b2 + rows[first + 1])
    c2 = simd.broadcast(theta, b2 + rows[first + 2])
    c3 = simd.broadcast(theta, b2 + rows[first + 3])
    c4 = simd.broadcast(theta, b2 + rows[first + 4])
    c5 = simd.broadcast(theta, b2 + rows[first + 5])
    c6 = simd.broadcast(theta, b2 + rows[first + 6])
    c7 = simd.broadcast(theta, b2 + rows[first + 7])
    for i in range(hidden):
        active = simd.load(lanes, i * _LANES)
        c0 = simd.fma(simd.broadcast(theta, r0 + i), active, c0)
        c1 = simd.fma(simd.broadcast(theta, r1 + i), active, c1)
        c2 = simd.fma(simd.broadcast(theta, r2 + i), active, c2)
        c3 = simd.fma(simd.broadcast(theta, r3 + i), active, c3)
        c4 = simd.fma(simd.broadcast(theta, r4 + i), active, c4)
        c5 = simd.fma(simd.broadcast(theta, r5 + i), active, c5)
        c6 = simd.fma(simd.broadcast(theta, r6 + i), active, c6)
        c7 = simd.fma(simd.broadcast(theta, r7 + i), active, c7)
    base = first * _LANES
    simd.store(out, base, c0)
    simd.store(out, base + 16, c1)
    simd.store(out, base + 32, c2)
    simd.store(out, base + 48, c3)
    simd.store(out, base + 64, c4)
    simd.store(out, base + 80, c5)
    simd.store(out, base + 96, c6)
    simd.store(out, base + 112, c7)


@jit
def _tree_lane_losses(z, path_signs, out):
    """out[16]: sum over the path of softplus(-s z), z [8, 16], s 0 off the path.

    The logarithms of the eight factors 1 + exp(-|m|), each in [1, 2], are taken as one of their product; a factor
    off the path is replaced by 1.
    """
    linear = simd.splat(np.float32(0))
    product = simd.splat(np.float32(1))
    for k in range(MAX_TREE_DEPTH):
        sign = simd.broadcast(path_signs, k)
        logit = simd.mul(sign, simd.load(z, k * _LANES))
        linear = simd.sub(linear, simd.sub(logit, simd.relu(logit)))
        tail = simd.exp_of_negative(simd.sub(simd.splat(np.float32(0)), simd.absolute(logit)))
        product = simd.fma(product, simd.mul(tail, simd.absolute(sign)), product)
    simd.store(out, 0, simd.add(linear, simd.log(product)))


@jit
def _softmax_lane_losses(z, padded_rows, target, out):
    """out[16]: logsumexp over rows minus the target's row, z [padded_rows, 16]; `sum - sum` carries NaN past log."""
    highest = simd.load(z, 0)
    for r in range(1, padded_rows):
        highest = simd.maximum(highest, simd.load(z, r * _LANES))
    total = simd.splat(np.float32(0))
    for r in range(padded_rows):
        total = simd.add(total, simd.exp_of_negative(simd.sub(simd.load(z, r * _LANES), highest)))
    loss = simd.add(simd.log(total), simd.sub(highest, simd.load(z, target * _LANES)))
    simd.store(out, 0, simd.add(loss, simd.sub(total, total)))


@jit
def _softplus(x):
    """softplus of each lane."""
    tail = simd.exp_of_negative(simd.sub(simd.splat(np.float32(0)), simd.absolute(x)))
    return simd.add(simd.relu(x), simd.log(simd.add(simd.splat(np.float32(1)), tail)))


@jit
def _eight_dots(theta, rows, first, hidden, w2, active, active_offset):
    """Lanes l and 8 + l: W2[rows[first + l]] a."""
    c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = simd.splat(np.float32(0))
    for i in range(0, hidden, _LANES):
        unit = simd.load(active, active_offset + i)
        c0 = simd.fma(simd.load(theta, w2 + rows[first] * hidden + i), unit, c0)
        c1 = simd.fma(simd.load(theta, w2 + rows[first + 1] * hidden + i), unit, c1)
        c2 = simd.fma(simd.load(theta, w2 + rows[first + 2] * hidden + i), unit, c2)
        c3 = simd.fma(simd.load(theta, w2 + rows[first + 3] * hidden + i), unit, c3)
        c4 = simd.fma(simd.load(theta, w2 + rows[first + 4] * hidden + i), unit, c4)
        c5 = simd.fma(simd.load(theta, w2 + rows[first + 5] * hidden + i), unit, c5)
        c6 = simd.fma(simd.load(theta, w2 + rows[first + 6] * hidden + i), unit, c6)
        c7 = simd.fma(simd.load(theta, w2 + rows[first + 7] * hidden + i), unit, c7)
    return simd.sum_eight(c0, c1, c2, c3, c4, c5, c6, c7)


@jit
def _logits(theta, rows, num_rows, hidden, w2, b2, active, active_offset, biases, z):
    """z[num_rows] = W2[rows] a + b2[rows], num_rows a multiple of 8; z[-8:] repeats the last eight."""
    for r in range(0, num_rows, 8):
        for k in range(8):
            biases[k] = theta[b2 + rows[r + k]]
            biases[8 + k] = biases[k]
        dots = _eight_dots(theta, rows, r, hidden, w2, active, active_offset)
        simd.store(z, r, simd.add(dots, simd.load(biases, 0)))


@jit
def _tree_head_pairs(z, path_signs, halves, size, gradient):
    """gradient[k] of the loss at each scalar logit of the path by one +/- pair; returns the mean loss of the pairs.

    z and path_signs (0 off the path) repeat their eight values; `halves` is +1 in lanes 0..7 and -1 in the others.
    """
    signs = simd.load(path_signs, 0)
    side = simd.load(halves, 0)
    moved = simd.fma(side, simd.splat(size), simd.load(z, 0))
    losses = simd.mul(_softplus(simd.sub(simd.splat(np.float32(0)), simd.mul(signs, moved))), simd.absolute(signs))
    difference = simd.sub(losses, simd.swap_halves(losses))
    simd.store(gradient, 0, simd.mul(difference, simd.splat(np.float32(0.5) / size)))
    return np.float32(0.5) * simd.sum_lanes(losses)


@jit
def _softmax_head_pairs(z, num_rows, padded_rows, target, size, scratch, gradient):
    """As `_tree_head_pairs` for a softmax: moving one logit changes one term of the sum, so a pair costs O(1)."""
    highest = z[0]
    for r in range(1, num_rows):
        if not z[r] <= highest:
            highest = z[r]
    top = simd.splat(highest + size)
    total = np.float32(0)
    for r in range(0, padded_rows, _LANES):
        shifted = simd.exp_of_negative(simd.sub(simd.load(z, r), top))
        simd.store(scratch, r, shifted)
        total += simd.sum_lanes(shifted)
    step = simd.splat(size)
    for r in range(0, padded_rows, _LANES):
        others = simd.sub(simd.splat(total), simd.load(scratch, r))
        raised = simd.exp_of_negative(simd.sub(simd.add(simd.load(z, r), step), top))
        lowered = simd.exp_of_negative(simd.sub(simd.sub(simd.load(z, r), step), top))
        difference = simd.sub(simd.log(simd.add(others, raised)), simd.log(simd.add(others, lowered)))
        half = simd.splat(np.float32(0.5) / size)
        # exp and log hide a NaN or infinity in `total`: total - total puts it back
        simd.store(gradient, r, simd.fma(difference, half, simd.splat(total - total)))
    gradient[target] -= np.float32(1)
    return np.float32(np.log(total)) + (highest + size) - z[target]


@jit
def _exact_head(z, num_rows, padded_rows, is_tree, path_signs, target, gradient):
    """gradient of the loss at the logits in closed form (backprop); returns the loss."""
    if is_tree:
        signs = simd.load(path_signs, 0)
        missed = simd.sub(simd.splat(np.float32(0)), simd.mul(signs, simd.load(z, 0)))
        one = simd.splat(np.float32(1))
        tail = simd.exp_of_negative(simd.sub(simd.splat(np.float32(0)), simd.absolute(missed)))
        above = simd.positive_mask(missed)
        sigmoid = simd.div(simd.fma(simd.sub(one, above), tail, above), simd.add(one, tail))
        simd.store(gradient, 0, simd.sub(simd.splat(np.float32(0)), simd.mul(signs, sigmoid)))
        return np.float32(0.5) * simd.sum_lanes(simd.mul(_softplus(missed), simd.absolute(signs)))
    highest = z[0]
    for r in range(1, num_rows):
        if not z[r] <= highest:
            highest = z[r]
    total = np.float32(0)
    for r in range(0, padded_rows, _LANES):
        shifted = simd.exp_of_negative(simd.sub(simd.load(z, r), simd.splat(highest)))
        simd.store(gradient, r, shifted)
        total += simd.sum_lanes(shifted)
    for r in range(num_rows):
        gradient[r] /= total
    gradient[target] -= np.float32(1)
    return np.float32(np.log(total)) + highest - z[target]


@jit
def _fill_signs(signs, spare, basis, batch, sign_words, num_blocks, pairs, directions, step, expert, key_0, key_1):
    """signs[block, example, word, lane]: lane j the 32 signs of pair 8 block + j, lane 8 + j their complement."""
    words = batch * sign_words
    block_stride = words * _LANES
    if directions == HADAMARD:
        _draw_words(spare, words, _DRAW_BODY, step, expert, key_0, key_1)
    for j in range(pairs):
        if directions != HADAMARD:
            _draw_words(spare, words, np.uint32(_DRAW_BODY + np.uint32(j)), step, expert, key_0, key_1)
        base = (j // _PAIRS) * block_stride + j % _PAIRS
        for m in range(words):
            word = spare[m]
            if directions == HADAMARD:
                word = word ^ basis[j * sign_words + m % sign_words]
            signs[base + m * _LANES] = word
            signs[base + m * _LANES + _PAIRS] = ~word


@jit
def _hadamard_word(row, word):
    """Bits of 32 entries of a row of the Sylvester Hadamard matrix: bit i set where popcount(row & column) is odd."""
    bits = np.uint32(0)
    for i in range(32):
        common = row & (32 * word + i)
        parity = 0
        while common:
            parity ^= common & 1
            common >>= 1
        bits |= np.uint32(parity) << np.uint32(i)
    return bits


@jit
def _gather(x, position, b, num_features, features, is_text, text, embedding, width, context, matrix):
    """Row b of x. Loads and stores run up to 15 floats over; what they spill is overwritten here or by the next row."""
    base = b * features
    if is_text:
        for lag in range(context):
            byte = np.int64(text[np.uint64(position - 1 - lag)])
            for d in range(0, width, _LANES):
                simd.store(x, base + lag * width + d, simd.load(embedding, byte * width + d))
    else:
        for f in range(num_features):
            x[base + f] = matrix[position, f]
    x[base + num_features : base + features] = 0


@jit
def _body_forward(theta, x, h, padded_batch, features, hidden, b1):
    for row in range(0, padded_batch, 8):
        for column in range(0, hidden, _LANES):
            start = simd.load(theta, b1 + column)
            _tile(x, row * features, features, 1, features, theta, column, hidden,
                  h, row * hidden + column, hidden, start)  # fmt: skip


@jit
def _relu_rows(h, a, size):
    for i in range(0, size, _LANES):
        simd.store(a, i, simd.relu(simd.load(h, i)))


@jit
def _target_rows(target, depth, is_tree, rows, path_signs):
    if is_tree:
        for k in range(depth):
            rows[k] = ((1 << k) | (target >> (depth - k))) - 1
            sign = np.float32(2 * ((target >> (depth - 1 - k)) & 1) - 1)
            path_signs[k] = sign
            path_signs[8 + k] = sign


@jit
def _batch_loss(theta, x, h, targets, batch, padded_batch, features, hidden, offsets, num_rows, padded_rows, is_tree,
                depth, rows, path_signs, biases, z):  # fmt: skip
    """Mean loss of a batch under the weights `theta`, float64."""
    b1, w2, b2 = offsets
    _body_forward(theta, x, h, padded_batch, features, hidden, b1)
    _relu_rows(h, h, padded_batch * hidden)
    total = 0.0
    for b in range(batch):
        _target_rows(targets[b], depth, is_tree, rows, path_signs)
        _logits(theta, rows, rows.size, hidden, w2, b2, h, b * hidden, biases, z)
        if is_tree:
            signs = simd.load(path_signs, 0)
            missed = simd.sub(simd.splat(np.float32(0)), simd.mul(signs, simd.load(z, 0)))
            total += np.float32(0.5) * simd.sum_lanes(simd.mul(_softplus(missed), simd.absolute(signs)))
        else:
            highest = z[0]
            for r in range(1, num_rows):
                if not z[r] <= highest:
                    highest = z[r]
            terms = np.float32(0)
            for r in range(0, padded_rows, _LANES):
                terms += simd.sum_lanes(simd.exp_of_negative(simd.sub(simd.load(z, r), simd.splat(highest))))
            total += np.log(terms) + highest - z[targets[b]]
    return total / batch


@jit
def _update(theta, gradient, first, second, start, size, optimizer, rate, beta1, beta2, epsilon, step):
    """One optimiser step on theta[start : start + size]; Adam with bias correction (Kingma and Ba 2015)."""
    minus_rate = simd.splat(np.float32(-rate))
    if optimizer == SGD:
        for i in range(start, start + size, _LANES):
            simd.store(theta, i, simd.fma(minus_rate, simd.load(gradient, i), simd.load(theta, i)))
        return
    decay1 = simd.splat(np.float32(beta1))
    if optimizer == MOMENTUM:
        for i in range(start, start + size, _LANES):
            moment = simd.fma(decay1, simd.load(first, i), simd.load(gradient, i))
            simd.store(first, i, moment)
            simd.store(theta, i, simd.fma(minus_rate, moment, simd.load(theta, i)))
        return
    decay2 = simd.splat(np.float32(beta2))
    rest1 = simd.splat(np.float32(1.0 - beta1))
    rest2 = simd.splat(np.float32(1.0 - beta2))
    scale = simd.splat(np.float32(-rate / (1.0 - beta1 ** (step + 1))))
    unbias = simd.splat(np.float32(1.0 / np.sqrt(1.0 - beta2 ** (step + 1))))
    floor = simd.splat(np.float32(epsilon))
    for i in range(start, start + size, _LANES):
        g = simd.load(gradient, i)
        moment = simd.fma(decay1, simd.load(first, i), simd.mul(rest1, g))
        square = simd.fma(decay2, simd.load(second, i), simd.mul(rest2, simd.mul(g, g)))
        simd.store(first, i, moment)
        simd.store(second, i, square)
        step_size = simd.div(moment, simd.fma(simd.sqrt(square), unbias, floor))
        simd.store(theta, i, simd.fma(scale, step_size, simd.load(theta, i)))


@jit
def _clip(gradient, start, size, clip_norm):
    """Scale the gradient down to `clip_norm` where its norm is larger; a norm that overflows counts as infinite."""
    total = simd.splat(np.float32(0))
    for i in range(start, start + size, _LANES):
        total = simd.fma(simd.load(gradient, i), simd.load(gradient, i), total)
    norm = np.sqrt(simd.sum_lanes(total))
    if norm > clip_norm:
        scale = simd.splat(np.float32(clip_norm) / norm)
        for i in range(start, start + size, _LANES):
            simd.store(gradient, i, simd.mul(scale, simd.load(gradient, i)))


@jit
def _decay(theta, start, size, factor):
    keep = simd.splat(np.float32(factor))
    for i in range(start, start + size, _LANES):
        simd.store(theta, i, simd.mul(keep, simd.load(theta, i)))


@jit
def _all_finite(values):
    return np.isfinite(values).all()


@jit
def _train_group(
    text, embedding, width, context, matrix, labels, is_text, indices, offsets, expert_ids,
    packed, first_moment, second_moment, curve, dropped, status, failed_step, mask,
    num_features, features, true_hidden, hidden, num_rows, padded_rows, depth, sign_words, is_tree, parameter_offsets,
    estimator, directions, pairs, size, head_size, optimizer, beta1, beta2, epsilon, clip_norm, weight_decay,
    train_body, batch, rates, first_step, last_step, total_steps, key_0, key_1,
):  # fmt: skip
    b1, w2, b2 = parameter_offsets
    num_packed = packed.shape[1]
    padded_batch = (batch + 7) // 8 * 8
    head_rows = MAX_TREE_DEPTH if is_tree else padded_rows
    active_rows = depth if is_tree else num_rows
    num_blocks = (pairs + _PAIRS - 1) // _PAIRS
    words = batch * sign_words

    x = np.zeros(padded_batch * features + _LANES, np.float32)
    h = np.zeros(padded_batch * hidden, np.float32)
    a = np.zeros(padded_batch * hidden, np.float32)
    delta = np.zeros(padded_batch * hidden, np.float32)
    gradient = np.zeros(num_packed, np.float32)
    trial = np.zeros(num_packed if estimator == SPSA else 0, np.float32)
    direction = np.zeros(max((num_packed + 127) // 128 * 4, words + 4, batch + 4), np.uint32)
    signs = np.zeros(num_blocks * words * _LANES, np.uint32)
    lanes = np.zeros(hidden * _LANES, np.float32)
    z_lanes = np.zeros(head_rows * _LANES, np.float32)
    z = np.full(head_rows + _LANES, _NO_BIAS, np.float32)
    head_gradient = np.zeros(head_rows + _LANES, np.float32)
    scratch = np.zeros(head_rows + _LANES, np.float32)
    losses = np.zeros(_LANES, np.float32)
    coefficients = np.zeros(num_blocks * _PAIRS, np.float32)
    rows = np.zeros(head_rows, np.int64)
    path_signs = np.zeros(_LANES, np.float32)
    biases = np.zeros(_LANES, np.float32)
    halves = np.ones(_LANES, np.float32)
    halves[_PAIRS:] = -1
    targets = np.zeros(batch, np.int64)
    unit_mask = np.zeros(hidden, np.float32)
    unit_mask[:true_hidden] = 1
    basis = np.zeros(pairs * sign_words, np.uint32)
    if directions == HADAMARD:
        for j in range(pairs):
            for word_index in range(sign_words):
                basis[j * sign_words + word_index] = _hadamard_word(j, word_index)
    if is_tree:
        rows[:] = padded_rows - 1
    else:
        for r in range(head_rows):
            rows[r] = r

    per_batch = np.float32(1.0 / batch)
    probe = simd.splat(np.float32(size))
    update_from = 0 if train_body else w2

    for e in range(expert_ids.size):
        if status[e] != STATUS_OK:
            continue
        count = offsets[e + 1] - offsets[e]
        if count == 0:
            continue
        expert = np.uint32(expert_ids[e])
        theta = packed[e]
        if not is_tree:
            theta[b2 + num_rows :] = _NO_BIAS
        first = first_moment[e]
        second = second_moment[e]

        for step in range(first_step, last_step):
            step_word = np.uint32(step)
            _draw_words(direction, batch, _DRAW_BATCH, step_word, expert, key_0, key_1)
            for b in range(batch):
                chosen = (np.uint64(direction[b]) * np.uint64(count)) >> np.uint64(32)
                position = np.int64(indices[offsets[e] + np.int64(chosen)])
                _gather(x, position, b, num_features, features, is_text, text, embedding, width, context, matrix)
                targets[b] = text[position] if is_text else labels[position]

            finite_pairs = 0
            step_loss = 0.0
            gradient[:] = 0

            if estimator == SPSA:
                for j in range(pairs):
                    _draw_words(direction, (num_packed + 31) // 32, np.uint32(_DRAW_ALL + np.uint32(j)),
                                step_word, expert, key_0, key_1)  # fmt: skip
                    plus = 0.0
                    minus = 0.0
                    for side in range(2):
                        reach = np.float32(size if side == 0 else -size)
                        for i in range(0, num_packed, _LANES):
                            bits = np.uint16(direction[i // 32] >> np.uint32(i % 32))
                            moved = simd.signed_by_bits(simd.splat(reach), bits)
                            keep = simd.load(mask, i)
                            simd.store(trial, i, simd.fma(moved, keep, simd.load(theta, i)))
                        loss = _batch_loss(trial, x, h, targets, batch, padded_batch, features, hidden,
                                           parameter_offsets, num_rows, padded_rows, is_tree, depth, rows,
                                           path_signs, biases, z)  # fmt: skip
                        if side == 0:
                            plus = loss
                        else:
                            minus = loss
                    slope = np.float32((plus - minus) / (2.0 * size))
                    if not np.isfinite(slope):
                        dropped[e] += 1
                        continue
                    finite_pairs += 1
                    step_loss += 0.5 * (plus + minus)
                    for i in range(0, num_packed, _LANES):
                        bits = np.uint16(direction[i // 32] >> np.uint32(i % 32))
                        along = simd.signed_by_bits(simd.splat(slope), bits)
                        simd.store(gradient, i, simd.fma(along, simd.load(mask, i), simd.load(gradient, i)))
                if finite_pairs:
                    step_loss /= finite_pairs
                    share = simd.splat(np.float32(1.0 / finite_pairs))
                    for i in range(0, num_packed, _LANES):
                        simd.store(gradient, i, simd.mul(share, simd.load(gradient, i)))
            else:
                probing = estimator == ACTIVATION and train_body
                if probing:
                    _fill_signs(signs, direction, basis, batch, sign_words, num_blocks, pairs, directions,
                                step_word, expert, key_0, key_1)  # fmt: skip
                _body_forward(theta, x, h, padded_batch, features, hidden, b1)
                _relu_rows(h, a, padded_batch * hidden)
                counted = 0
                for b in range(batch):
                    unit = b * hidden
                    _target_rows(targets[b], depth, is_tree, rows, path_signs)
                    _logits(theta, rows, head_rows, hidden, w2, b2, a, unit, biases, z)
                    if estimator == BACKPROP:
                        loss = _exact_head(z, num_rows, padded_rows, is_tree, path_signs, targets[b], head_gradient)
                    elif is_tree:
                        loss = _tree_head_pairs(z, path_signs, halves, np.float32(head_size), head_gradient)
                    else:
                        loss = _softmax_head_pairs(z, num_rows, padded_rows, targets[b], np.float32(head_size),
                                                   scratch, head_gradient)  # fmt: skip
                    if np.isfinite(loss):
                        step_loss += loss
                        counted += 1

                    finite_here = 0
                    for r in range(active_rows):
                        if not np.isfinite(head_gradient[r]):
                            dropped[e] += 1
                            head_gradient[r] = 0
                            continue
                        finite_here += 1
                        weight = simd.splat(head_gradient[r] * per_batch)
                        row = w2 + rows[r] * hidden
                        for i in range(0, hidden, _LANES):
                            moved = simd.fma(weight, simd.load(a, unit + i), simd.load(gradient, row + i))
                            simd.store(gradient, row + i, moved)
                        gradient[b2 + rows[r]] += head_gradient[r] * per_batch

                    if estimator == BACKPROP:
                        for i in range(0, hidden, _LANES):
                            total = simd.splat(np.float32(0))
                            for r in range(active_rows):
                                weights = simd.load(theta, w2 + rows[r] * hidden + i)
                                total = simd.fma(simd.splat(head_gradient[r] * per_batch), weights, total)
                            total = simd.mul(total, simd.positive_mask(simd.load(h, unit + i)))
                            simd.store(delta, unit + i, total)
                    elif probing:
                        good_pairs = 0
                        for block in range(num_blocks):
                            word_base = (block * words + b * sign_words) * _LANES
                            for i in range(hidden):
                                word = word_base + (i // 32) * _LANES
                                moved = simd.signed_by_words(probe, signs, word, i % 32)
                                active = simd.relu(simd.add(simd.broadcast(h, unit + i), moved))
                                simd.store(lanes, i * _LANES, active)
                            for r in range(0, head_rows, 8):
                                _eight_rows(theta, rows, r, hidden, w2, b2, lanes, z_lanes)
                            if is_tree:
                                _tree_lane_losses(z_lanes, path_signs, losses)
                            else:
                                _softmax_lane_losses(z_lanes, padded_rows, targets[b], losses)
                            for lane in range(_PAIRS):
                                j = block * _PAIRS + lane
                                slope = (losses[lane] - losses[_PAIRS + lane]) / np.float32(2.0 * size)
                                coefficients[j] = 0
                                if j < pairs:
                                    if np.isfinite(slope):
                                        coefficients[j] = slope
                                        good_pairs += 1
                                    else:
                                        dropped[e] += 1
                        finite_here += good_pairs
                        share = simd.splat(per_batch / np.float32(max(good_pairs, 1)))
                        for i in range(0, hidden, _LANES):
                            total = simd.splat(np.float32(0))
                            for j in range(pairs):
                                word = signs[((j // _PAIRS) * words + b * sign_words + i // 32) * _LANES + j % _PAIRS]
                                bits = np.uint16(word >> np.uint32(i % 32))
                                total = simd.add(total, simd.signed_by_bits(simd.splat(coefficients[j]), bits))
                            total = simd.mul(simd.mul(total, share), simd.load(unit_mask, i))
                            simd.store(delta, unit + i, total)
                    if finite_here == 0:
                        # 0 * NaN is NaN: what gave no finite pair must not meet the products below
                        x[b * features : b * features + num_features] = 0
                        delta[unit : unit + hidden] = 0
                    finite_pairs += finite_here
                if counted:
                    step_loss /= counted

                if train_body:
                    zero = simd.splat(np.float32(0))
                    for f in range(0, features, 8):
                        for column in range(0, hidden, _LANES):
                            _tile(x, f, 1, features, padded_batch, delta, column, hidden,
                                  gradient, f * hidden + column, hidden, zero)  # fmt: skip
                    for column in range(0, hidden, _LANES):
                        total = zero
                        for b in range(batch):
                            total = simd.add(total, simd.load(delta, b * hidden + column))
                        simd.store(gradient, b1 + column, total)

            if finite_pairs == 0:
                status[e] = STATUS_NO_FINITE_PAIR
                failed_step[e] = step
                break
            curve[e, step * CURVE_POINTS // total_steps] += step_loss
            if clip_norm > 0:
                _clip(gradient, update_from, num_packed - update_from, clip_norm)
            if weight_decay > 0:
                kept = 1.0 - rates[step] * weight_decay
                _decay(theta, w2, b2 - w2, kept)
                if train_body:
                    _decay(theta, 0, b1, kept)
            _update(theta, gradient, first, second, update_from, num_packed - update_from, optimizer, rates[step],
                    beta1, beta2, epsilon, step)  # fmt: skip

        if not is_tree:
            theta[b2 + num_rows :] = 0
        if status[e] == STATUS_OK and not _all_finite(theta):
            status[e] = STATUS_NONFINITE_WEIGHT
            failed_step[e] = last_step - 1


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
    """Train the experts of a group from `first_step` to `last_step` in the calling thread; `state` changes in place.

    Args:
        shape: sizes of an expert.
        recipe: how it is trained.
        inputs: where examples come from.
        indices: uint32 [n], the experts' inputs one expert after another.
        offsets: int64 [G + 1] into `indices`.
        expert_ids: int64 [G], global ids: with the seed they name every draw.
        state: weights, moments, counts.
        first_step: first step to run.
        last_step: one past the last step to run.
    """
    key_0, key_1 = split_seed(recipe.seed)
    no_floats = np.zeros((1, 1), np.float32)
    is_text = inputs.text is not None
    mask = shape.parameter_mask()
    if not recipe.train_body:
        mask[: shape.offset_w2] = 0
    _train_group(
        inputs.text if is_text else np.zeros(1, np.uint8),
        np.concatenate([inputs.embedding.ravel(), np.zeros(_LANES, np.float32)]) if is_text else no_floats.ravel(),
        inputs.embedding.shape[1] if is_text else 0,
        inputs.context,
        no_floats if is_text else inputs.x,
        np.zeros(1, np.int32) if is_text else inputs.y,
        is_text,
        indices,
        offsets,
        expert_ids,
        state.packed,
        state.first_moment,
        state.second_moment,
        state.curve,
        state.dropped,
        state.status,
        state.failed_step,
        mask,
        shape.num_features,
        shape.padded_features,
        shape.hidden,
        shape.padded_hidden,
        shape.num_rows,
        shape.padded_rows,
        shape.tree_depth,
        shape.sign_words,
        shape.head == HEAD_TREE,
        (shape.offset_b1, shape.offset_w2, shape.offset_b2),
        recipe.estimator,
        recipe.directions,
        recipe.num_perturbations,
        recipe.perturbation_size,
        recipe.head_perturbation_size,
        recipe.optimizer,
        recipe.beta1,
        recipe.beta2,
        recipe.epsilon,
        recipe.clip_norm,
        recipe.weight_decay,
        recipe.train_body,
        recipe.batch,
        recipe.learning_rates,
        first_step,
        last_step,
        len(recipe.learning_rates),
        np.uint32(key_0),
        np.uint32(key_1),
    )
