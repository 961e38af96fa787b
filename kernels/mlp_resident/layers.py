"""Pieces of an expert's forward pass and of its head's gradient, for Numba loops.

Legend as in `contract`. Sixteen lanes hold sixteen activation vectors side by side, or sixteen entries of one.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from .. import simd
from ..compile import jit
from .contract import HEAD_REGRESSION, HEAD_TREE, MAX_TREE_DEPTH, MEMORY_UNIT, SIGN, Inputs, MlpShape

LANES = simd.LANES
NO_BIAS = np.float32(-1e30)
_UNIT = np.float32(MEMORY_UNIT)

# sizes of an expert and where its parameters begin
Dims = namedtuple(
    "Dims", "num_features features true_hidden hidden num_rows padded_rows depth sign_words head activation memory "
    "b1 w2 b2 u size"
)  # fmt: skip
# where examples come from; what is not there is an empty array
Data = namedtuple("Data", "text embedding width context matrix labels values memory is_text")


def dims_of(shape: MlpShape) -> Dims:
    """Sizes as the loops take them."""
    return Dims(
        shape.num_features,
        shape.padded_features,
        shape.hidden,
        shape.padded_hidden,
        shape.num_rows,
        shape.padded_rows,
        shape.tree_depth,
        shape.sign_words,
        shape.head,
        shape.activation,
        shape.num_memory,
        shape.offset_b1,
        shape.offset_w2,
        shape.offset_b2,
        shape.offset_u,
        shape.packed_size,
    )


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that nobody writes to: to Numba another type than a writable array, and so the same for all callers."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def data_of(inputs: Inputs) -> Data:
    """Inputs as the loops take them; the embedding is padded so that loads may run over its end."""
    no_floats = np.zeros((1, 1), np.float32)
    is_text = inputs.text is not None
    embedding = no_floats.ravel()
    if is_text:
        assert inputs.embedding is not None
        embedding = np.concatenate([inputs.embedding.ravel(), np.zeros(LANES, np.float32)]).astype(np.float32)
    text = np.zeros(1, np.uint8) if inputs.text is None else inputs.text
    matrix = no_floats if inputs.x is None or is_text else inputs.x
    labels, values = np.zeros(1, np.int32), no_floats
    if inputs.y is not None and inputs.y.ndim == 1:
        labels = inputs.y
    elif inputs.y is not None:
        values = inputs.y
    return Data(
        read_only(text),
        read_only(embedding),
        inputs.embedding.shape[1] if inputs.embedding is not None else 0,
        inputs.context,
        read_only(matrix),
        read_only(labels),
        read_only(values),
        read_only(np.zeros((1, 1, 1), np.int8) if inputs.memory is None else inputs.memory),
        is_text,
    )


@jit
def tile(a, a_offset, row_stride, k_stride, depth, b, b_offset, b_stride, c, c_offset, c_stride, start):
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
def eight_rows(theta, rows, first, hidden, w2, starts, lanes, out):
    """out[8, 16]: starts + W2[rows[first : first + 8]] a for the sixteen activation vectors in `lanes` [hidden, 16]."""
    r0 = w2 + rows[first] * hidden
    r1 = w2 + rows[first + 1] * hidden
    r2 = w2 + rows[first + 2] * hidden
    r3 = w2 + rows[first + 3] * hidden
    r4 = w2 + rows[first + 4] * hidden
    r5 = w2 + rows[first + 5] * hidden
    r6 = w2 + rows[first + 6] * hidden
    r7 = w2 + rows[first + 7] * hidden
    c0 = simd.broadcast(starts, first)
    c1 = simd.broadcast(starts, first + 1)
    c2 = simd.broadcast(starts, first + 2)
    c3 = simd.broadcast(starts, first + 3)
    c4 = simd.broadcast(starts, first + 4)
    c5 = simd.broadcast(starts, first + 5)
    c6 = simd.broadcast(starts, first + 6)
    c7 = simd.broadcast(starts, first + 7)
    for i in range(hidden):
        active = simd.load(lanes, i * LANES)
        c0 = simd.fma(simd.broadcast(theta, r0 + i), active, c0)
        c1 = simd.fma(simd.broadcast(theta, r1 + i), active, c1)
        c2 = simd.fma(simd.broadcast(theta, r2 + i), active, c2)
        c3 = simd.fma(simd.broadcast(theta, r3 + i), active, c3)
        c4 = simd.fma(simd.broadcast(theta, r4 + i), active, c4)
        c5 = simd.fma(simd.broadcast(theta, r5 + i), active, c5)
        c6 = simd.fma(simd.broadcast(theta, r6 + i), active, c6)
        c7 = simd.fma(simd.broadcast(theta, r7 + i), active, c7)
    base = first * LANES
    simd.store(out, base, c0)
    simd.store(out, base + 16, c1)
    simd.store(out, base + 32, c2)
    simd.store(out, base + 48, c3)
    simd.store(out, base + 64, c4)
    simd.store(out, base + 80, c5)
    simd.store(out, base + 96, c6)
    simd.store(out, base + 112, c7)


@jit
def tree_lane_losses(z, path_signs, out):
    """out[16]: sum over the path of softplus(-s z), z [8, 16], s 0 off the path.

    The logarithms of the eight factors 1 + exp(-|m|), each in [1, 2], are taken as one of their product; a factor
    off the path is replaced by 1.
    """
    linear = simd.splat(np.float32(0))
    product = simd.splat(np.float32(1))
    for k in range(MAX_TREE_DEPTH):
        sign = simd.broadcast(path_signs, k)
        logit = simd.mul(sign, simd.load(z, k * LANES))
        linear = simd.sub(linear, simd.sub(logit, simd.relu(logit)))
        tail = simd.exp_of_negative(simd.sub(simd.splat(np.float32(0)), simd.absolute(logit)))
        product = simd.fma(product, simd.mul(tail, simd.absolute(sign)), product)
    simd.store(out, 0, simd.add(linear, simd.log(product)))


@jit
def softmax_lane_losses(z, padded_rows, target, out):
    """out[16]: logsumexp over rows minus the target's row, z [padded_rows, 16]; `sum - sum` carries NaN past log."""
    highest = simd.load(z, 0)
    for r in range(1, padded_rows):
        highest = simd.maximum(highest, simd.load(z, r * LANES))
    total = simd.splat(np.float32(0))
    for r in range(padded_rows):
        total = simd.add(total, simd.exp_of_negative(simd.sub(simd.load(z, r * LANES), highest)))
    loss = simd.add(simd.log(total), simd.sub(highest, simd.load(z, target * LANES)))
    simd.store(out, 0, simd.add(loss, simd.sub(total, total)))


