"""The recurrent expert's forward pass for CPUs, float32: sixteen windows side by side, a lane each.

Every activation is stored as [unit][16 windows] and every weight is spread over the lanes, so that a lane never learns
what the others hold: a window's result is the same bit for bit in any batch, with any other candidates, and in one
piece or several. A candidate's matrices are laid out once in strips of eight columns, [columns / 8][rows][8], and read
once for two bytes: only the products with the state wait for the byte before.

Widths that are no multiple of eight are padded with units of zero weights, which stay at zero and are left out of the
norms.

Legend and formulas as in `contract`; a strip is eight output units, a pair two bytes that follow each other.
"""

# an intrinsic's first parameter is Numba's own, which pyright does not see

from __future__ import annotations

from collections import namedtuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .. import simd
from ..compile import jit
from .contract import EPSILON, NUM_BYTES, LstmShape, check_windows

LANES = simd.LANES
# widths are multiples of this in the loops, so that they have no remainders
TILE = 8
_PAIR = 2
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_EPSILON = np.float32(EPSILON)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)

# (limit, P, Q) of rational forms x P(x^2) / Q(x^2) for |x| <= limit and constant beyond, highest power first: minimax
# fits of the relative error (reweighted least squares in float64), within 3e-7 of the function when evaluated in
# float32. Cheaper than exponentials, and as exact around zero as elsewhere.
_TANH = (
    8.0,
    (1.52304427e-08, 2.18946789e-05, 3.57159902e-03, 1.34444982e-01, 1.0),
    (8.52245648e-07, 3.41129373e-04, 2.61644460e-02, 4.67778265e-01, 1.0),
)
_ERF = (
    3.75,
    (2.28534438e-04, 3.25990608e-03, 5.04963435e-02, 1.81246236e-01, 1.12837911),
    (-1.23763087e-07, 2.39833989e-05, 9.88354557e-04, 1.37656806e-02, 1.09406725e-01, 4.93958116e-01, 1.0),
)
_ROOT_HALF = np.float32(np.sqrt(0.5))

# sizes, floats of a block, where its roles lie from its beginning, where the other roles lie
_Dims = namedtuple(
    "_Dims",
    "width true_width head_width num_blocks has_projections train_embedding block wx wh gain1 up down gain2 "
    "gain project_in project_out embedding",
)
# scratch of one call: `packed` weights, and of a pair of bytes [2][units][16] the head's input and output, the
# residual stream, its norm, the wide layers, the logits; the state's work copies [L][units][16]
_Work = namedtuple("_Work", "packed thin stream normed wide logits h c")

State = tuple[np.ndarray, np.ndarray]


