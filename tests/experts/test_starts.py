import numpy as np
import pytest
from colonnade.experts.families import starts
from colonnade.kernels.mlp_resident.contract import HEAD_SOFTMAX, HEAD_TREE, MlpShape, tree_rows, tree_signs
from hypothesis import given
from hypothesis import strategies as st


def tree_probabilities(logits, depth):
    """Leaf probabilities, by walking every path."""
    rows, signs = tree_rows(np.arange(1 << depth), depth), tree_signs(np.arange(1 << depth), depth)
    return np.prod(1 / (1 + np.exp(-signs * logits[rows])), axis=1)


@given(st.integers(1, 6), st.floats(0.1, 20), st.randoms(use_true_random=False))
def test_tree_biases_are_the_smoothed_counts_at_every_node(depth, strength, random):
    outputs = 1 << depth
    counts = np.array([[random.randrange(5) for _ in range(outputs)]])
    frequencies = starts.class_frequencies(np.arange(outputs), outputs)
    shape = MlpShape(4, 3, outputs, HEAD_TREE)
    biases = starts.count_biases(shape, counts, frequencies, strength)[0].astype(np.float64)
    for row in range(outputs - 1):
        level = (row + 1).bit_length() - 1
        span = outputs >> (level + 1)
        first = (row + 1 - (1 << level)) * 2 * span
        left = slice(first, first + span)
        right = slice(first + span, first + 2 * span)
        share = frequencies[right].sum() / (frequencies[left].sum() + frequencies[right].sum())
        expected = (counts[0, right].sum() + strength * share) / (
            counts[0, left].sum() + counts[0, right].sum() + strength
        )
        assert 1 / (1 + np.exp(-biases[row])) == pytest.approx(expected, rel=1e-5)


def test_without_counts_a_tree_predicts_the_frequencies():
    frequencies = starts.class_frequencies(np.random.default_rng().integers(0, 32, 500), 32)
    shape = MlpShape(4, 3, 32, HEAD_TREE)
    biases = starts.count_biases(shape, np.zeros((1, 32)), frequencies, 2.0)[0]
    np.testing.assert_allclose(tree_probabilities(biases.astype(np.float64), 5), frequencies, rtol=1e-5)


def test_softmax_biases_are_log_smoothed_frequencies():
    counts = np.array([[3, 0, 5], [0, 0, 0]])
    frequencies = np.array([0.5, 0.25, 0.25])
    got = starts.count_biases(MlpShape(4, 3, 3, HEAD_SOFTMAX), counts, frequencies, 2.0)
    np.testing.assert_allclose(np.exp(got[0]), np.array([4, 0.5, 5.5]) / 10, rtol=1e-6)
    np.testing.assert_allclose(np.exp(got[1]), frequencies, rtol=1e-6)


def test_initial_body_depends_on_seed_and_expert_alone():
    shape = MlpShape(60, 32, 256, HEAD_TREE)
    first = starts.initial_body(shape, 1, 7)
    np.testing.assert_array_equal(first, starts.initial_body(shape, 1, 7))
    assert not np.array_equal(first, starts.initial_body(shape, 1, 8))
    assert not np.array_equal(first, starts.initial_body(shape, 2, 7))
    assert first.var() == pytest.approx(2 / 60, rel=0.1)