@jit
def softplus(x):
    """softplus of each lane."""
    tail = simd.exp_of_negative(simd.sub(simd.splat(np.float32(0)), simd.absolute(x)))
    return simd.add(simd.relu(x), simd.log(simd.add(simd.splat(np.float32(1)), tail)))


@jit
def _eight_dots(theta, rows, first, hidden, w2, active, active_offset):
    """Lanes l and 8 + l: W2[rows[first + l]] a."""
    c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = simd.splat(np.float32(0))
    for i in range(0, hidden, LANES):
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
def row_starts(theta, rows, b2, starts):
    """starts: what a row's logit is without hidden layer and memory, its bias."""
    for r in range(rows.size):
        starts[r] = theta[b2 + rows[r]]


@jit
def logits(theta, rows, num_rows, hidden, w2, starts, active, active_offset, z):
    """z[num_rows] = starts + W2[rows] a, num_rows a multiple of 8; z[-8:] repeats the last eight."""
    for r in range(0, num_rows, 8):
        dots = _eight_dots(theta, rows, r, hidden, w2, active, active_offset)
        simd.store(z, r, simd.add(dots, simd.load_twice(starts, r)))


@jit
def add_memory_logits(theta, u, memory, position, depth, out):
    """Lanes l and 8 + l of out += U_l m_l in nats for l < depth."""
    width = memory.shape[2]
    base = position * memory.shape[1] * width
    zero = simd.splat(np.float32(0))
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = zero
    for i in range(0, width, LANES):
        if depth > 0:
            m0 = simd.fma(simd.load(theta, u + i), simd.load_int8(memory, base + i), m0)
        if depth > 1:
            m1 = simd.fma(simd.load(theta, u + width + i), simd.load_int8(memory, base + width + i), m1)
        if depth > 2:
            m2 = simd.fma(simd.load(theta, u + 2 * width + i), simd.load_int8(memory, base + 2 * width + i), m2)
        if depth > 3:
            m3 = simd.fma(simd.load(theta, u + 3 * width + i), simd.load_int8(memory, base + 3 * width + i), m3)
        if depth > 4:
            m4 = simd.fma(simd.load(theta, u + 4 * width + i), simd.load_int8(memory, base + 4 * width + i), m4)
        if depth > 5:
            m5 = simd.fma(simd.load(theta, u + 5 * width + i), simd.load_int8(memory, base + 5 * width + i), m5)
        if depth > 6:
            m6 = simd.fma(simd.load(theta, u + 6 * width + i), simd.load_int8(memory, base + 6 * width + i), m6)
        if depth > 7:
            m7 = simd.fma(simd.load(theta, u + 7 * width + i), simd.load_int8(memory, base + 7 * width + i), m7)
    along = simd.sum_eight(m0, m1, m2, m3, m4, m5, m6, m7)
    simd.store(out, 0, simd.fma(simd.splat(_UNIT), along, simd.load(out, 0)))