def _up(width: int) -> int:
    return -(-width // TILE) * TILE


def _padded_shape(shape: LstmShape) -> LstmShape:
    """The shape that the loops see."""
    width, head_width = _up(shape.width), None
    if shape.has_projections:
        head_width = _up(shape.embedding_width)
        # the projections stay where rounding up makes both widths the same
        width += TILE * (width == head_width)
    return LstmShape(width, shape.num_blocks, head_width, shape.train_embedding)


def _padded(shape: LstmShape, loops: LstmShape, candidates: np.ndarray) -> np.ndarray:
    """Candidates [K, T] with zeros for the units that a shape does not have."""
    if loops == shape:
        return np.ascontiguousarray(candidates)
    out = np.zeros((len(candidates), loops.num_parameters), np.float32)
    targets = loops.views(out)
    for role, view in shape.views(candidates).items():
        target = targets[role]
        if role.endswith((".wx", ".wh")):
            # four gates side by side
            view = view.reshape(*view.shape[:-1], 4, shape.width)
            target = target.reshape(*target.shape[:-1], 4, loops.width)
        target[tuple(slice(size) for size in view.shape)] = view
    return out


def _dims_of(loops: LstmShape, shape: LstmShape) -> _Dims:
    at = loops.offsets
    end = loops.num_parameters
    return _Dims(
        width=loops.width,
        true_width=shape.width,
        head_width=loops.embedding_width,
        num_blocks=loops.num_blocks,
        has_projections=loops.has_projections,
        train_embedding=loops.train_embedding,
        block=at["gain"] // loops.num_blocks,
        wx=at["block0.wx"],
        wh=at["block0.wh"],
        gain1=at["block0.gain1"],
        up=at["block0.up"],
        down=at["block0.down"],
        gain2=at["block0.gain2"],
        gain=at["gain"],
        project_in=at.get("project_in", end),
        project_out=at.get("project_out", end),
        embedding=at.get("embedding", end),
    )


def _aligned(size: int) -> np.ndarray:
    """float32 [size] of zeros that begins a cache line."""
    buffer = np.zeros(size + LANES, np.float32)
    skip = -(buffer.ctypes.data // 4) % LANES
    return buffer[skip : skip + size]


def _work_of(shape: LstmShape, dims: _Dims) -> _Work:
    d, w = shape.width, shape.embedding_width
    state = shape.num_blocks * d * LANES
    pair = _PAIR * LANES
    return _Work(
        _aligned(dims.embedding + NUM_BYTES * w),
        _aligned(pair * w),
        _aligned(pair * d),
        _aligned(pair * d),
        _aligned(pair * 4 * d),
        _aligned(pair * NUM_BYTES),
        _aligned(state),
        _aligned(state),
    )


@jit
def _pack(source, source_at, row_stride, column_stride, rows, columns, packed, packed_at):
    """Copy a matrix [rows, columns] into strips of eight columns."""
    for j in range(columns):
        base = packed_at + (j // TILE) * rows * TILE + j % TILE
        for k in range(rows):
            packed[base + k * TILE] = source[source_at + k * row_stride + j * column_stride]


@jit
def _pack_candidate(theta, dims, packed):
    """Everything but the embedding, each role where it lies in the flat vector.

    Columns of sigmoid gates are halved: sigmoid(x) = (1 + tanh(x / 2)) / 2.
    """
    d, w = dims.width, dims.head_width
    for block in range(dims.num_blocks):
        base = block * dims.block
        for role in (dims.wx, dims.wh, dims.up):
            _pack(theta, base + role, 4 * d, 1, d, 4 * d, packed, base + role)
        for role in (dims.wx, dims.wh):
            for gate in (0, 1, 3):
                for k in range(base + role + gate * d * d, base + role + (gate + 1) * d * d):
                    packed[k] *= _HALF
        _pack(theta, base + dims.down, d, 1, 4 * d, d, packed, base + dims.down)
        for role in (dims.gain1, dims.gain2):
            for k in range(base + role, base + role + d):
                packed[k] = theta[k]
    for k in range(dims.gain, dims.gain + d):
        packed[k] = theta[k]
    if dims.has_projections:
        _pack(theta, dims.project_in, d, 1, w, d, packed, dims.project_in)
        _pack(theta, dims.project_out, w, 1, d, w, packed, dims.project_out)


@jit
def _times_pair(packed, at, rows, columns, x, out, onto):
    """out[2][columns][16] = x[2][rows][16] times a packed matrix, added to what `out` holds if `onto`."""
    x_step = rows * LANES
    out_step = columns * LANES
    zero = simd.splat(_ZERO)
    for strip in range(0, columns, TILE):
        p = strip * LANES
        q = p + out_step
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = zero
        if onto:
            a0 = simd.load(out, p)
            a1 = simd.load(out, p + 16)
            a2 = simd.load(out, p + 32)
            a3 = simd.load(out, p + 48)
            a4 = simd.load(out, p + 64)
            a5 = simd.load(out, p + 80)
            a6 = simd.load(out, p + 96)
            a7 = simd.load(out, p + 112)
            b0 = simd.load(out, q)
            b1 = simd.load(out, q + 16)
            b2 = simd.load(out, q + 32)
            b3 = simd.load(out, q + 48)
            b4 = simd.load(out, q + 64)
            b5 = simd.load(out, q + 80)
            b6 = simd.load(out, q + 96)
            b7 = simd.load(out, q + 112)
        base = at + strip * rows
        for k in range(rows):
            first = simd.load(x, k * LANES)
            second = simd.load(x, x_step + k * LANES)
            r = base + k * TILE
            weight = simd.broadcast(packed, r)
            a0 = simd.fma(weight, first, a0)
            b0 = simd.fma(weight, second, b0)
            weight = simd.broadcast(packed, r + 1)
            a1 = simd.fma(weight, first, a1)
            b1 = simd.fma(weight, second, b1)
            weight = simd.broadcast(packed, r + 2)
            a2 = simd.fma(weight, first, a2)
            b2 = simd.fma(weight, second, b2)
            weight = simd.broadcast(packed, r + 3)
            a3 = simd.fma(weight, first, a3)
            b3 = simd.fma(weight, second, b3)
            weight = simd.broadcast(packed, r + 4)
            a4 = simd.fma(weight, first, a4)
            b4 = simd.fma(weight, second, b4)
            weight = simd.broadcast(packed, r + 5)
            a5 = simd.fma(weight, first, a5)
            b5 = simd.fma(weight, second, b5)
            weight = simd.broadcast(packed, r + 6)
            a6 = simd.fma(weight, first, a6)
            b6 = simd.fma(weight, second, b6)
            weight = simd.broadcast(packed, r + 7)
            a7 = simd.fma(weight, first, a7)
            b7 = simd.fma(weight, second, b7)
        simd.store(out, p, a0)
        simd.store(out, p + 16, a1)
        simd.store(out, p + 32, a2)
        simd.store(out, p + 48, a3)
        simd.store(out, p + 64, a4)
        simd.store(out, p + 80, a5)
        simd.store(out, p + 96, a6)
        simd.store(out, p + 112, a7)
        simd.store(out, q, b0)
        simd.store(out, q + 16, b1)
        simd.store(out, q + 32, b2)
        simd.store(out, q + 48, b3)
        simd.store(out, q + 64, b4)
        simd.store(out, q + 80, b5)
        simd.store(out, q + 96, b6)
        simd.store(out, q + 112, b7)


@jit
def _add_times(packed, at, rows, columns, x, x_at, out, out_at):
    """out[columns][16] += x[rows][16] times a packed matrix, two strips at a time."""
    for strip in range(0, columns, 2 * TILE):
        p = out_at + strip * LANES
        a0 = simd.load(out, p)
        a1 = simd.load(out, p + 16)
        a2 = simd.load(out, p + 32)
        a3 = simd.load(out, p + 48)
        a4 = simd.load(out, p + 64)
        a5 = simd.load(out, p + 80)
        a6 = simd.load(out, p + 96)
        a7 = simd.load(out, p + 112)
        b0 = simd.load(out, p + 128)
        b1 = simd.load(out, p + 144)
        b2 = simd.load(out, p + 160)
        b3 = simd.load(out, p + 176)
        b4 = simd.load(out, p + 192)
        b5 = simd.load(out, p + 208)
        b6 = simd.load(out, p + 224)
        b7 = simd.load(out, p + 240)
        base = at + strip * rows
        for k in range(rows):
            row = simd.load(x, x_at + k * LANES)
            r = base + k * TILE
            a0 = simd.fma(simd.broadcast(packed, r), row, a0)
            a1 = simd.fma(simd.broadcast(packed, r + 1), row, a1)
            a2 = simd.fma(simd.broadcast(packed, r + 2), row, a2)
            a3 = simd.fma(simd.broadcast(packed, r + 3), row, a3)
            a4 = simd.fma(simd.broadcast(packed, r + 4), row, a4)
            a5 = simd.fma(simd.broadcast(packed, r + 5), row, a5)
            a6 = simd.fma(simd.broadcast(packed, r + 6), row, a6)
            a7 = simd.fma(simd.broadcast(packed, r + 7), row, a7)
            r += rows * TILE
            b0 = simd.fma(simd.broadcast(packed, r), row, b0)
            b1 = simd.fma(simd.broadcast(packed, r + 1), row, b1)
            b2 = simd.fma(simd.broadcast(packed, r + 2), row, b2)
            b3 = simd.fma(simd.broadcast(packed, r + 3), row, b3)
            b4 = simd.fma(simd.broadcast(packed, r + 4), row, b4)
            b5 = simd.fma(simd.broadcast(packed, r + 5), row, b5)
            b6 = simd.fma(simd.broadcast(packed, r + 6), row, b6)
            b7 = simd.fma(simd.broadcast(packed, r + 7), row, b7)
        simd.store(out, p, a0)
        simd.store(out, p + 16, a1)
        simd.store(out, p + 32, a2)
        simd.store(out, p + 48, a3)
        simd.store(out, p + 64, a4)
        simd.store(out, p + 80, a5)
        simd.store(out, p + 96, a6)
        simd.store(out, p + 112, a7)
        simd.store(out, p + 128, b0)
        simd.store(out, p + 144, b1)
        simd.store(out, p + 160, b2)
        simd.store(out, p + 176, b3)
        simd.store(out, p + 192, b4)
        simd.store(out, p + 208, b5)
        simd.store(out, p + 224, b6)
        simd.store(out, p + 240, b7)


@jit
def _normalise(x, d, true_d, gains, gains_at, out):
    """out[2][d][16] = norm(x) gain; sums run over the units u = 0, 4, ..., then 1, 5, ... and so on.

    The d - true_d last units are zero and do not count.
    """
    zero = simd.splat(_ZERO)
    share = simd.splat(_ONE / np.float32(true_d))
    spare = simd.splat(np.float32(true_d - d))
    for step in range(_PAIR):
        base = step * d * LANES
        s0 = s1 = s2 = s3 = zero
        for k in range(base, base + d * LANES, 4 * LANES):
            s0 = simd.add(s0, simd.load(x, k))
            s1 = simd.add(s1, simd.load(x, k + 16))
            s2 = simd.add(s2, simd.load(x, k + 32))
            s3 = simd.add(s3, simd.load(x, k + 48))
        mean = simd.mul(simd.add(simd.add(s0, s1), simd.add(s2, s3)), share)
        s0 = s1 = s2 = s3 = zero
        for k in range(base, base + d * LANES, 4 * LANES):
            v0 = simd.sub(simd.load(x, k), mean)
            v1 = simd.sub(simd.load(x, k + 16), mean)
            v2 = simd.sub(simd.load(x, k + 32), mean)
            v3 = simd.sub(simd.load(x, k + 48), mean)
            s0 = simd.fma(v0, v0, s0)
            s1 = simd.fma(v1, v1, s1)
            s2 = simd.fma(v2, v2, s2)
            s3 = simd.fma(v3, v3, s3)
        total = simd.add(simd.add(s0, s1), simd.add(s2, s3))
        if true_d != d:
            total = simd.fma(simd.mul(mean, mean), spare, total)
        variance = simd.mul(total, share)
        scale = simd.div(simd.splat(_ONE), simd.sqrt(simd.add(variance, simd.splat(_EPSILON))))
        for k in range(d):
            at = base + k * LANES
            gain = simd.mul(scale, simd.broadcast(gains, gains_at + k))
            simd.store(out, at, simd.mul(simd.sub(simd.load(x, at), mean), gain))


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [ir.Constant(ir.FloatType(), float(np.float32(value)))] * LANES)


def _fma(builder, first, second, addend):
    signature = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32"), (first, second, addend)
    )


def _horner(builder, xs, coefficients):
    values = [_constant(coefficients[0])] * len(xs)
    for coefficient in coefficients[1:]:
        values = [_fma(builder, v, x, _constant(coefficient)) for v, x in zip(values, xs, strict=True)]
    return values


def _rational(form, count: int):
    """An intrinsic: `count` vectors to as many numerators and then denominators of `form`; NaN stays NaN.

    A step is emitted for all vectors before the next: a core's window is too short to overlap chains that follow one
    another.
    """
    limit, p, q = form

    def codegen(context, builder, signature, arguments):
        low, high = _constant(-limit), _constant(limit)
        xs = [builder.select(builder.fcmp_ordered("<", x, low), low, x) for x in arguments]
        xs = [builder.select(builder.fcmp_ordered("<", high, x), high, x) for x in xs]
        squares = [builder.fmul(x, x) for x in xs]
        numerators = _horner(builder, squares, p)
        denominators = _horner(builder, squares, q)
        numerators = [builder.fmul(x, n) for x, n in zip(xs, numerators, strict=True)]
        return context.make_tuple(builder, signature.return_type, numerators + denominators)

    signature = types.UniTuple(simd.f32x16, 2 * count)(*[simd.f32x16] * count)
    return signature, codegen


@intrinsic
def _tanh_2(typing_context, x0, x1):
    return _rational(_TANH, 2)


@intrinsic
def _tanh_4(typing_context, x0, x1, x2, x3):
    return _rational(_TANH, 4)


@intrinsic
def _erf_4(typing_context, x0, x1, x2, x3):
    return _rational(_ERF, 4)


@intrinsic
def _exp_4(typing_context, x0, x1, x2, x3):
    """exp(x) for x <= 0 as `simd.exp_of_negative`, four vectors step by step."""

    def codegen(context, builder, signature, arguments):
        integers = ir.VectorType(ir.IntType(32), LANES)
        one = ir.FunctionType(_VECTOR, [_VECTOR])
        nearest = cgutils.get_or_insert_function(builder.module, one, f"llvm.rint.v{LANES}f32")
        low = _constant(-87.0)
        xs = [builder.select(builder.fcmp_ordered("<", x, low), low, x) for x in arguments]
        powers = [builder.fmul(x, _constant(1.4426950408889634)) for x in xs]
        powers = [builder.call(nearest, (power,)) for power in powers]
        xs = [_fma(builder, power, _constant(-0.693359375), x) for power, x in zip(powers, xs, strict=True)]
        xs = [_fma(builder, power, _constant(2.12194440e-4), x) for power, x in zip(powers, xs, strict=True)]
        scales = [builder.fptosi(power, integers) for power in powers]
        for operation, value in ((builder.add, 127), (builder.shl, 23)):
            operand = ir.Constant(integers, [ir.Constant(ir.IntType(32), value)] * LANES)
            scales = [operation(scale, operand) for scale in scales]
        scales = [builder.bitcast(scale, _VECTOR) for scale in scales]
        series = _horner(builder, xs, (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0))
        values = [builder.fmul(a, b) for a, b in zip(series, scales, strict=True)]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(simd.f32x16, 4)(*[simd.f32x16] * 4), codegen


@jit
def _next_cell(i, i_q, f, f_q, g, g_q, cell):
    """sigmoid(f) cell + sigmoid(i) tanh(g) over one denominator: the divider is the bottleneck."""
    input_q = simd.mul(i_q, g_q)
    kept = simd.mul(simd.mul(simd.add(f, f_q), cell), input_q)
    new = simd.mul(simd.mul(simd.add(i, i_q), g), f_q)
    return simd.mul(simd.div(simd.add(kept, new), simd.mul(f_q, input_q)), simd.splat(_HALF))


@jit
def _cell(gates, gates_at, d, h, c, state_at, stream, stream_at):
    """The next state [d][16] from the gates' sums [4d][16]; h is added to the residual stream."""
    half = simd.splat(_HALF)
    wide = d * LANES
    for k in range(0, wide, 2 * LANES):
        p = gates_at + k
        q = p + 2 * wide
        i, f, g, o, i_q, f_q, g_q, o_q = _tanh_4(
            simd.load(gates, p), simd.load(gates, p + wide), simd.load(gates, q), simd.load(gates, q + wide)
        )
        first = _next_cell(i, i_q, f, f_q, g, g_q, simd.load(c, state_at + k))
        p += LANES
        q += LANES
        i, f, g, r, i_q, f_q, g_q, r_q = _tanh_4(
            simd.load(gates, p), simd.load(gates, p + wide), simd.load(gates, q), simd.load(gates, q + wide)
        )
        second = _next_cell(i, i_q, f, f_q, g, g_q, simd.load(c, state_at + k + 16))
        simd.store(c, state_at + k, first)
        simd.store(c, state_at + k + 16, second)
        n, m, n_q, m_q = _tanh_2(first, second)
        first = simd.mul(simd.div(simd.mul(simd.add(o, o_q), n), simd.mul(o_q, n_q)), half)
        second = simd.mul(simd.div(simd.mul(simd.add(r, r_q), m), simd.mul(r_q, m_q)), half)
        simd.store(h, state_at + k, first)
        simd.store(h, state_at + k + 16, second)
        simd.store(stream, stream_at + k, simd.add(simd.load(stream, stream_at + k), first))
        simd.store(stream, stream_at + k + 16, simd.add(simd.load(stream, stream_at + k + 16), second))


@jit
def _gelu(v, size):
    """v (1 + erf(v / sqrt 2)) / 2 in place; two vectors share a division."""
    root = simd.splat(_ROOT_HALF)
    half = simd.splat(_HALF)
    for k in range(0, size, 4 * LANES):
        v0 = simd.load(v, k)
        v1 = simd.load(v, k + 16)
        v2 = simd.load(v, k + 32)
        v3 = simd.load(v, k + 48)
        n0, n1, n2, n3, q0, q1, q2, q3 = _erf_4(
            simd.mul(v0, root), simd.mul(v1, root), simd.mul(v2, root), simd.mul(v3, root)
        )
        inverse = simd.div(half, simd.mul(q0, q1))
        simd.store(v, k, simd.mul(simd.mul(v0, simd.add(n0, q0)), simd.mul(inverse, q1)))
        simd.store(v, k + 16, simd.mul(simd.mul(v1, simd.add(n1, q1)), simd.mul(inverse, q0)))
        inverse = simd.div(half, simd.mul(q2, q3))
        simd.store(v, k + 32, simd.mul(simd.mul(v2, simd.add(n2, q2)), simd.mul(inverse, q3)))
        simd.store(v, k + 48, simd.mul(simd.mul(v3, simd.add(n3, q3)), simd.mul(inverse, q2)))


@jit
def _log_normaliser(z, at):
    """Where log-probabilities count from, two vectors: the largest of z[256][16], and the log of the sum above it."""
    t0 = t1 = t2 = t3 = simd.load(z, at)
    for k in range(at, at + NUM_BYTES * LANES, 4 * LANES):
        t0 = simd.maximum(simd.load(z, k), t0)
        t1 = simd.maximum(simd.load(z, k + 16), t1)
        t2 = simd.maximum(simd.load(z, k + 32), t2)
        t3 = simd.maximum(simd.load(z, k + 48), t3)
    top = simd.maximum(simd.maximum(t0, t1), simd.maximum(t2, t3))
    s0 = s1 = s2 = s3 = simd.splat(_ZERO)
    for k in range(at, at + NUM_BYTES * LANES, 4 * LANES):
        e0, e1, e2, e3 = _exp_4(
            simd.sub(simd.load(z, k), top),
            simd.sub(simd.load(z, k + 16), top),
            simd.sub(simd.load(z, k + 32), top),
            simd.sub(simd.load(z, k + 48), top),
        )
        s0 = simd.add(s0, e0)
        s1 = simd.add(s1, e1)
        s2 = simd.add(s2, e2)
        s3 = simd.add(s3, e3)
    total = simd.add(simd.add(s0, s1), simd.add(s2, s3))
    # `log` swallows a NaN, which the difference hands on
    return top, simd.add(simd.log(total), simd.sub(total, total))


@jit
def _read_inputs(text, positions, t, from_nothing, table, table_at, w, out):
    """out[2][w][16]: embeddings of the bytes before positions + t and + t + 1; zero for the first one of all."""
    for step in range(_PAIR):
        for lane in range(LANES):
            at = step * w * LANES + lane
            if from_nothing and t + step == 0:
                for k in range(w):
                    out[at + k * LANES] = _ZERO
                continue
            # the second byte of a pair may lie past the window's end, where its result is not used
            row = table_at + np.int64(text[min(positions[lane] + t + step, text.size) - 1]) * w
            for k in range(w):
                out[at + k * LANES] = table[row + k]


@jit
def _advance(dims, work, steps):
    """From the embeddings of a pair of bytes in `thin` to their logits; the state moves by `steps` of them."""
    d, true_d, w = dims.width, dims.true_width, dims.head_width
    packed, wide, stream, normed = work.packed, work.wide, work.stream, work.normed
    if dims.has_projections:
        _times_pair(packed, dims.project_in, w, d, work.thin, stream, False)
    else:
        for k in range(0, _PAIR * d * LANES, LANES):
            simd.store(stream, k, simd.load(work.thin, k))
    for block in range(dims.num_blocks):
        base = block * dims.block
        state_at = block * d * LANES
        _normalise(stream, d, true_d, packed, base + dims.gain1, normed)
        _times_pair(packed, base + dims.wx, d, 4 * d, normed, wide, False)
        for step in range(steps):
            gates_at = step * 4 * d * LANES
            _add_times(packed, base + dims.wh, d, 4 * d, work.h, state_at, wide, gates_at)
            _cell(wide, gates_at, d, work.h, work.c, state_at, stream, step * d * LANES)
        _normalise(stream, d, true_d, packed, base + dims.gain2, normed)
        _times_pair(packed, base + dims.up, d, 4 * d, normed, wide, False)
        _gelu(wide, _PAIR * 4 * d * LANES)
        _times_pair(packed, base + dims.down, 4 * d, d, wide, stream, True)
    _normalise(stream, d, true_d, packed, dims.gain, normed)
    if dims.has_projections:
        _times_pair(packed, dims.project_out, d, w, normed, work.thin, False)
        _times_pair(packed, dims.embedding, w, NUM_BYTES, work.thin, work.logits, False)
    else:
        _times_pair(packed, dims.embedding, w, NUM_BYTES, normed, work.logits, False)


@jit
def _forward(dims, work, candidates, embedding, text, starts, length, from_nothing, h, c, log_proba, losses):
    """Fill losses [K, B], and log_proba [B, length] unless it has no rows; h and c [L, B, d] of one candidate move on.

    The state is read unless `from_nothing`, and written where it has rows.
    """
    d, w, num_windows = dims.width, dims.head_width, starts.size
    positions = np.zeros(LANES, np.int64)
    normaliser = np.zeros(2 * LANES, np.float32)
    sums = np.zeros(LANES, np.float64)
    if not dims.train_embedding:
        _pack(embedding, 0, 1, w, w, NUM_BYTES, work.packed, dims.embedding)
    for candidate in range(candidates.shape[0]):
        theta = candidates[candidate]
        _pack_candidate(theta, dims, work.packed)
        table, table_at = embedding, 0
        if dims.train_embedding:
            table, table_at = theta, dims.embedding
            _pack(theta, dims.embedding, 1, w, w, NUM_BYTES, work.packed, dims.embedding)
        for first in range(0, num_windows, LANES):
            used = min(LANES, num_windows - first)
            # spare lanes repeat a window
            for lane in range(LANES):
                positions[lane] = starts[first + min(lane, used - 1)]
            sums[:] = 0
            work.h[:] = 0
            work.c[:] = 0
            if not from_nothing:
                for block in range(dims.num_blocks):
                    for lane in range(used):
                        for k in range(d):
                            work.h[(block * d + k) * LANES + lane] = h[block, first + lane, k]
                            work.c[(block * d + k) * LANES + lane] = c[block, first + lane, k]
            for t in range(0, length, _PAIR):
                steps = min(_PAIR, length - t)
                _read_inputs(text, positions, t, from_nothing, table, table_at, w, work.thin)
                _advance(dims, work, steps)
                for step in range(steps):
                    at = step * NUM_BYTES * LANES
                    top, log_total = _log_normaliser(work.logits, at)
                    simd.store(normaliser, 0, top)
                    simd.store(normaliser, LANES, log_total)
                    for lane in range(used):
                        target = np.int64(text[positions[lane] + t + step])
                        value = work.logits[at + target * LANES + lane] - normaliser[lane] - normaliser[LANES + lane]
                        sums[lane] += value
                        if log_proba.shape[0] > 0:
                            log_proba[first + lane, t + step] = value
            for lane in range(used):
                losses[candidate, first + lane] = -sums[lane] / length
            if h.shape[1] > 0:
                for block in range(dims.num_blocks):
                    for lane in range(used):
                        for k in range(d):
                            h[block, first + lane, k] = work.h[(block * d + k) * LANES + lane]
                            c[block, first + lane, k] = work.c[(block * d + k) * LANES + lane]


def _call(shape: LstmShape, candidates, embedding, text, starts, length: int, from_nothing: bool, h, c, log_proba):
    check_windows(shape, embedding, text, starts, length, not from_nothing)
    assert candidates.dtype == np.float32, f"expected float32 weights, got {candidates.dtype}"
    assert candidates.shape[1] == shape.num_parameters, f"expected {shape.num_parameters} parameters a candidate"
    loops = _padded_shape(shape)
    dims = _dims_of(loops, shape)
    losses = np.zeros((len(candidates), len(starts)))
    table = np.zeros((1, 1), np.float32) if shape.train_embedding else np.asarray(embedding, np.float32)
    if not shape.train_embedding and loops != shape:
        table = np.pad(table, ((0, 0), (0, loops.embedding_width - shape.embedding_width)))
    _forward(
        dims,
        _work_of(loops, dims),
        _padded(shape, loops, candidates),
        np.ascontiguousarray(table).ravel(),
        # a memory-mapped array is another type to Numba
        np.ascontiguousarray(np.asarray(text)),
        np.ascontiguousarray(starts, np.int64),
        length,
        from_nothing,
        h,
        c,
        log_proba,
        losses,
    )
    return losses


def window_log_proba(
    shape: LstmShape,
    weights_flat: np.ndarray,
    embedding: np.ndarray | None,
    text: np.ndarray,
    starts: np.ndarray,
    length: int,
    state: State | None = None,
) -> tuple[np.ndarray, State]:
    """Log p (nats) of each byte of the windows, float32 [B, length], and the state after the last byte.

    Without a state a window begins from nothing: zero state, and the zero vector in place of a previous byte. With the
    state of an earlier call it continues: its first input is the embedding of text[start - 1], and the two parts give
    bit for bit what the whole would.

    Args:
        shape: sizes of the expert.
        weights_flat: float32 [T].
        embedding: float32 [256, w]; None or ignored where the expert brings its own.
        text: uint8 [N].
        starts: int [B], first byte of each window.
        length: bytes of a window.
        state: what an earlier call returned for the same B windows, or None: (h, c), each float32 [L, B, d]; it is
            not changed.

    Raises:
        UserError: see `check_windows`.
    """
    size = (shape.num_blocks, len(starts), shape.width)
    width = _padded_shape(shape).width
    h, c = np.zeros((2, *size[:2], width), np.float32)
    if state is not None:
        for own, part in zip((h, c), state, strict=True):
            assert part.shape == size, f"expected a state of shape {size}, got {part.shape}"
            own[..., : shape.width] = part
    log_proba = np.zeros((len(starts), length), np.float32)
    _call(shape, weights_flat[None], embedding, text, starts, length, state is None, h, c, log_proba)
    if width != shape.width:
        h, c = (np.ascontiguousarray(part[..., : shape.width]) for part in (h, c))
    return log_proba, (h, c)


def window_losses(
    shape: LstmShape,
    candidates: np.ndarray,
    embedding: np.ndarray | None,
    text: np.ndarray,
    starts: np.ndarray,
    length: int,
) -> np.ndarray:
    """Loss (nats a byte) of every window under every candidate, float64 [K, B]: float32 terms, summed in float64.

    A candidate whose logits are not finite has losses of NaN; the others do not notice.

    Args:
        shape: sizes of the expert.
        candidates: float32 [K, T].
        embedding: float32 [256, w]; None or ignored where candidates bring their own.
        text: uint8 [N].
        starts: int [B], first byte of each window.
        length: bytes of a window.

    Raises:
        UserError: see `check_windows`.
    """
    no_state = np.zeros((shape.num_blocks, 0, shape.width), np.float32)
    no_rows = np.zeros((0, 0), np.float32)
    return _call(shape, candidates, embedding, text, starts, length, True, no_state, no_state, no_rows)
