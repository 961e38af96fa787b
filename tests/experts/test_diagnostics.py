"""Looks at the estimates against torch's gradient and the theory, costs by hand, rates in closed form."""

import math

import numpy as np
import pytest
import torch
from colonnade.experts.config import RULES, EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from colonnade.experts.costs import multiply_adds
from colonnade.experts.diagnostics import diagnose
from colonnade.experts.families.general import general_spec
from colonnade.experts.families.mlp import build_spec
from colonnade.experts.schedules import learning_rates
from colonnade.experts.training import advance_group, start_group
from colonnade.kernels.mlp_resident import contract as c
from colonnade.kernels.mlp_resident.directions import flat_direction
from colonnade.kernels.philox import reference as philox
from scipy.special import gammaln

F, H, V, BATCH, STEP, EXPERT = 4, 6, 3, 3, 7, 11
OWN = np.arange(5, 25)
ROLES = ("w1", "b1", "w2", "b2")


def make_spec(hidden=H, optimizer=None, batch=BATCH, features=F, expert=None, **estimator):
    config = ExpertConfig(**{"head": "softmax", "hidden": hidden, "num_outputs": V, **(expert or {})})
    rule = EstimatorConfig(**{"directions": RULES[estimator.get("name", "activation")].directions[0], **estimator})
    frequencies = np.full(config.num_outputs, 1 / config.num_outputs)
    settings = TrainConfig(steps=10, batch=batch, seed=5)
    return build_spec(config, rule, optimizer or OptimizerConfig(), settings, features, frequencies)


class Problem:
    """Random weights and inputs of a spec, the batch of a step, and torch's gradient on it."""

    def __init__(self, hidden=H, movable=False, batch=BATCH):
        rng = np.random.default_rng(3)
        self.inputs = c.Inputs(
            x=rng.standard_normal((30, F)).astype(np.float32), y=rng.integers(0, V, 30).astype(np.int32)
        )
        shape = make_spec(hidden).shape
        weights = {role: rng.standard_normal((1, *size)).astype(np.float32) for role, size in shape.roles.items()}
        if movable:
            weights["b1"] += 20
        self.packed = shape.pack(weights)[0]
        self.weights = {role: values[0].astype(np.float64) for role, values in weights.items()}
        word = philox.pack_draw(philox.PURPOSE_BATCH)
        self.chosen = OWN[philox.uniform_ints(5, word, STEP, EXPERT, batch, len(OWN))]

    def loss(self, weights, chosen):
        x = torch.tensor(self.inputs.x[chosen]).double()
        y = torch.tensor(self.inputs.y[chosen]).long()
        w = {role: torch.as_tensor(values) for role, values in weights.items()}
        hidden = torch.relu(x @ w["w1"] + w["b1"])
        return torch.nn.functional.cross_entropy(hidden @ w["w2"].T + w["b2"], y)

    def gradient(self, roles, chosen=None):
        leaves = {role: torch.tensor(values, requires_grad=True) for role, values in self.weights.items()}
        self.loss(leaves, self.chosen if chosen is None else chosen).backward()
        return np.concatenate([leaves[role].grad.numpy().reshape(-1) for role in roles])

    def look(self, spec, draws):
        return diagnose(spec.shape, spec.recipe, self.inputs, OWN, EXPERT, self.packed, STEP, draws)