@jit
def add_memory_gradient(gradient, u, memory, position, depth, slopes, scale):
    """gradient of U += scale * slope_k m_k."""
    width = memory.shape[2]
    base = position * memory.shape[1] * width
    for k in range(depth):
        weight = simd.splat(slopes[k] * scale * _UNIT)
        for i in range(0, width, LANES):
            place = u + k * width + i
            moved = simd.fma(weight, simd.load_int8(memory, base + k * width + i), simd.load(gradient, place))
            simd.store(gradient, place, moved)


@jit
def regression_lane_losses(z, num_rows, wanted, out):
    """out[16]: sum over rows of (z - y)^2, z [rows, 16], y [rows]."""
    total = simd.splat(np.float32(0))
    for r in range(num_rows):
        miss = simd.sub(simd.load(z, r * LANES), simd.broadcast(wanted, r))
        total = simd.fma(miss, miss, total)
    simd.store(out, 0, total)


@jit
def regression_head_pairs(z, padded_rows, wanted, size, gradient):
    """As `tree_head_pairs` for squared error; returns the loss."""
    reach = simd.splat(size)
    half = simd.splat(np.float32(0.5) / size)
    total = simd.splat(np.float32(0))
    for r in range(0, padded_rows, LANES):
        miss = simd.sub(simd.load(z, r), simd.load(wanted, r))
        above, below = simd.add(miss, reach), simd.sub(miss, reach)
        difference = simd.sub(simd.mul(above, above), simd.mul(below, below))
        simd.store(gradient, r, simd.mul(difference, half))
        total = simd.fma(miss, miss, total)
    return simd.sum_lanes(total)


@jit
def wanted_values(values, position, num_rows, out):
    """Targets of a regression example."""
    for r in range(num_rows):
        out[r] = values[position, r]


@jit
def tree_head_pairs(z, path_signs, halves, size, gradient):
    """gradient[k] of the loss at each scalar logit of the path by one +/- pair; returns the mean loss of the pairs.

    z and path_signs (0 off the path) repeat their eight values; `halves` is +1 in lanes 0..7 and -1 in the others.
    """
    signs = simd.load(path_signs, 0)
    side = simd.load(halves, 0)
    moved = simd.fma(side, simd.splat(size), simd.load(z, 0))
    losses = simd.mul(softplus(simd.sub(simd.splat(np.float32(0)), simd.mul(signs, moved))), simd.absolute(signs))
    difference = simd.sub(losses, simd.swap_halves(losses))
    simd.store(gradient, 0, simd.mul(difference, simd.splat(np.float32(0.5) / size)))
    return np.float32(0.5) * simd.sum_lanes(losses)


