import numpy as np
import pytest
import torch
from colonnade.experts.estimators import ESTIMATORS, Activation, Spsa
from colonnade.kernels.errors import UserError
from colonnade.kernels.mlp_resident import contract as c
from colonnade.kernels.mlp_resident import reference

MATRIX = torch.randn(7, 7, dtype=torch.float64)


def loss(point):
    """A curved scalar function of the last two axes."""
    value = torch.as_tensor(point)
    return torch.tanh(value @ MATRIX[: value.shape[-1], : value.shape[-1]]).square().sum((-1, -2))


def exact_gradient(point):
    tensor = torch.tensor(point, requires_grad=True)
    loss(tensor).backward()
    return tensor.grad.numpy()


def test_spsa_projects_on_its_directions():
    spsa = Spsa(num_perturbations=6, perturbation_size=1e-5)
    state = spsa.init(np.random.default_rng().standard_normal((4, 5)), seed=3, expert=9)
    gradient, after = spsa.tell(state, loss(spsa.ask(state)).numpy())
    exact = exact_gradient(state.point)
    z = spsa.directions(state)
    np.testing.assert_allclose(gradient, np.mean([(exact * d).sum() * d for d in z], axis=0), atol=1e-6)
    assert after.step == 1
    assert state.step == 0
    assert not np.array_equal(spsa.directions(after), z)


def test_spsa_descends():
    spsa = Spsa(num_perturbations=8)
    state = spsa.init(np.random.default_rng().standard_normal((3, 4)), seed=1)
    before = float(loss(state.point))
    for _ in range(300):
        gradient, state = spsa.tell(state, loss(spsa.ask(state)).numpy())
        state = state.moved(state.point - 0.02 * gradient)
    assert float(loss(state.point)) < 0.5 * before


def test_a_full_hadamard_basis_is_exact():
    estimator = Activation(num_perturbations=32, perturbation_size=1e-5)
    h = np.random.default_rng().standard_normal((6, 32))
    target = np.random.default_rng().standard_normal((6, 32))

    def losses(points):
        return np.cos(points * target).sum(-1)

    state = estimator.init(h, seed=5)
    gradient, _ = estimator.tell(state, losses(estimator.ask(state)))
    np.testing.assert_allclose(gradient, -target * np.sin(h * target), atol=1e-5)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_pairs_that_are_not_finite_are_dropped_and_counted(name):
    estimator = ESTIMATORS[name](num_perturbations=4)
    state = estimator.init(np.zeros((3, 5)), seed=0)
    shape = (4, 2) if name == "spsa" else (4, 2, 3)
    losses = np.random.default_rng().random(shape)
    losses[1, 0] = np.nan
    losses[2] = np.inf
    gradient, after = estimator.tell(state, losses)
    assert np.isfinite(gradient).all()
    assert after.dropped == 2 * int(np.prod(shape[2:]))
    with np.errstate(invalid="ignore"):
        slopes = (losses[:, 0] - losses[:, 1]) / (2 * estimator.perturbation_size)
    kept = [0, 3]
    v = estimator.directions(state).astype(float)
    expected = sum(np.asarray(slopes[j])[..., None] * v[j] for j in kept) / 2
    np.testing.assert_allclose(gradient, expected)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_losses_of_the_wrong_shape_are_refused(name):
    estimator = ESTIMATORS[name]()
    state = estimator.init(np.zeros((3, 5)), seed=0)
    with pytest.raises(UserError, match="expected"):
        estimator.tell(state, np.zeros(3))


def test_the_activation_draws_are_those_of_the_loops():
    shape = c.MlpShape(3, 19, 8, c.HEAD_TREE)
    for name, code in c.DIRECTIONS.items():
        recipe = c.Recipe(c.ACTIVATION, code, 5, 0.1, 0.1, c.SGD, 0, 0, 0, 0, 0, True, 6, np.ones(9, np.float32), 77)
        estimator = Activation(5, directions_name=name)
        state = estimator.init(np.zeros((6, 19)), seed=77, expert=4)
        for _ in range(3):
            _, state = estimator.tell(state, np.zeros((5, 2, 6)))
        expected = reference.hidden_directions(shape, recipe, 3, 4).transpose(1, 0, 2)
        np.testing.assert_array_equal(estimator.directions(state), expected)


def test_unknown_directions_name_the_known_ones():
    with pytest.raises(UserError, match="signs, hadamard"):
        Activation(directions_name="gauss")
