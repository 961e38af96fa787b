"""Estimators by hand against analytic gradients, their directions and each other."""

import numpy as np
import pytest
import torch
from colonnade.experts.estimators import ESTIMATORS, Activation, Agzo, Fzoo, LowRank, Spsa
from colonnade.kernels.errors import UserError
from colonnade.kernels.mlp_resident import contract as c
from colonnade.kernels.mlp_resident.directions import draw_directions, flat_direction
from hypothesis import given, settings
from hypothesis import strategies as st

MATRIX = torch.randn(7, 7, dtype=torch.float64)
WEIGHTS = sorted(set(ESTIMATORS) - {"activation"})


def loss(point):
    """A curved scalar function of the last two axes."""
    value = torch.as_tensor(point)
    return torch.tanh(value @ MATRIX[: value.shape[-1], : value.shape[-1]]).square().sum((-1, -2))


def exact_gradient(point):
    tensor = torch.tensor(point, requires_grad=True)
    loss(tensor).backward()
    return tensor.grad.numpy()


def started(estimator, point, **names):
    state = estimator.init(point, **names)
    return state.moved(point, np.random.default_rng(0).standard_normal((20, point.shape[0])))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("difference", ["central", "one_sided"])
def test_a_plain_estimate_projects_the_gradient_on_its_directions(name, difference):
    estimator = ESTIMATORS[name](num_perturbations=6, perturbation_size=1e-6, difference=difference, fitness="plain")
    state = started(estimator, np.random.default_rng().standard_normal((5, 6)), seed=3, expert=9)
    gradient, after = estimator.tell(state, loss(estimator.ask(state)).numpy())
    exact = exact_gradient(state.point)
    z = estimator.directions(state)
    np.testing.assert_allclose(gradient, np.mean([(exact * d).sum() * d for d in z], axis=0), rtol=1e-3, atol=1e-3)
    assert after.step == 1
    assert state.step == 0
    assert not np.array_equal(estimator.directions(after), z)


@pytest.mark.parametrize(
    "estimator",
    [
        Spsa(16),
        Spsa(16, kind="gaussian"),
        Spsa(16, kind="sparse"),
        Spsa(16, fitness="ranks", perturbation_size=0.5),
        Fzoo(16, perturbation_size=0.5),
        LowRank(16, perturbation_size=0.5, fitness="normalised"),
        Agzo(16),
    ],
    ids=["signs", "gaussian", "sparse", "ranks", "fzoo", "lowrank", "agzo"],
)
def test_following_the_estimate_descends(estimator):
    state = started(estimator, np.random.default_rng(5).standard_normal((5, 4)), seed=1)
    before = float(loss(state.point))
    for step in range(300):
        inputs = np.random.default_rng(step).standard_normal((20, 5))
        gradient, state = estimator.tell(state, loss(estimator.ask(state)).numpy())
        state = state.moved(state.point - 0.02 * gradient, inputs)
    assert float(loss(state.point)) < 0.6 * before


@given(st.integers(1, 40), st.floats(0.1, 1.0), st.integers(0, 2**64 - 1))
@settings(max_examples=25, deadline=None)
def test_sparse_directions_hold_their_density_and_dense_entries_always(size, density, seed):
    dense = np.zeros(size, bool)
    dense[::3] = True
    spsa = Spsa(60, kind="sparse", density=density, dense=dense)
    z = spsa.directions(spsa.init(np.zeros(size), seed))
    assert set(np.unique(z)) <= {-1, 0, 1}
    assert (z[:, dense] != 0).all()
    held = (z[:, ~dense] != 0).mean() if (~dense).any() else density
    assert abs(held - density) < 5 * np.sqrt(density * (1 - density) / max(60 * (~dense).sum(), 1)) + 1e-9


def test_rescaled_sparse_estimates_are_unbiased_and_plain_ones_shrunk():
    point = np.random.default_rng(1).standard_normal((4, 4))
    exact = exact_gradient(point)
    for rescale, factor in ((True, 1.0), (False, 0.5)):
        spsa = Spsa(4000, perturbation_size=1e-5, kind="sparse", rescale=rescale)
        state = spsa.init(point, 2)
        gradient, _ = spsa.tell(state, loss(spsa.ask(state)).numpy())
        noise = np.linalg.norm(exact) * 2 / np.sqrt(4000)
        assert np.abs(gradient - factor * exact).max() < 5 * noise


@pytest.mark.parametrize("pairs", [1, 10])
def test_variance_of_spsa_is_that_of_the_theory(pairs):
    """Rademacher: E|g_hat - g|^2 / |g|^2 = (d - 1) / n; for a linear loss, exactly."""
    size, draws = 60, 6000
    gradient = np.random.default_rng(3).standard_normal(size)
    spsa = Spsa(pairs)
    state = spsa.init(np.zeros(size), 11)
    total = 0.0
    for _ in range(draws):
        z = spsa.directions(state)
        estimate = (z * (z @ gradient)[:, None]).mean(0)
        total += ((estimate - gradient) ** 2).sum()
        state = spsa.tell(state, np.zeros(2 * pairs))[1]
    measured = total / draws / (gradient @ gradient)
    assert abs(measured / ((size - 1) / pairs) - 1) < 0.05


def test_low_rank_factors_give_the_same_products_without_the_matrix():
    rng = np.random.default_rng()
    lowrank = LowRank(3, rank=2)
    state = lowrank.init(rng.standard_normal((9, 5)), seed=4, expert=1)
    x = rng.standard_normal((7, 9))
    for j, z in enumerate(lowrank.directions(state)):
        a, b = lowrank.factors(state, j)
        np.testing.assert_allclose(x @ z, (x @ a) @ b.T / np.sqrt(2), atol=1e-5)


