"""Mixtures of experts over windows, against a slow computation in float64."""

import numpy as np
import pytest
from colonnade.ensemble.windows import mean_probability, score_windows
from colonnade.kernels.lstm_forward import reference
from colonnade.kernels.lstm_forward.contract import LstmShape
from colonnade.router.sources import TRAIN, TextCorpus
from colonnade.router.windows.router import WindowRouter

LENGTH, PREFIX = 40, 16
SHAPES = [LstmShape(8, 1), LstmShape(8, 1, head_width=16), LstmShape(8, 1, train_embedding=True)]


def draw_experts(shape, count=5):
    """Weights with logits of order one and the shared embedding, if there is one."""
    rng = np.random.default_rng(4)
    weights = np.zeros((count, shape.num_parameters), np.float32)
    for role, view in shape.views(weights).items():
        noise = rng.standard_normal(view.shape)
        view[...] = 1 + 0.3 * noise if "gain" in role else 1.5 * noise / np.sqrt(view.shape[-2])
    table = rng.standard_normal((256, shape.embedding_width)).astype(np.float32)
    return weights, None if shape.train_embedding else table


def topics():
    """Documents of three topics, a word list each."""
    rng = np.random.default_rng(0)
    words = [[f"{letter}{a}{b}w" for a in "klmno" for b in "klmno"] for letter in "abc"]
    texts = [" ".join(rng.choice(words[i % 3], 80)).encode() for i in range(24)]
    return TextCorpus.from_documents("topics", [(str(i), text, TRAIN) for i, text in enumerate(texts)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mean_of_the_nearest_is_that_of_a_slow_computation(shape):
    weights, embedding = draw_experts(shape)
    rng = np.random.default_rng(1)
    text = rng.integers(0, 256, 300).astype(np.uint8)
    # more windows than an expert is given at once
    starts = rng.integers(0, 300 - 12, 150)
    experts = np.stack([rng.permutation(5)[:3] for _ in starts])
    experts[:140, 0], experts[:140, 1:] = 2, [4, 0]
    got = score_windows(shape, lambda expert: weights[expert], embedding, text, starts, 12, 5, experts)
    assert got.dtype == np.float32
    assert got.shape == (150, 7, 3)
    every = np.stack(
        [reference.window_log_proba(shape, w, embedding, text, starts, 12)[0] for w in weights.astype(np.float64)]
    )
    for k in (1, 2, 3):
        expected = np.empty((150, 7))
        for i in range(150):
            for t in range(7):
                chances = [np.exp(every[experts[i, rank], i, 5 + t]) for rank in range(k)]
                expected[i, t] = np.log(sum(chances) / k)
        np.testing.assert_allclose(mean_probability(got, k), expected, rtol=2e-4, atol=2e-4)
    assert np.abs(mean_probability(got, 1) - mean_probability(got, 3)).max() > 0.1


def test_a_score_depends_on_its_window_and_expert_alone():
    shape = SHAPES[0]
    weights, embedding = draw_experts(shape)
    rng = np.random.default_rng(2)
    text = rng.integers(0, 256, 300).astype(np.uint8)
    starts = rng.integers(0, 300 - LENGTH, 20)
    experts = np.stack([rng.permutation(5)[:3] for _ in starts])

    def scores(rows, ranks):
        return score_windows(
            shape, weights.__getitem__, embedding, text, starts[rows], LENGTH, PREFIX, experts[rows][:, ranks]
        )

    whole = scores(slice(None), slice(None))
    for i in range(20):
        np.testing.assert_array_equal(scores([i], [2, 0])[0], whole[i][:, [2, 0]])


def test_the_mean_does_not_underflow():
    log_proba = np.array([[[-2000.0, -2001.0, -5.0]]], np.float32)
    assert mean_probability(log_proba, 2).item() == pytest.approx(-2000 + np.log((1 + np.exp(-1)) / 2), abs=1e-9)
    assert mean_probability(log_proba, 1).item() == -2000
    assert mean_probability(log_proba, 3).item() == pytest.approx(-5 - np.log(3), abs=1e-9)


def test_a_window_is_routed_by_its_prefix_alone():
    corpus = topics()
    router, starts, assigned = WindowRouter.fit(corpus, LENGTH, PREFIX, 3, 3, 1.0, 0)
    shape = SHAPES[0]
    weights, embedding = draw_experts(shape, 3)

    def mixture(text):
        """As an evaluation does: the prefix names two experts, whose mean the rest is scored under."""
        ids, cosines = router.assign([text[s : s + LENGTH].tobytes() for s in starts], 2)
        shown, _ = router.assign([text[s : s + PREFIX].tobytes() for s in starts], 2)
        np.testing.assert_array_equal(shown, ids)
        scores = score_windows(shape, weights.__getitem__, embedding, text, starts, LENGTH, PREFIX, ids)
        return ids, cosines, mean_probability(scores, 2)

    ids, cosines, log_p = mixture(corpus.data)
    assert (ids[:, 0] == assigned).mean() > 0.8, "chance is 1 in 3"
    behind = np.array(corpus.data)
    other = np.roll(assigned, 1)
    for start, cluster in zip(starts, other, strict=True):
        source = starts[assigned == cluster][0]
        behind[start + PREFIX + 4 : start + LENGTH] = corpus.data[source + PREFIX + 4 : source + LENGTH]
    changed = mixture(behind)
    np.testing.assert_array_equal(changed[0], ids)
    np.testing.assert_array_equal(changed[1], cosines)
    # nor does a byte's probability know what follows it
    np.testing.assert_array_equal(changed[2][:, :4], log_p[:, :4])
    assert (changed[2] != log_p).any()
    before = np.array(corpus.data)
    for start, cluster in zip(starts, other, strict=True):
        source = starts[assigned == cluster][0]
        before[start : start + PREFIX] = corpus.data[source : source + PREFIX]
    moved = mixture(before)[0][:, 0] != ids[:, 0]
    assert (moved == (other != assigned)).mean() > 0.7
