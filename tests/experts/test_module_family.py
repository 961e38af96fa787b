"""Experts that are any torch module: candidates side by side, dropout, starts, answers, refusals."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.module import ModuleBody, module_spec
from colonnade.experts.training import train_group
from colonnade.kernels.errors import UserError
from colonnade.kernels.mlp_resident.contract import Inputs
from torch import nn
from torch.func import functional_call

F, V = 6, 3
RNG = np.random.default_rng(2)
INPUTS = Inputs(x=RNG.standard_normal((40, F)).astype(np.float32), y=RNG.integers(0, V, 40).astype(np.int32))
POSITIONS = np.array([3, 3, 17, 8, 39])
NOTHING = np.zeros(0, np.float32)


@pytest.fixture(autouse=True)
def one_thread():
    """No threads of torch's own, as in a worker; others take turns so often that what they share would show."""
    before, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-6)
    yield
    torch.set_num_threads(before)
    sys.setswitchinterval(interval)


class Residual(nn.Module):
    """Layers that share a matrix, a scalar parameter, a norm, and attention over the features."""

    def __init__(self, features, outputs):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.inner = nn.Linear(features, features)
        self.again = nn.Linear(features, features)
        self.again.weight = self.inner.weight
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, outputs)

    def forward(self, x):
        mixed = torch.softmax(x[:, :, None] * x[:, None], -1) @ x[:, :, None]
        return self.head(self.norm(x + self.scale * self.again(torch.tanh(self.inner(x))) + mixed[..., 0]))


def mlp(features, outputs):
    return nn.Sequential(nn.Linear(features, 8), nn.GELU(), nn.Linear(8, outputs))


def convolution(features, outputs):
    layers = nn.Unflatten(1, (1, features)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4 * features - 8, outputs))


def frozen_norm(features, outputs):
    return nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, outputs)).eval()


def dropping(features, outputs):
    return nn.Sequential(nn.Linear(features, 24), nn.Dropout(0.5), nn.Linear(24, outputs))


FACTORIES = {"mlp": mlp, "convolution": convolution, "residual": Residual, "frozen_norm": frozen_norm}


def entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def make_body(factory, loss=entropy, outputs=V):
    return ModuleBody(factory, "mine:net", F, outputs, loss)


def parameters_of(body, weights):
    """By name, cut from a flat vector in the order of the module's own parameters."""
    sizes = [int(np.prod(shape)) for shape in body.shapes.values()]
    parts = torch.from_numpy(weights).split(sizes)
    return {name: part.reshape(shape) for (name, shape), part in zip(body.shapes.items(), parts, strict=True)}


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_candidates_side_by_side_are_calls_one_by_one(name):
    body = make_body(FACTORIES[name])
    module = FACTORIES[name](F, V)
    offset = np.array([0.5, -1, 2], np.float32)
    candidates = np.stack([body.initial(1, expert) for expert in range(4)])
    assert candidates.shape == (4, sum(p.numel() for p in module.parameters()))
    losses = body.losses(candidates, INPUTS, POSITIONS, offset, (0, 0, 0))
    x, y = torch.from_numpy(INPUTS.x[POSITIONS]), torch.from_numpy(INPUTS.y[POSITIONS]).long()
    expected = []
    for weights in candidates:
        with torch.no_grad():
            outputs = functional_call(module, parameters_of(body, weights), (x,)) + torch.from_numpy(offset)
        np.testing.assert_allclose(body.predict(weights, x.numpy(), offset), outputs.numpy(), rtol=1e-5, atol=1e-6)
        expected.append(entropy(outputs, y).numpy())
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    assert losses.shape == (4, 5)
    assert np.ptp(losses, axis=0).min() > 1e-3


def masks(outputs, targets):
    """Which of 20 outputs are not dropped, as a number."""
    return (outputs != 0).float() @ 2.0 ** torch.arange(20)


def test_both_ends_of_a_pair_drop_the_same_and_steps_and_experts_do_not():
    body = make_body(lambda f, v: nn.Sequential(nn.Linear(f, v), nn.Dropout(0.5)), masks, 20)
    point, reach = body.initial(0, 0), np.float32(0.1)
    ends = np.stack([point + reach, point - reach, 2 * point])

    def dropped(*draw):
        return body.losses(ends, INPUTS, POSITIONS, NOTHING, draw)

    first = dropped(3, 0, 0)
    np.testing.assert_array_equal(first, np.broadcast_to(first[0], first.shape))
    assert len(set(first[0])) == 5, "a mask for every example, also where one comes twice"
    np.testing.assert_array_equal(dropped(3, 0, 0), first)
    others = [dropped(*draw)[0] for draw in ((3, 1, 0), (3, 0, 1), (4, 0, 0), (3, 1, 1))]
    assert len({tuple(found) for found in [first[0], *others]}) == 5
    kept = np.mean([bin(int(found)).count("1") for row in (first[0], *others) for found in row]) / 20
    assert 0.4 < kept < 0.6