def test_agzo_stays_in_the_span_of_the_inputs():
    rng = np.random.default_rng()
    inputs = rng.standard_normal((30, 2)) @ rng.standard_normal((2, 8))
    agzo = Agzo(5, rank=2)
    state = agzo.init(rng.standard_normal((8, 6)), 3).moved(rng.standard_normal((8, 6)), inputs)
    span = np.linalg.svd(inputs)[2][:2]
    for z in agzo.directions(state):
        np.testing.assert_allclose(span.T @ (span @ z), z, atol=1e-5)
    with pytest.raises(UserError, match="looks at the layer's inputs"):
        agzo.ask(agzo.init(rng.standard_normal((8, 6)), 3))


@pytest.mark.parametrize("difference", ["central", "one_sided"])
def test_a_full_hadamard_basis_is_exact(difference):
    estimator = Activation(num_perturbations=32, perturbation_size=1e-6, difference=difference)
    h = np.random.default_rng().standard_normal((6, 32))
    target = np.random.default_rng().standard_normal((6, 32))

    def losses(points):
        return np.cos(points * target).sum(-1)

    state = estimator.init(h, seed=5)
    gradient, _ = estimator.tell(state, losses(estimator.ask(state)))
    np.testing.assert_allclose(gradient, -target * np.sin(h * target), atol=1e-4)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("fitness", ["plain", "std", "ranks", "normalised"])
@pytest.mark.parametrize("difference", ["central", "one_sided"])
def test_probes_that_are_not_finite_are_dropped_and_counted(name, fitness, difference):
    estimator = ESTIMATORS[name](num_perturbations=4, fitness=fitness, difference=difference)
    state = started(estimator, np.zeros((5, 6)), seed=0)
    examples = (5,) if name == "activation" else ()
    losses = np.random.default_rng().random((8 if difference == "central" else 5, *examples))
    first = 0 if difference == "central" else 1
    losses[first + 1] = np.nan
    losses[first + 2] = np.inf
    gradient, after = estimator.tell(state, losses)
    assert np.isfinite(gradient).all()
    assert after.dropped == 2 * int(np.prod(examples))
    # the dropped probes leave no trace: other values there give the same
    losses[first + 1] = -np.inf
    again, _ = estimator.tell(state, losses)
    np.testing.assert_array_equal(gradient, again)
    if fitness == "plain":
        kept = [0, 3]
        other = losses[4:] if difference == "central" else np.broadcast_to(losses[0], (4, *examples))
        ahead = losses[:4] if difference == "central" else losses[1:]
        slopes = (ahead - other) / (estimator.perturbation_size * (2 if difference == "central" else 1))
        v = estimator.directions(state).astype(float)
        expected = sum(np.asarray(slopes[j])[..., None] * v[j] for j in kept) / 2
        np.testing.assert_allclose(gradient, expected)


@pytest.mark.parametrize("fitness", ["std", "ranks", "normalised"])
@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
@settings(max_examples=20, deadline=None)
def test_scaled_fitness_forgets_scale_and_shift_of_the_losses(fitness, scale, shift):
    spsa = Spsa(6, fitness=fitness)
    state = spsa.init(np.zeros(9), 0)
    losses = np.random.default_rng(0).random(12)
    first, _ = spsa.tell(state, losses)
    second, _ = spsa.tell(state, scale * losses + shift)
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)


def test_losses_that_all_agree_give_nothing_to_follow():
    for fitness in ("plain", "std", "ranks", "normalised"):
        spsa = Spsa(3, fitness=fitness)
        gradient, after = spsa.tell(spsa.init(np.zeros(9), 0), np.full(6, 2.5))
        assert not gradient.any()
        assert after.dropped == 0


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_losses_of_the_wrong_shape_are_refused(name):
    estimator = ESTIMATORS[name]()
    state = started(estimator, np.zeros((5, 5)), seed=0)
    with pytest.raises(UserError, match="expected"):
        estimator.tell(state, np.zeros(3))


def test_draws_are_those_of_the_loops():
    for name in ("signs", "hadamard"):
        estimator = Activation(5, kind=name)
        state = estimator.init(np.zeros((6, 19)), seed=77, expert=4)
        for _ in range(3):
            _, state = estimator.tell(state, np.zeros((10, 6)))
        expected = draw_directions(77, 4, 3, 6, 19, 5, c.DIRECTIONS[name]).transpose(1, 0, 2)
        np.testing.assert_array_equal(estimator.directions(state), expected)
    for name in ("signs", "sparse", "gaussian"):
        spsa = Spsa(2, kind=name)
        state = spsa.init(np.zeros(33), seed=5, expert=2)
        np.testing.assert_array_equal(
            spsa.directions(state)[1], flat_direction(c.DIRECTIONS[name], 0.5, 5, 0, 2, 1, 33)
        )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Activation(kind="gauss"), "signs, hadamard"),
        (lambda: Spsa(kind="lowrank"), "signs, sparse, gaussian"),
        (lambda: Spsa(perturbation_size=0.0), "above 0"),
        (lambda: Spsa(0), "at least 1"),
        (lambda: Fzoo(difference="both"), "central, one_sided"),
        (lambda: LowRank(rank=4).init(np.zeros((3, 9)), 0), "rank=4"),
        (lambda: Activation(64).init(np.zeros((3, 9)), 0), "has 32"),
    ],
)
def test_bad_choices_are_named(make, words):
    with pytest.raises(UserError, match=words):
        make()
