"""Sixteen float32 lanes as a value in Numba code.

Numba leaves vectorising to LLVM, which gives up on short loops over arrays that may alias and never keeps
accumulators in registers across them. The resident loops live on exactly those. `f32x16` is one LLVM vector
(an AVX-512 register, two AVX or four NEON ones), loaded from and stored to float32 arrays at a flat offset.

No operation here hides a NaN: `relu` and `clamp` hand it on.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_VF = ir.VectorType(_F32, LANES)
_VI = ir.VectorType(_I32, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector_type) -> None:
        super().__init__(manager, vector_type, _VF)


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VF, [ir.Constant(_F32, value)] * LANES)


def _int_constant(value: int) -> ir.Constant:
    return ir.Constant(_VI, [ir.Constant(_I32, value)] * LANES)


def _splat(builder, scalar, vector_type):
    single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, ir.Constant(vector_type, ir.Undefined), _int_constant(0))


def _llvm(builder, name: str, num_arguments: int):
    signature = ir.FunctionType(_VF, [_VF] * num_arguments)
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{LANES}f32")


def _pointer(context, builder, array_type, array, offset, vector_type):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), vector_type.as_pointer())


def _is_float_array(array) -> bool:
    return isinstance(array, types.Array) and array.dtype == types.float32 and array.layout == "C"


@intrinsic
def load(typing_context, array, offset):
    """Lanes array.flat[offset : offset + 16]; `array` float32, C order; not bounds-checked."""
    if not _is_float_array(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments, _VF)
        return builder.load(pointer, align=4)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_twice(typing_context, array, offset):
    """Lanes l and 8 + l: array.flat[offset + l], l < 8; not bounds-checked."""
    if not _is_float_array(array):
        return None

    def codegen(context, builder, signature, arguments):
        half = ir.VectorType(_F32, LANES // 2)
        pointer = _pointer(context, builder, signature.args[0], *arguments, half)
        lanes = builder.load(pointer, align=4)
        order = ir.Constant(_VI, [ir.Constant(_I32, lane % (LANES // 2)) for lane in range(LANES)])
        return builder.shuffle_vector(lanes, ir.Constant(half, ir.Undefined), order)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_int8(typing_context, array, offset):
    """Lanes array.flat[offset : offset + 16] of an int8 array in C order, as floats; not bounds-checked."""
    if not (isinstance(array, types.Array) and array.dtype == types.int8 and array.layout == "C"):
        return None

    def codegen(context, builder, signature, arguments):
        bytes_type = ir.VectorType(ir.IntType(8), LANES)
        pointer = _pointer(context, builder, signature.args[0], *arguments, bytes_type)
        return builder.sitofp(builder.load(pointer, align=1), _VF)

    return f32x16(array, types.intp), codegen


@intrinsic
def store(typing_context, array, offset, vector):
    """Write the lanes to array.flat[offset : offset + 16]; not bounds-checked."""
    if not _is_float_array(array):
        return None

    def codegen(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], arguments[0], arguments[1], _VF)
        builder.store(arguments[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def splat(typing_context, scalar):
    """The same float32 in every lane."""

    def codegen(context, builder, signature, arguments):
        return _splat(builder, arguments[0], _VF)

    return f32x16(types.float32), codegen


@intrinsic
def broadcast(typing_context, array, offset):
    """array.flat[offset] in every lane, without Numba's treatment of negative indices; not bounds-checked."""
    if not _is_float_array(array):
        return None

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return _splat(builder, builder.load(builder.gep(data, [arguments[1]])), _VF)

    return f32x16(array, types.intp), codegen


@intrinsic
def fma(typing_context, first, second, addend):
    """first * second + addend, rounded once."""

    def codegen(context, builder, signature, arguments):
        function = _llvm(builder, "fma", 3)
        return builder.call(function, arguments)

    return f32x16(f32x16, f32x16, f32x16), codegen


def _binary(name, doc, emit):
    def definition(typing_context, first, second):
        def codegen(context, builder, signature, arguments):
            return emit(builder, *arguments)

        return f32x16(f32x16, f32x16), codegen

    definition.__name__ = definition.__qualname__ = name
    definition.__doc__ = doc
    return intrinsic(definition)


add = _binary("add", "Lane-wise sum.", lambda builder, a, b: builder.fadd(a, b))
sub = _binary("sub", "Lane-wise difference.", lambda builder, a, b: builder.fsub(a, b))
mul = _binary("mul", "Lane-wise product.", lambda builder, a, b: builder.fmul(a, b))
div = _binary("div", "Lane-wise quotient.", lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(
    "maximum",
    "The larger lane; where `first` is NaN, NaN.",
    lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a),
)