def test_answers_are_without_dropout_and_do_not_depend_on_batches_or_threads():
    body = make_body(dropping)
    weights, offset = body.initial(0, 7), np.array([1, 2, 3], np.float32)
    whole = body.predict(weights, INPUTS.x, offset)
    still = dropping(F, V).eval()
    with torch.no_grad():
        expected = functional_call(still, parameters_of(body, weights), (torch.from_numpy(INPUTS.x),)).numpy()
    np.testing.assert_allclose(whole, expected + offset, rtol=1e-5, atol=1e-6)
    assert whole.dtype == np.float32
    for cut in (slice(0, 1), slice(5, 12), slice(39, 40), slice(0, 0)):
        np.testing.assert_array_equal(body.predict(weights, INPUTS.x[cut], offset), whole[cut])
    others = np.stack([body.initial(0, expert) for expert in range(12)])
    alone = [body.predict(own, INPUTS.x, offset) for own in others]
    with ThreadPoolExecutor(4) as pool:
        # training beside it changes nothing either
        training = pool.submit(body.losses, others, INPUTS, POSITIONS, NOTHING, (0, 0, 0))
        found = list(pool.map(lambda own: body.predict(own, INPUTS.x, offset), others))
    np.testing.assert_array_equal(found, alone)
    np.testing.assert_array_equal(training.result(), body.losses(others, INPUTS, POSITIONS, NOTHING, (0, 0, 0)))


def test_starts_are_named_by_seed_and_expert_and_leave_torchs_generator_alone():
    body = make_body(dropping)
    before = torch.get_rng_state()
    first = body.initial(1, 5)
    body.losses(first[None], INPUTS, POSITIONS, NOTHING, (0, 0, 0))
    body.predict(first, INPUTS.x, np.zeros(V, np.float32))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    np.testing.assert_array_equal(body.initial(1, 5), first)
    np.testing.assert_array_equal(make_body(dropping).initial(1, 5), first)
    assert first.dtype == np.float32
    for seed, expert in ((1, 6), (2, 5), (5, 1)):
        assert (body.initial(seed, expert) != first).all()
    # the module's own range
    assert np.abs(first[: 24 * F]).max() <= 1 / np.sqrt(F)


@pytest.mark.parametrize("head", ["softmax", "regression"])
def test_trained_experts_do_not_depend_on_their_group_and_learn(head):
    inputs = INPUTS
    if head == "regression":
        inputs = Inputs(x=INPUTS.x, y=INPUTS.x[:, :V] * 2 + 1)
    expert = ExpertConfig(head, num_outputs=V, family="module")
    estimator = EstimatorConfig("spsa", 8, "signs", 0.01, difference="central", head="same")
    optimizer = OptimizerConfig("adam", 0.02, clip_norm=0.0)
    train, means = TrainConfig(40, 10, 1), np.full(V, 1 / V)
    spec = module_spec(dropping, "mine:net", expert, estimator, optimizer, train, F, means)
    indices, offsets, ids = np.arange(40).astype(np.uint32), np.array([0, 15, 15, 40]), np.array([3, 4, 8])
    whole = train_group(spec, inputs, indices, offsets, ids)

    def alone(e):
        own = indices[offsets[e] : offsets[e + 1]]
        return train_group(spec, inputs, own, np.array([0, len(own)]), ids[e : e + 1])

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(alone, range(3)))
    for role, values in whole.weights.items():
        np.testing.assert_array_equal(np.concatenate([part.weights[role] for part in parts]), values)
    start, fixed = spec.initial(inputs, indices, offsets, ids)
    np.testing.assert_array_equal(whole.weights["b0"], fixed["b0"])
    packed = spec.body.shape(head).pack(whole.weights)
    for e in (0, 2):
        own = np.arange(offsets[e], offsets[e + 1])
        before, after = (spec.loss(inputs, own, weights[e], fixed["b0"][e]) for weights in (start, packed))
        assert after < before


class OwnGenerator(nn.Linear):
    """Adds noise from a generator that it holds."""

    def forward(self, x):
        if not hasattr(self, "own"):
            self.own = torch.Generator().manual_seed(0)
        return super().forward(x) + torch.rand(x.shape[0], self.out_features, generator=self.own)


class NumpyNoise(nn.Linear):
    """Adds a number from NumPy's generator."""

    noise = np.random.default_rng(0)

    def forward(self, x):
        return super().forward(x) + float(self.noise.random())


class Branching(nn.Linear):
    """Looks at a value, which no batch of candidates can."""

    def forward(self, x):
        found = super().forward(x)
        return found if found.sum() > 0 else -found


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda f, v: nn.Sequential(nn.Linear(f, v), nn.Flatten(0)), r"gives shape \(9,\) for 3 examples, expected"),
        (lambda f, v: nn.Linear(f, v + 1), r"gives shape \(3, 4\) for 3 examples, expected \(3, 3\)"),
        (lambda f, v: nn.GRU(f, v), r"gives shape \(\) for 3 examples"),
        (lambda f, v: nn.Sequential(nn.BatchNorm1d(f), nn.Linear(f, v)), "changes its buffer 0.running_mean"),
        (OwnGenerator, "generator of its own"),
        (NumpyNoise, "generator of its own"),
        (Branching, "cannot be batched by torch.func"),
        (lambda f, v: nn.Linear(f + 1, v), "fails on"),
        (lambda f, v: nn.Flatten(), "has no parameters"),
        (lambda f, v: len, "gives builtin_function_or_method, expected a torch.nn.Module"),
        (lambda f, v: nn.Linear, "gives type, expected a torch.nn.Module"),
        (lambda f, v: [][f], r"fails for 6 features and 3 outputs \(list index out of range\)"),
    ],
    ids=["flat", "outputs", "tuple", "batch norm", "generator", "numpy", "branch", "features", "empty", "function",
         "class", "factory"],
)  # fmt: skip
def test_what_cannot_be_an_expert_is_refused_in_one_line(factory, words):
    with pytest.raises(UserError, match=words) as caught:
        make_body(factory)
    assert str(caught.value).startswith("expert.module=mine:net: ")
    assert "\n" not in str(caught.value)
