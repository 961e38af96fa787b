"""Recurrent experts over windows: the seed run, and experts that start as its clones."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from colonnade.experts.config import EstimatorConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.lstm import (
    LstmBody,
    LstmConfig,
    WindowInputs,
    delta_rule,
    hidden_outputs,
    initial_embedding,
    lstm_spec,
    train_seed_body,
)
from colonnade.experts.training import train_group
from colonnade.kernels.errors import UserError
from colonnade.kernels.lstm_forward.contract import LstmShape

LENGTH = 24
CONFIG = LstmConfig(width=8, num_blocks=1)
# one kind of text an expert, and a few windows of each
TEXT = np.frombuffer(b"the cat sat. " * 40 + b"0123456789" * 52 + b"xyz xyz! yes " * 40, np.uint8)
STARTS = np.concatenate([np.arange(8) * 2 * LENGTH + first for first in (0, 520, 1040)]).astype(np.uint32)
OFFSETS, IDS = np.array([0, 8, 16, 24]), np.array([4, 9, 1])
SEED_ID = 0xFFFFFFFE


def make_spec(config=CONFIG, seed_expert=None, rate=0.01, **train):
    estimator = EstimatorConfig("spsa", 8, "sparse", 0.01, difference="central", head="same")
    optimizer = OptimizerConfig("adam", rate, "cosine", clip_norm=0.0, weight_decay=0.0)
    settings = TrainConfig(**{"steps": 60, "batch": 4, "seed": 6, **train})
    return lstm_spec(config, estimator, optimizer, settings, seed_expert)


def seed_run(**train):
    return train_seed_body(make_spec(**{"steps": 80, "batch": 8, **train}), TEXT, LENGTH, STARTS, SEED_ID, 0.03)


def flat(result):
    return np.concatenate([values.reshape(len(values), -1) for values in result.weights.values()], axis=1)


@pytest.fixture(scope="module")
def seed():
    return seed_run()


def test_the_seed_run_learns_body_and_embedding(seed):
    body, embedding, loss = seed
    start = initial_embedding(8, 6)
    spec = make_spec()
    first = LstmBody(CONFIG.shape).initial(6, SEED_ID)
    everything = STARTS.astype(np.int64)
    before = spec.loss(WindowInputs(TEXT, LENGTH, start), everything, first)
    after = spec.loss(WindowInputs(TEXT, LENGTH, embedding), everything, body)
    half = spec.loss(WindowInputs(TEXT, LENGTH, embedding), everything, first)
    assert after < before - 1.5
    assert after < half - 0.05, "the body has learnt too"
    assert abs(loss - after) < 0.3
    assert embedding.dtype == body.dtype == np.float32
    for got, expected in zip(seed_run()[:2], (body, embedding), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not np.array_equal(seed_run(steps=5)[0], seed_run(steps=5, seed=7)[0])


@pytest.mark.parametrize("head_width", [None, 16])
def test_the_heads_own_rule_is_the_derivative_of_the_decoder(head_width):
    shape = LstmShape(8, 2, head_width)
    weights, embedding = LstmBody(shape).initial(1, 2), initial_embedding(shape.embedding_width, 3)
    starts = np.array([3, 700, 1100])
    gradient, loss = delta_rule(shape, weights, embedding, TEXT, starts, LENGTH)
    y = np.empty((3, LENGTH, shape.embedding_width), np.float32)
    hidden_outputs(shape, weights, embedding, TEXT, starts, LENGTH, y)
    decoder = torch.tensor(embedding, dtype=torch.float64, requires_grad=True)
    wanted = torch.tensor(TEXT[starts[:, None] + np.arange(LENGTH)].astype(np.int64))
    expected = torch.nn.functional.cross_entropy((torch.tensor(y).double() @ decoder.T).flatten(0, 1), wanted.flatten())
    expected.backward()
    np.testing.assert_allclose(gradient, decoder.grad.numpy(), atol=1e-6)
    # and y is what the family's own forward pass computes
    inputs = WindowInputs(TEXT, LENGTH, embedding)
    losses = LstmBody(shape).losses(weights[None], inputs, starts, np.zeros(0), (0, 0, 0))
    assert losses.mean() == pytest.approx(float(expected.detach()), rel=1e-4)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_experts_are_clones_of_the_seed_under_one_frozen_head(seed):
    body, embedding, _ = seed
    kept = embedding.copy()
    spec = make_spec(seed_expert=body)
    inputs = WindowInputs(TEXT, LENGTH, embedding)
    packed, fixed = spec.initial(inputs, STARTS, OFFSETS, IDS)
    np.testing.assert_array_equal(packed, np.repeat(body[None], 3, axis=0))
    assert not fixed
    result = train_group(spec, inputs, STARTS, OFFSETS, IDS)
    assert list(result.weights) == list(CONFIG.shape.roles)
    assert "embedding" not in result.weights
    np.testing.assert_array_equal(embedding, kept)
    moved = np.abs(flat(result) - body).max(1)
    assert (moved > 1e-3).all()
    assert not np.array_equal(flat(result)[0], flat(result)[1])


def test_an_embedding_that_is_trained_starts_from_the_seeds(seed):
    body, embedding, _ = seed
    config = dataclasses.replace(CONFIG, train_embedding=True)
    start = np.concatenate([body, embedding.reshape(-1)])
    spec = make_spec(config, start, steps=5)
    own, everything = WindowInputs(TEXT, LENGTH, None), STARTS.astype(np.int64)
    frozen = make_spec().loss(WindowInputs(TEXT, LENGTH, embedding), everything, body)
    assert spec.loss(own, everything, start) == pytest.approx(frozen, rel=1e-6)
    trained = train_group(spec, own, STARTS, OFFSETS, IDS).weights["embedding"]
    assert trained.shape == (3, 256, 8)
    assert (np.abs(trained - embedding).max((1, 2)) > 1e-3).all()


def test_training_lowers_an_experts_loss_on_its_windows_most(seed):
    body, embedding, _ = seed
    spec, inputs = make_spec(seed_expert=body), WindowInputs(TEXT, LENGTH, embedding)
    trained = flat(train_group(spec, inputs, STARTS, OFFSETS, IDS))
    table = np.array(
        [
            [spec.loss(inputs, STARTS[8 * own : 8 * own + 8], weights) for own in range(3)]
            for weights in (body, *trained)
        ]
    )
    gain = table[0] - table[1:]
    assert (np.diag(gain) > 0.05).all()
    assert (gain.argmax(0) == np.arange(3)).all(), "nobody else gained as much there"


@pytest.mark.parametrize("train_embedding", [False, True])
def test_an_expert_does_not_depend_on_its_group_or_on_threads(train_embedding):
    config = dataclasses.replace(CONFIG, train_embedding=train_embedding)
    spec, inputs = make_spec(config, steps=6), WindowInputs(TEXT, LENGTH, initial_embedding(8, 0))
    whole = flat(train_group(spec, inputs, STARTS, OFFSETS, IDS))

    def alone(e):
        return flat(train_group(spec, inputs, STARTS[8 * e : 8 * e + 8], OFFSETS[:2], IDS[e : e + 1]))[0]

    for threads in (1, 3):
        with ThreadPoolExecutor(threads) as pool:
            np.testing.assert_array_equal(np.stack(list(pool.map(alone, range(3)))), whole)


def test_every_window_begins_from_nothing(seed):
    body, embedding, _ = seed
    family, starts = LstmBody(CONFIG.shape), np.array([700, 30, 30, 1100, 5])
    candidates = np.stack([body, LstmBody(CONFIG.shape).initial(0, 0)])

    def losses(text, starts):
        return family.losses(candidates, WindowInputs(text, LENGTH, embedding), starts, np.zeros(0), (0, 0, 0))

    whole = losses(TEXT, starts)
    assert whole.shape == (2, 5)
    np.testing.assert_array_equal(whole[:, 1], whole[:, 2])
    for b in range(5):
        np.testing.assert_array_equal(losses(TEXT, starts[b : b + 1])[:, 0], whole[:, b])
    np.testing.assert_array_equal(losses(TEXT, starts[::-1]), whole[:, ::-1])
    # bytes outside a window do not matter to it, those inside do
    changed = TEXT.copy()
    changed[:700] ^= 1
    changed[700 + LENGTH :] ^= 1
    np.testing.assert_array_equal(losses(changed, starts[:1]), whole[:, :1])
    changed[700 + LENGTH - 1] ^= 1
    assert (losses(changed, starts[:1]) != whole[:, :1]).all()


def test_bodies_of_ones_own_differ_by_expert_and_have_the_usual_range():
    shape = LstmShape(16, 2, train_embedding=True)
    first, second = (LstmBody(shape).initial(5, expert) for expert in (0, 1))
    np.testing.assert_array_equal(first, LstmBody(shape).initial(5, 0))
    for role, view in shape.views(first).items():
        other = shape.views(second)[role]
        if "gain" in role:
            assert (view == 1).all()
            assert (other == 1).all()
            continue
        variance = 0.25 / 16 if role == "embedding" else 1 / (3 * view.shape[0])
        assert view.var() == pytest.approx(variance, rel=0.15)
        assert not np.array_equal(view, other)
    np.testing.assert_array_equal(LstmBody(shape).dense(), shape.gain_mask())


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LstmConfig(width=0).shape, "expert.width=0: must be"),
        (lambda: LstmConfig(num_blocks=0).shape, "expert.num_blocks=0"),
        (lambda: make_spec(dataclasses.replace(CONFIG, loss_coupling="some")), "expert.loss_coupling=some: unknown"),
        (lambda: seed_run(rate=1e38), "seed_expert: its losses are not finite"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, words):
    with pytest.raises(UserError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
