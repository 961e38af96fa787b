"""The notebook API from end to end, and the model it gives."""

import numpy as np
import pytest
from colonnade.ensemble.api import ArrayClassifier, ByteModel, fit_ensemble, training_inputs
from colonnade.ensemble.layout import Layout
from colonnade.ensemble.metrics import LOG2
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.mlp import build_spec
from colonnade.experts.families.starts import class_frequencies
from colonnade.kernels.errors import UserError
from colonnade.router.relay import fit_text_relay
from colonnade.router.router import RouterConfig
from colonnade.router.sources import HELDOUT, TRAIN, digits, split_documents
from colonnade.router.strategies import AreaConfig


def make_text(size=30_000):
    rng = np.random.default_rng(0)
    words = [b"alpha", b"beta", b"gamma", b"delta", b"(x, y)", b"return", b"\n"]
    return b" ".join(words[i] for i in rng.integers(0, len(words), size // 5))


@pytest.fixture(scope="module")
def byte_model():
    return ByteModel(experts_per_area=6, areas=3, steps=120).fit(make_text())


def test_training_beats_counts_and_scores_are_distributions(byte_model):
    held = make_text()[:3000]
    bits = byte_model.score(held)
    assert bits < 1.6
    model = byte_model.model_
    every = model.text_bits(held)
    for position in (0, 1, 7, 200):
        log_p = byte_model.predict_log_proba(held[:position])
        assert np.exp(log_p).sum() == pytest.approx(1, abs=1e-6)
        assert -log_p[held[position]] / LOG2 == pytest.approx(every[position], abs=1e-5)


def test_the_same_bits_whatever_the_batch(byte_model):
    text = make_text()[:500]
    whole = byte_model.model_.text_bits(text)
    for cut in (1, 17, 400):
        np.testing.assert_array_equal(byte_model.model_.text_bits(text[:cut]), whole[:cut])
    assert len(byte_model.model_.text_bits(b"")) == 0


def test_thread_count_changes_nothing(byte_model):
    again = ByteModel(experts_per_area=6, areas=3, steps=120, threads=1).fit(make_text())
    np.testing.assert_array_equal(again.model_.mixing.weights, byte_model.model_.mixing.weights)
    text = make_text()[:500]
    np.testing.assert_array_equal(again.model_.text_bits(text), byte_model.model_.text_bits(text))


def test_samples_repeat_by_seed_and_look_like_the_text(byte_model):
    first = byte_model.sample(b"alpha beta ", 60)
    assert first == byte_model.sample(b"alpha beta ", 60)
    assert len(first) == 60
    assert set(first) <= set(make_text())
    cold = byte_model.sample(b"alpha be", 2, temperature=0.05)
    assert cold == b"ta"
    with pytest.raises(UserError, match="temperature=0"):
        byte_model.sample(b"a", 3, temperature=0)


def test_api_mistakes():
    with pytest.raises(UserError, match="call fit first"):
        ByteModel().score("x")
    with pytest.raises(UserError, match="areas=9"):
        ByteModel(areas=9).fit(make_text())
    with pytest.raises(UserError, match="too few to split"):
        ByteModel().fit("short")


def test_digits():
    corpus = digits.read(0)
    model = ArrayClassifier(experts_per_area=2, areas=4, steps=200).fit_corpus(corpus)
    held = corpus.split == HELDOUT
    assert model.score(corpus.x[held], corpus.y[held]) > 0.9
    p = model.predict_proba(corpus.x[held])
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(model.predict_log_proba(corpus.x[:1])[0], model.predict_log_proba(corpus.x[:9])[0])
    assert model.predict(corpus.x[:0]).shape == (0,)
    with pytest.raises(UserError, match=r"expected \[examples, 64\]"):
        model.predict(np.zeros((2, 3)))


def test_experts_that_cannot_be_used_are_left_out():
    corpus = split_documents("x", [("a", make_text())], 0)
    relay = fit_text_relay(corpus, 4, 5)
    areas = RouterConfig(tuple(AreaConfig(f"a{lag}", "hash", 5, lags=(lag,)) for lag in (1, 2)))
    spec = build_spec(
        ExpertConfig(hidden=16),
        EstimatorConfig(),
        OptimizerConfig(),
        TrainConfig(steps=50),
        relay.num_features,
        class_frequencies(corpus.data[corpus.positions(TRAIN)], 256),
    )
    model, _ = fit_ensemble(corpus, relay, areas, spec, "mean_logits", "tree")
    positions = corpus.positions(HELDOUT)
    targets = corpus.data[positions]
    inputs = training_inputs(corpus, relay)
    assigned = model.router.assign(corpus.data, positions)
    whole = model.opinions(inputs, positions, targets).trained
    # all experts of the second area gone: what is left is the first area alone
    object.__setattr__(model, "layout", Layout(spec.shape, model.layout.first_expert, 128, frozenset(range(5, 10))))
    left = model.opinions(inputs, positions, targets).trained
    np.testing.assert_array_equal(left[:, 0], whole[:, 0])
    np.testing.assert_array_equal(left[:, 1], whole[:, 0])
    # one expert gone: only the inputs that it got change
    object.__setattr__(model, "layout", Layout(spec.shape, model.layout.first_expert, 128, frozenset([7])))
    left = model.opinions(inputs, positions, targets).trained
    touched = (assigned == 7).any(1)
    assert touched.any()
    np.testing.assert_array_equal(left[~touched], whole[~touched])
    np.testing.assert_array_equal(left[touched][:, 1], whole[touched][:, 0])
    # nobody left: the class frequencies answer
    object.__setattr__(model, "layout", Layout(spec.shape, model.layout.first_expert, 128, frozenset(range(10))))
    log_p = model.next_log_proba(b"alpha")
    np.testing.assert_allclose(np.exp(log_p), spec.frequencies, rtol=1e-4)