@intrinsic
def sqrt(typing_context, vector):
    """Lane-wise square root, correctly rounded."""

    def codegen(context, builder, signature, arguments):
        function = _llvm(builder, "sqrt", 1)
        return builder.call(function, arguments)

    return f32x16(f32x16), codegen


@intrinsic
def absolute(typing_context, vector):
    """Lane-wise magnitude."""

    def codegen(context, builder, signature, arguments):
        function = _llvm(builder, "fabs", 1)
        return builder.call(function, arguments)

    return f32x16(f32x16), codegen


@intrinsic
def relu(typing_context, vector):
    """max(x, 0) that hands NaN on."""

    def codegen(context, builder, signature, arguments):
        (x,) = arguments
        return builder.select(builder.fcmp_ordered("<", x, _constant(0.0)), _constant(0.0), x)

    return f32x16(f32x16), codegen


@intrinsic
def sign(typing_context, vector):
    """-1.0 where the lane is < 0, NaN where it is NaN, else 1.0."""

    def codegen(context, builder, signature, arguments):
        (x,) = arguments
        held = builder.select(builder.fcmp_unordered("uno", x, x), x, _constant(1.0))
        return builder.select(builder.fcmp_ordered("<", x, _constant(0.0)), _constant(-1.0), held)

    return f32x16(f32x16), codegen


@intrinsic
def positive_mask(typing_context, vector):
    """1.0 where the lane is > 0, else 0.0."""

    def codegen(context, builder, signature, arguments):
        (x,) = arguments
        return builder.select(builder.fcmp_ordered(">", x, _constant(0.0)), _constant(1.0), _constant(0.0))

    return f32x16(f32x16), codegen


@intrinsic
def signed_by_bits(typing_context, magnitude, bits):
    """Lane l is +magnitude[l] where bit l of `bits` (uint16) is set, -magnitude[l] elsewhere."""

    def codegen(context, builder, signature, arguments):
        vector, word = arguments
        mask = builder.bitcast(word, _MASK)
        return builder.select(mask, vector, builder.fneg(vector))

    return f32x16(f32x16, types.uint16), codegen


@intrinsic
def signed_by_words(typing_context, magnitude, words, offset, bit):
    """Lane l is +magnitude[l] where bit `bit` of words.flat[offset + l] (uint32) is set, -magnitude[l] elsewhere."""
    if not (isinstance(words, types.Array) and words.dtype == types.uint32 and words.layout == "C"):
        return None

    def codegen(context, builder, signature, arguments):
        vector, array, position, index = arguments
        pointer = _pointer(context, builder, signature.args[1], array, position, _VI)
        loaded = builder.load(pointer, align=4)
        chosen = builder.shl(ir.Constant(_I32, 1), builder.trunc(index, _I32))
        mask = builder.icmp_unsigned("!=", builder.and_(loaded, _splat(builder, chosen, _VI)), _int_constant(0))
        return builder.select(mask, vector, builder.fneg(vector))

    return f32x16(f32x16, words, types.intp, types.intp), codegen


@intrinsic
def sum_lanes(typing_context, vector):
    """Sum of the lanes in a fixed tree order, float32."""

    def codegen(context, builder, signature, arguments):
        (total,) = arguments
        width = LANES // 2
        while width:
            order = [ir.Constant(_I32, lane + width if lane < width else lane) for lane in range(LANES)]
            swapped = builder.shuffle_vector(total, ir.Constant(_VF, ir.Undefined), ir.Constant(_VI, order))
            total = builder.fadd(total, swapped)
            width //= 2
        return builder.extract_element(total, ir.Constant(_I32, 0))

    return types.float32(f32x16), codegen


def _shuffle(builder, first, second, order):
    lanes = ir.Constant(_VI, [ir.Constant(_I32, lane) for lane in order])
    return builder.shuffle_vector(first, second, lanes)


@intrinsic
def swap_halves(typing_context, vector):
    """Lanes 8..15 followed by lanes 0..7."""

    def codegen(context, builder, signature, arguments):
        return _shuffle(builder, arguments[0], arguments[0], [(lane + 8) % LANES for lane in range(LANES)])

    return f32x16(f32x16), codegen


