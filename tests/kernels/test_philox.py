import numba
import numpy as np
import pytest
from colonnade.kernels.mlp_resident.contract import LAYER_ALL, LAYER_BODY
from colonnade.kernels.philox import reference as philox
from colonnade.kernels.philox.numba import philox4x32
from hypothesis import given
from hypothesis import strategies as st

# known answers of the Random123 distribution (kat_vectors, philox4x32 10)
PUBLISHED = [
    ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@numba.njit
def _numba_words(counter, key):
    out = np.empty_like(counter)
    for i in range(len(counter)):
        a, b, c, d = philox4x32(counter[i, 0], counter[i, 1], counter[i, 2], counter[i, 3], key[0], key[1])
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = a, b, c, d
    return out


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors(counter, key, expected):
    counter = np.array([counter], np.uint32)
    assert philox.philox4x32(counter, key).tolist() == [expected]
    assert _numba_words(counter, np.array(key, np.uint32)).tolist() == [expected]


def test_numba_gives_the_reference_words():
    rng = np.random.default_rng()
    counter = rng.integers(0, 2**32, (1000, 4), dtype=np.uint32)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    expected = philox.philox4x32(counter, (int(key[0]), int(key[1])))
    np.testing.assert_array_equal(_numba_words(counter, key), expected)


fields = st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 65535))


@given(fields, fields)
def test_packing_is_injective(first, second):
    assert (philox.pack_draw(*first) == philox.pack_draw(*second)) == (first == second)
    assert 0 <= philox.pack_draw(*first) < 2**32


@pytest.mark.parametrize("bad", [(256, 0, 0), (0, 256, 0), (0, 0, 65536), (-1, 0, 0)])
def test_fields_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="must fit"):
        philox.pack_draw(*bad)


def test_no_two_draws_of_a_run_share_a_counter():
    # every draw of a small run, with the blocks that each takes
    experts, steps, batch, pairs, packed, body = 3, 4, 64, 8, 10_592, 2_048
    counters = []

    def draw(word, step, expert, blocks):
        counters.extend((block, word, step, expert) for block in range(blocks))

    for expert in range(experts):
        draw(philox.pack_draw(philox.PURPOSE_INIT, LAYER_BODY), 0, expert, body // 4)
        for step in range(steps):
            draw(philox.pack_draw(philox.PURPOSE_BATCH), step, expert, batch // 4)
            for pair in range(pairs):
                draw(philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_BODY, pair), step, expert, batch // 4)
                draw(philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_ALL, pair), step, expert, -(-packed // 128))
    for purpose in (philox.PURPOSE_ROUTER, philox.PURPOSE_BOOTSTRAP, philox.PURPOSE_SAMPLE):
        for step in range(steps):
            draw(philox.pack_draw(purpose), step, philox.WHOLE_RUN, 16)
    assert len(set(counters)) == len(counters)


def test_signs_and_floats_come_from_the_words_as_documented():
    drawn = philox.words(7, philox.pack_draw(2), 3, 4, 8)
    signs = philox.signs(7, philox.pack_draw(2), 3, 4, 256)
    expected = [1 if int(drawn[i // 32]) >> (i % 32) & 1 else -1 for i in range(256)]
    assert signs.tolist() == expected
    floats = philox.uniform_floats(7, philox.pack_draw(2), 3, 4, 8)
    assert floats.tolist() == [(int(word) >> 8) / 2**23 - 1 for word in drawn]
    ints = philox.uniform_ints(7, philox.pack_draw(2), 3, 4, 8, 1000)
    assert ints.tolist() == [int(word) * 1000 >> 32 for word in drawn]


def test_words_look_uniform():
    drawn = philox.words(123, philox.pack_draw(5), 0, philox.WHOLE_RUN, 1 << 16)
    ones = np.unpackbits(drawn.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(32 * drawn.size)
    halves = np.bincount(drawn >> 24, minlength=256)
    chi_square = ((halves - drawn.size / 256) ** 2 / (drawn.size / 256)).sum()
    assert chi_square < 255 + 6 * np.sqrt(2 * 255)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match="between 0 and"):
        philox.split_seed(seed)