@pytest.mark.parametrize("probes", [1, 8])
@pytest.mark.parametrize(("kind", "extra"), [("signs", -1), ("gaussian", 1), ("sparse", -2 + 1 / 0.25)])
def test_variance_of_weight_estimates_is_that_of_the_theory(kind, extra, probes):
    problem = Problem()
    spec = make_spec(name="spsa", directions=kind, density=0.25, num_perturbations=probes, perturbation_size=1e-5,
                     difference="central", head="same")  # fmt: skip
    found = problem.look(spec, 16000 // probes)
    d = F * H + H + V * H + V
    assert (found["expert"], found["step"], found["parameters"]) == (EXPERT, STEP, d)
    assert found["theory"] == pytest.approx((d + extra) / probes, rel=1e-9)
    assert found["relative_variance"] == pytest.approx(found["theory"], rel=0.05)
    # the cosine of random directions that follow the same rule, from another generator
    rng = np.random.default_rng(0)
    z = rng.standard_normal((16000 // probes, probes, d))
    if kind != "gaussian":
        z = np.sign(z) * (rng.random(z.shape) < (0.25 if kind == "sparse" else 1))
    g = problem.gradient(ROLES)
    estimates = ((z @ g)[..., None] * z).mean(1)
    lengths = np.maximum(np.linalg.norm(estimates, axis=1), 1e-9) * np.linalg.norm(g)
    expected = (estimates @ g / lengths).mean()
    assert found["cosine"] == pytest.approx(expected, rel=0.05)
    if kind == "gaussian" and probes == 1:
        on_a_sphere = math.exp(gammaln(d / 2) - gammaln((d + 1) / 2)) / math.sqrt(math.pi)
        assert found["cosine"] == pytest.approx(on_a_sphere, rel=0.03)


@pytest.mark.parametrize("kind", ["signs", "hadamard"])
@pytest.mark.parametrize(("hidden", "movable"), [(32, True), (32, False)], ids=["all move", "some move"])
def test_variance_of_activation_estimates_is_that_of_the_theory(kind, hidden, movable):
    problem, probes = Problem(hidden, movable, 40), 8
    spec = make_spec(hidden, batch=40, directions=kind, num_perturbations=probes, perturbation_size=1e-6)
    found = problem.look(spec, 800)
    total = 0.0
    for i in problem.chosen:
        units = int((problem.inputs.x[i] @ problem.weights["w1"] + problem.weights["b1"] > 0).sum())
        assert (units == hidden) == movable
        own = problem.gradient(("w1", "b1"), [i])
        noise = (units - 1) / probes if kind == "signs" else (units - 1) / 31 * (32 / probes - 1)
        total += noise * (own @ own) / 40**2
    g = problem.gradient(("w1", "b1"))
    assert found["theory"] == pytest.approx(total / (g @ g), rel=1e-6)
    # which units can move decides how far a Hadamard basis of fewer rows is from its mean
    tolerance = 0.05 if kind == "signs" or movable else 0.15
    assert found["relative_variance"] == pytest.approx(found["theory"], rel=tolerance)
    assert found["parameters"] == (F + 1) * hidden
    assert found["difference"] is None


def test_a_whole_basis_is_exact():
    spec = make_spec(20, directions="hadamard", num_perturbations=32, perturbation_size=1e-6)
    found = Problem(20).look(spec, 5)
    assert found["cosine"] == pytest.approx(1, abs=1e-6)
    assert found["relative_variance"] < 1e-6
    assert found["theory"] == 0


def test_the_difference_between_the_ends_is_that_of_the_directions():
    problem = Problem()
    names = {"name": "spsa", "num_perturbations": 6, "perturbation_size": 0.05, "head": "same"}
    spec = make_spec(difference="central", **names)
    apart = []
    for j in range(6):
        z = spec.shape.views(flat_direction(c.SIGNS, 1, 5, STEP, EXPERT, j, spec.shape.packed_size))
        ends = [{role: problem.weights[role] + e * z[role] for role in ROLES} for e in (0.05, -0.05)]
        plus, minus = (float(problem.loss(end, problem.chosen)) for end in ends)
        apart.append(abs(plus - minus))
    assert problem.look(spec, 2)["difference"] == pytest.approx(np.mean(apart), rel=1e-9)
    assert problem.look(make_spec(difference="one_sided", **names), 2)["difference"] is None


def test_what_cannot_be_looked_at_is_left_out():
    problem = Problem()
    weights = {"name": "spsa", "difference": "central", "head": "same"}
    assert problem.look(make_spec(name="backprop"), 2) is None
    assert problem.look(make_spec(name="delta", head="delta"), 2) is None
    assert problem.look(make_spec(expert={"loss": "zero_one"}, **weights), 2) is None
    assert problem.look(make_spec(fitness="ranks", **weights), 2)["theory"] is None
    assert problem.look(make_spec(directions="sparse", rescale=False, **weights), 2)["theory"] is None
    problem.packed[:] = 0
    assert problem.look(make_spec(), 2) is None, "a silent head hands nothing down"


# F = 4, H = 6, V = 3, B = 5: a forward D = 5 (24 + 18) = 210, T = 51, head 5 * 18 = 90
SOFTMAX = {"batch": 5}
# F = 7, H = 10, a tree of 3 decisions over 8 bytes, B = 2: D = 2 (70 + 30) = 200, T = 157, head 60
TREE = {"batch": 2, "hidden": 10, "features": 7, "expert": {"head": "tree", "num_outputs": 8}}
# the same with 16 numbers of memory a decision: D = 296, T = 205, head and memory 156
MEMORY = {**TREE, "expert": {**TREE["expert"], "memory": True}}
CENTRAL = {"difference": "central", "head": "same"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (make_spec(**SOFTMAX, name="spsa", num_perturbations=2, **CENTRAL), 210 + 2 * (2 * (210 + 51) + 51)),
        (make_spec(**MEMORY, name="spsa", num_perturbations=3, difference="central", head="delta"),
         296 + 3 * (2 * (296 + 80) + 80) + 156),
        (make_spec(**SOFTMAX, name="fzoo", num_perturbations=3, fitness="std", head="same"), 210 + 3 * (210 + 2 * 51)),
        (make_spec(**MEMORY, name="fzoo", num_perturbations=2, fitness="std", head="same"), 296 + 2 * (296 + 2 * 205)),
        # x A once: B r F; at an end B r (H + K + H) more than the head; an update of r T
        (make_spec(**SOFTMAX, name="lowrank", num_perturbations=2, **CENTRAL),
         210 + 2 * (5 * 4 + 2 * (5 * (6 + 3 + 6) + 90) + 51)),
        (make_spec(**TREE, name="lowrank", num_perturbations=1, rank=2, head="same"),
         200 + 2 * 2 * 7 + 2 * 2 * (10 + 3 + 10) + 60 + 2 * 157),
        (make_spec(**SOFTMAX, name="agzo", num_perturbations=2, rank=2, **CENTRAL), 210 + 2 * (2 * (210 + 51) + 51)),
        (make_spec(**TREE, name="agzo", num_perturbations=1, head="same"), 200 + (200 + 157) + 157),
        # the head's gradient, every probe's head and its share of d_h, dW1
        (make_spec(**SOFTMAX, num_perturbations=4), 210 + 90 + 4 * 90 + 4 * 5 * 6 + 5 * 24),
        (make_spec(**MEMORY, num_perturbations=2, difference="central", head="delta"),
         296 + 156 + 2 * 2 * 60 + 2 * 2 * 10 + 2 * 70),
        (make_spec(batch=5, expert={"train_body": False}), 210 + 90),
        (make_spec(**SOFTMAX, name="delta", head="delta"), 210 + 90),
        (make_spec(**MEMORY, name="delta", head="delta"), 296 + 156),
        # dW2, what reaches the hidden layer, dW1
        (make_spec(**SOFTMAX, name="backprop", head="delta"), 210 + 90 + 90 + 120),
        (make_spec(**TREE, name="backprop", head="delta"), 200 + 60 + 60 + 140),
    ],
)  # fmt: skip
def test_multiply_adds_are_those_counted_by_hand(spec, expected):
    assert multiply_adds(spec) == expected


@pytest.mark.parametrize("steps", [1, 2, 11])
def test_rates_in_closed_form(steps):
    last, done = 0.05, [i / max(steps - 1, 1) for i in range(steps)]
    expected = {
        "constant": [2.0] * steps,
        "plateau": [2.0] * steps,
        "linear": [2.0 * ((1 - t) + last * t) for t in done],
        "cosine": [2.0 * (last + (1 - last) * math.cos(math.pi * t / 2) ** 2) for t in done],
    }
    for schedule, values in expected.items():
        found = learning_rates(OptimizerConfig("sgd", 2.0, schedule, final_fraction=last), steps)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, values, rtol=1e-6)


class Slope:
    """Loss slope * sum(theta) of 7 weights, the slope an input's own number."""

    roles = {"w": (7,)}  # noqa: RUF012

    def __init__(self):
        self.seen = []

    def dense(self):
        return None

    def initial(self, seed, expert):
        return np.zeros(7, np.float32)

    def losses(self, candidates, inputs, positions, offset, draw):
        if len(candidates) > 1:
            self.seen.append(candidates.astype(np.float64))
        return candidates.sum(1, dtype=np.float64)[:, None] * inputs[positions]


@pytest.mark.parametrize(("held", "factor"), [(-1, 0.5), (1, 1.0)], ids=["rises", "falls"])
def test_a_plateau_halves_rate_and_perturbation_together(held, factor):
    body, places = Slope(), (np.arange(8), np.array([0, 8]), np.array([3]))
    estimator = EstimatorConfig("spsa", 5, "signs", 0.05, difference="central", head="same")
    optimizer = OptimizerConfig("sgd", 0.01, "plateau", patience=2, clip_norm=0.0, weight_decay=0.0)
    spec = general_spec(body, "slope", estimator, optimizer, TrainConfig(12, 4, hold_back=0.25, looks=6))
    # where what is held back rises as the rest falls, no look improves and every second one halves
    data = np.array([1.0] * 6 + [held] * 2)
    progress = start_group(spec, data, *places)
    advance_group(spec, data, *places, progress, 12)
    assert len(body.seen) == 12
    expected = factor ** (np.arange(12) // 4)
    theta = np.array([points.mean(0) for points in body.seen])
    for step in range(11):
        z = (body.seen[step][:5] - body.seen[step][5:]) / (2 * 0.05 * expected[step])
        np.testing.assert_allclose(np.abs(z), 1, rtol=1e-3)
        gradient = (z.sum(1, keepdims=True) * z).mean(0)
        np.testing.assert_allclose(theta[step] - theta[step + 1], 0.01 * expected[step] * gradient, atol=1e-5)
    assert progress.state.rate_scale[0] == factor**3