@intrinsic
def sum_eight(typing_context, v0, v1, v2, v3, v4, v5, v6, v7):
    """Lanes l and 8 + l are the sum of the lanes of the l-th argument, in a fixed tree order."""

    def codegen(context, builder, signature, arguments):
        def halve(first, second, width):
            # within runs of 2 * width lanes, add the halves of `first` and of `second` and lay them side by side
            runs = range(0, LANES, 2 * width)
            low = [base + lane for base in runs for lane in range(width)]
            high = [base + width + lane for base in runs for lane in range(width)]
            interleaved = []
            for run in range(len(low) // width):
                part = slice(run * width, (run + 1) * width)
                interleaved.append((low[part], high[part]))
            left = [lane for a, _ in interleaved for lane in (*a, *(LANES + i for i in a))]
            right = [lane for _, b in interleaved for lane in (*b, *(LANES + i for i in b))]
            return builder.fadd(_shuffle(builder, first, second, left), _shuffle(builder, first, second, right))

        fours = [halve(arguments[i], arguments[i + 4], 4) for i in range(4)]
        twos = [halve(fours[i], fours[i + 2], 2) for i in range(2)]
        ones = halve(twos[0], twos[1], 1)
        return builder.fadd(ones, _shuffle(builder, ones, ones, [(lane + 8) % LANES for lane in range(LANES)]))

    return f32x16(*[f32x16] * 8), codegen


def _polynomial(builder, fused, x, coefficients):
    result = _constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = builder.call(fused, [result, x, _constant(coefficient)])
    return result


def _emit_exp_of_negative(builder, x):
    """exp(x) for x <= 0: x = n ln 2 + r, |r| <= ln 2 / 2, Taylor to r^6 (truncation 1.3e-8 relative), times 2^n."""
    fused = _llvm(builder, "fma", 3)
    nearest = _llvm(builder, "rint", 1)
    floor_at = _constant(-87.0)
    x = builder.select(builder.fcmp_ordered("<", x, floor_at), floor_at, x)
    power = builder.call(nearest, [builder.fmul(x, _constant(1.4426950408889634))])
    rest = builder.call(fused, [power, _constant(-0.693359375), x])
    rest = builder.call(fused, [power, _constant(2.12194440e-4), rest])
    series = _polynomial(builder, fused, rest, [1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0])
    # the exponent field is built from an integer; a NaN lane makes it meaningless, but `series` is NaN there
    biased = builder.add(builder.fptosi(power, _VI), _int_constant(127))
    scale = builder.bitcast(builder.shl(biased, _int_constant(23)), _VF)
    return builder.fmul(series, scale)


def _emit_log(builder, x):
    """log(x) for normal x > 0: x = 2^n m, m in [sqrt(1/2), sqrt(2)), 2 artanh((m-1)/(m+1)) to the 11th power."""
    fused = _llvm(builder, "fma", 3)
    bits = builder.bitcast(x, _VI)
    # subtracting the pattern of sqrt(1/2) makes the exponent field round at sqrt(1/2) rather than at 1
    shifted = builder.sub(bits, _int_constant(0x3F3504F3))
    exponent = builder.ashr(shifted, _int_constant(23))
    mantissa = builder.bitcast(builder.sub(bits, builder.shl(exponent, _int_constant(23))), _VF)
    ratio = builder.fdiv(builder.fsub(mantissa, _constant(1.0)), builder.fadd(mantissa, _constant(1.0)))
    square = builder.fmul(ratio, ratio)
    series = _polynomial(builder, fused, square, [2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3])
    log_mantissa = builder.call(fused, [builder.fmul(ratio, square), series, builder.fadd(ratio, ratio)])
    power = builder.sitofp(exponent, _VF)
    low = builder.call(fused, [power, _constant(-2.12194440e-4), log_mantissa])
    return builder.call(fused, [power, _constant(0.693359375), low])


@intrinsic
def exp_of_negative(typing_context, vector):
    """exp(x) for x <= 0 (flushed to e^-87 below), within 2 ulp; NaN stays NaN."""

    def codegen(context, builder, signature, arguments):
        return _emit_exp_of_negative(builder, *arguments)

    return f32x16(f32x16), codegen


@intrinsic
def log(typing_context, vector):
    """log(x) for normal x > 0, within 2 ulp or 1e-7 absolute, whichever is larger.

    NaN and infinity give a meaningless finite number: add them back by a term that carries them, as `softplus` does.
    """

    def codegen(context, builder, signature, arguments):
        return _emit_log(builder, *arguments)

    return f32x16(f32x16), codegen
