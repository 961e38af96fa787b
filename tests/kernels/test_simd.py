import numba
import numpy as np
from colonnade.kernels import simd


def _apply(function):
    @numba.njit
    def run(values, out):
        for i in range(0, values.size, 16):
            simd.store(out, i, function(simd.load(values, i)))

    def call(values):
        padded = np.zeros(-(-len(values) // 16) * 16, np.float32)
        padded[: len(values)] = values
        out = np.empty_like(padded)
        run(padded, out)
        return out[: len(values)]

    return call


exp_of_negative = _apply(simd.exp_of_negative)
log = _apply(simd.log)
relu = _apply(simd.relu)
swap_halves = _apply(simd.swap_halves)
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3e38, -3e38], np.float32)


def test_exp_within_two_ulp():
    x = -np.random.default_rng().uniform(0, 87, 100_000).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(exp_of_negative(x) - expected) / expected) < 2 * 2**-23


def test_exp_of_very_negative_is_tiny_and_nan_stays():
    got = exp_of_negative(np.array([-1e4, -np.inf, np.nan, 0, -0.0], np.float32))
    assert np.all(got[:2] < 1e-37)
    assert np.isnan(got[2])
    assert got[3] == got[4] == 1


def test_log_within_two_ulp():
    rng = np.random.default_rng()
    x = np.exp(rng.uniform(-80, 80, 100_000)).astype(np.float32)
    expected = np.log(x.astype(np.float64))
    error = np.abs(log(x) - expected)
    assert np.all(error < np.maximum(2 * 2**-23 * np.abs(expected), 1e-7))


def test_relu_hands_nan_on():
    got = relu(SPECIAL)
    np.testing.assert_array_equal(got, np.where(SPECIAL < 0, 0, SPECIAL))
    assert np.isnan(got[0])


def test_swap_halves():
    x = np.arange(16, dtype=np.float32)
    np.testing.assert_array_equal(swap_halves(x), np.roll(x, 8))


def test_sums_of_lanes():
    @numba.njit
    def run(a, out):
        total = simd.sum_eight(
            simd.load(a, 0), simd.load(a, 16), simd.load(a, 32), simd.load(a, 48),
            simd.load(a, 64), simd.load(a, 80), simd.load(a, 96), simd.load(a, 112),
        )  # fmt: skip
        simd.store(out, 0, total)
        return simd.sum_lanes(simd.load(a, 0))

    a = np.random.default_rng().integers(-1000, 1000, (8, 16)).astype(np.float32)
    out = np.empty(16, np.float32)
    assert run(a, out) == a[0].sum()
    np.testing.assert_array_equal(out, np.tile(a.sum(1), 2))


def test_signs_by_bits_and_words():
    @numba.njit
    def run(words, bits, out):
        simd.store(out, 0, simd.signed_by_words(simd.splat(np.float32(2)), words, 0, 5))
        simd.store(out, 16, simd.signed_by_bits(simd.splat(np.float32(3)), bits))

    rng = np.random.default_rng()
    words = rng.integers(0, 2**32, 16, dtype=np.uint32)
    bits = np.uint16(rng.integers(0, 2**16))
    out = np.empty(32, np.float32)
    run(words, bits, out)
    np.testing.assert_array_equal(out[:16], np.where(words >> 5 & 1, 2, -2))
    np.testing.assert_array_equal(out[16:], np.where(int(bits) >> np.arange(16) & 1, 3, -3))