@jit
def softmax_head_pairs(z, num_rows, padded_rows, target, size, scratch, gradient):
    """As `_tree_head_pairs` for a softmax: moving one logit changes one term of the sum, so a pair costs O(1)."""
    highest = z[0]
    for r in range(1, num_rows):
        if not z[r] <= highest:
            highest = z[r]
    top = simd.splat(highest + size)
    total = np.float32(0)
    for r in range(0, padded_rows, LANES):
        shifted = simd.exp_of_negative(simd.sub(simd.load(z, r), top))
        simd.store(scratch, r, shifted)
        total += simd.sum_lanes(shifted)
    step = simd.splat(size)
    for r in range(0, padded_rows, LANES):
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
def exact_head(z, num_rows, padded_rows, head, path_signs, target, wanted, gradient):
    """gradient of the loss at the logits in closed form; returns the loss."""
    if head == HEAD_REGRESSION:
        loss = np.float32(0)
        for r in range(num_rows):
            miss = z[r] - wanted[r]
            gradient[r] = np.float32(2) * miss
            loss += miss * miss
        return loss
    if head == HEAD_TREE:
        signs = simd.load(path_signs, 0)
        missed = simd.sub(simd.splat(np.float32(0)), simd.mul(signs, simd.load(z, 0)))
        one = simd.splat(np.float32(1))
        tail = simd.exp_of_negative(simd.sub(simd.splat(np.float32(0)), simd.absolute(missed)))
        above = simd.positive_mask(missed)
        sigmoid = simd.div(simd.fma(simd.sub(one, above), tail, above), simd.add(one, tail))
        simd.store(gradient, 0, simd.sub(simd.splat(np.float32(0)), simd.mul(signs, sigmoid)))
        return np.float32(0.5) * simd.sum_lanes(simd.mul(softplus(missed), simd.absolute(signs)))
    highest = z[0]
    for r in range(1, num_rows):
        if not z[r] <= highest:
            highest = z[r]
    total = np.float32(0)
    for r in range(0, padded_rows, LANES):
        shifted = simd.exp_of_negative(simd.sub(simd.load(z, r), simd.splat(highest)))
        simd.store(gradient, r, shifted)
        total += simd.sum_lanes(shifted)
    for r in range(num_rows):
        gradient[r] /= total
    gradient[target] -= np.float32(1)
    return np.float32(np.log(total)) + highest - z[target]


@jit
def gather(position, b, num_features, features, is_text, text, embedding, width, context, matrix, x):
    """Row b of x. Loads and stores run up to 15 floats over; what they spill is overwritten here or by the next row."""
    base = b * features
    if is_text:
        for lag in range(context):
            byte = np.int64(text[np.uint64(position - 1 - lag)])
            for d in range(0, width, LANES):
                simd.store(x, base + lag * width + d, simd.load(embedding, byte * width + d))
    else:
        for f in range(num_features):
            x[base + f] = matrix[position, f]
    x[base + num_features : base + features] = 0


@jit
def body_forward(theta, x, h, padded_batch, features, hidden, b1):
    """h [padded_batch, hidden] = x W1 + b1."""
    for row in range(0, padded_batch, 8):
        for column in range(0, hidden, LANES):
            start = simd.load(theta, b1 + column)
            tile(x, row * features, features, 1, features, theta, column, hidden,
                  h, row * hidden + column, hidden, start)  # fmt: skip


@jit
def activate_rows(h, a, size, activation):
    """a = relu(h) or sign(h)."""
    if activation == SIGN:
        for i in range(0, size, LANES):
            simd.store(a, i, simd.sign(simd.load(h, i)))
    else:
        for i in range(0, size, LANES):
            simd.store(a, i, simd.relu(simd.load(h, i)))


@jit
def target_rows(target, depth, head, rows, path_signs):
    """Rows and signs on the way to a target; other heads use all rows, always the same."""
    if head == HEAD_TREE:
        for k in range(depth):
            rows[k] = ((1 << k) | (target >> (depth - k))) - 1
            sign = np.float32(2 * ((target >> (depth - 1 - k)) & 1) - 1)
            path_signs[k] = sign
            path_signs[8 + k] = sign
