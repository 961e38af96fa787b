"""The compiled loop against the float64 reference, and the reference against calculus."""

import dataclasses

import numpy as np
import pytest
import torch
from colonnade.kernels.mlp_resident import contract as c
from colonnade.kernels.mlp_resident import numba as fast
from colonnade.kernels.mlp_resident import reference

TEXT = "text"
ROWS = "rows"


def make_recipe(**changes):
    base = c.Recipe(
        estimator=c.ACTIVATION,
        directions=c.HADAMARD,
        num_perturbations=5,
        perturbation_size=0.1,
        head_perturbation_size=0.05,
        optimizer=c.SGD,
        beta1=0.9,
        beta2=0.99,
        epsilon=1e-3,
        clip_norm=0.0,
        weight_decay=0.0,
        train_body=True,
        batch=9,
        learning_rates=np.linspace(0.1, 0.02, 4).astype(np.float32),
        seed=(3 << 40) + 77,
    )
    return dataclasses.replace(base, **changes)


def make_problem(kind, head, hidden, rng, sizes=(100, 1, 0, 57), scale=0.3):
    if kind == TEXT:
        inputs = c.Inputs(
            text=rng.integers(0, 256, 3000).astype(np.uint8),
            embedding=rng.standard_normal((256, 5)).astype(np.float32),
            context=3,
        )
        outputs = 256
    else:
        outputs = 10 if head == c.HEAD_SOFTMAX else 8
        inputs = c.Inputs(
            x=rng.standard_normal((3000, 11)).astype(np.float32), y=rng.integers(0, outputs, 3000).astype(np.int32)
        )
    shape = c.MlpShape(inputs.num_features, hidden, outputs, head)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    indices = rng.integers(20, 3000, offsets[-1]).astype(np.uint32)
    ids = np.array([5, 900, 7, 10_239])[: len(sizes)]
    weights = {
        role: (scale * rng.standard_normal((len(sizes), *size))).astype(np.float32)
        for role, size in shape.roles.items()
    }
    return shape, inputs, indices, offsets, ids, weights


def in_float64(state):
    wide = {f: getattr(state, f).astype(np.float64) for f in ("packed", "first_moment", "second_moment")}
    return dataclasses.replace(state, **wide)


def run(loop, problem, recipe, wide=False, steps=None):
    shape, inputs, indices, offsets, ids, weights = problem
    state = c.GroupState.fresh(shape.pack(weights), recipe.optimizer)
    if wide:
        state = in_float64(state)
    loop.train_group(shape, recipe, inputs, indices, offsets, ids, state, 0, steps or len(recipe.learning_rates))
    return state


@pytest.mark.parametrize("kind", [TEXT, ROWS])
@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
@pytest.mark.parametrize(
    ("estimator", "directions"),
    [(c.ACTIVATION, c.SIGNS), (c.ACTIVATION, c.HADAMARD), (c.SPSA, c.SIGNS), (c.BACKPROP, c.SIGNS)],
    ids=["activation-signs", "activation-hadamard", "spsa", "backprop"],
)
@pytest.mark.parametrize("optimizer", [c.SGD, c.MOMENTUM, c.ADAM], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("train_body", [True, False], ids=["body", "frozen"])
def test_compiled_loop_matches_the_reference(kind, head, estimator, directions, optimizer, train_body):
    rng = np.random.default_rng()
    hidden = int(rng.integers(17, 45))
    problem = make_problem(kind, head, hidden, rng)
    recipe = make_recipe(
        estimator=estimator,
        directions=directions,
        optimizer=optimizer,
        train_body=train_body,
        perturbation_size=0.1 if estimator == c.ACTIVATION else 0.02,
        num_perturbations=int(rng.integers(1, 20)),
        batch=int(rng.integers(1, 30)),
        clip_norm=0.7,
        weight_decay=0.3,
    )
    got, expected = run(fast, problem, recipe), run(reference, problem, recipe, wide=True)
    # a difference of two losses near L over 2e carries eps L / e; four steps at rate .1 add it up, Adam divides it
    # by a root mean square that its epsilon keeps above 1e-3
    smallest = min(recipe.perturbation_size, recipe.head_perturbation_size)
    noise = 2**-23 * max(expected.curve.max(), 1) / smallest
    tolerance = 4 * 0.1 * noise * (1 / 1e-3 if optimizer == c.ADAM else 4)
    assert np.abs(got.packed - expected.packed).max() < tolerance
    # weights that differ by so much have losses that do
    np.testing.assert_allclose(got.curve, expected.curve, rtol=3e-5, atol=max(3e-5, tolerance))
    np.testing.assert_array_equal(got.dropped, 0)
    np.testing.assert_array_equal(got.status, 0)
    shape, weights = problem[0], problem[-1]
    before = shape.pack(weights)
    np.testing.assert_array_equal(got.packed[2], before[2], "an expert without inputs keeps its weights")
    assert np.abs(got.packed[1] - before[1]).max() > 1e-4, "an expert with one input learns"
    padding = shape.parameter_mask() == 0
    assert not got.packed[:, padding].any()
    if not train_body:
        np.testing.assert_array_equal(got.packed[:, : shape.offset_w2], before[:, : shape.offset_w2])


def autograd(shape, weights, x, targets):
    """Mean loss's gradient by role, in float64, by torch."""
    tensors = {role: torch.tensor(value, dtype=torch.float64, requires_grad=True) for role, value in weights.items()}
    logits = torch.relu(torch.tensor(x) @ tensors["w1"] + tensors["b1"]) @ tensors["w2"].T + tensors["b2"]
    target = torch.tensor(targets)
    if shape.head == c.HEAD_SOFTMAX:
        loss = torch.nn.functional.cross_entropy(logits, target)
    else:
        rows, signs = reference.tree_path(targets, shape.tree_depth)
        chosen = torch.gather(logits, 1, torch.tensor(rows))
        loss = torch.nn.functional.softplus(-torch.tensor(signs) * chosen).sum(1).mean()
    loss.backward()
    return {role: tensor.grad.numpy() for role, tensor in tensors.items()}


def one_batch(kind, head, hidden, batch):
    rng = np.random.default_rng()
    shape, inputs, indices, _, _, weights = make_problem(kind, head, hidden, rng)
    x, targets = reference.gather(inputs, indices[:batch].astype(np.int64), np.dtype(np.float64))
    return shape, {role: value[0].astype(np.float64) for role, value in weights.items()}, x, targets


@pytest.mark.parametrize("kind", [TEXT, ROWS])
@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
@pytest.mark.parametrize("hidden", [32, 19])
def test_a_full_hadamard_basis_gives_the_analytic_gradient(kind, head, hidden):
    shape, weights, x, targets = one_batch(kind, head, hidden, 64)
    recipe = make_recipe(num_perturbations=32, perturbation_size=1e-5, head_perturbation_size=1e-5, batch=len(targets))
    estimate, *_ = reference.estimate(shape, recipe, weights, x, targets, 3, 5)
    exact = autograd(shape, weights, x, targets)
    for role in exact:
        assert np.linalg.norm(estimate[role] - exact[role]) < 1e-3 * np.linalg.norm(exact[role]), role


@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
def test_backprop_is_the_analytic_gradient(head):
    shape, weights, x, targets = one_batch(ROWS, head, 21, 17)
    estimate, *_ = reference.estimate(shape, make_recipe(estimator=c.BACKPROP, batch=17), weights, x, targets, 0, 0)
    exact = autograd(shape, weights, x, targets)
    for role in exact:
        np.testing.assert_allclose(estimate[role], exact[role], atol=1e-12)


def test_spsa_projects_the_analytic_gradient_on_its_directions():
    shape, weights, x, targets = one_batch(ROWS, c.HEAD_TREE, 19, 16)
    recipe = make_recipe(estimator=c.SPSA, num_perturbations=3, perturbation_size=1e-6, batch=16)
    estimate, *_ = reference.estimate(shape, recipe, weights, x, targets, 2, 9)
    exact = autograd(shape, weights, x, targets)
    directions = [reference.weight_direction(shape, recipe, 2, 9, j) for j in range(3)]
    slopes = [sum((exact[role] * z[role]).sum() for role in exact) for z in directions]
    for role in exact:
        expected = sum(slope * z[role] for slope, z in zip(slopes, directions, strict=True)) / 3
        np.testing.assert_allclose(estimate[role], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("directions", [c.SIGNS, c.HADAMARD])
def test_the_activation_estimate_is_unbiased(directions):
    shape, weights, x, targets = one_batch(ROWS, c.HEAD_SOFTMAX, 19, 8)
    recipe = make_recipe(
        directions=directions, num_perturbations=4, perturbation_size=1e-5, head_perturbation_size=1e-5, batch=8
    )
    draws = np.stack([reference.estimate(shape, recipe, weights, x, targets, step, 1)[0]["b1"] for step in range(2000)])
    exact = autograd(shape, weights, x, targets)["b1"]
    standard_error = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - exact) < 5 * standard_error + 1e-8)


@pytest.mark.parametrize("estimator", [c.ACTIVATION, c.SPSA, c.BACKPROP])
def test_alone_in_a_group_and_in_stretches_bit_for_bit(estimator):
    rng = np.random.default_rng()
    sizes = tuple(rng.integers(0, 50, 128))
    shape, inputs, indices, offsets, _, weights = make_problem(TEXT, c.HEAD_TREE, 32, rng, sizes)
    ids = rng.permutation(10_240)[:128]
    recipe = make_recipe(estimator=estimator, optimizer=c.ADAM, batch=16)
    together = run(fast, (shape, inputs, indices, offsets, ids, weights), recipe)
    for e in (0, 63, 127):
        own = indices[offsets[e] : offsets[e + 1]]
        alone_weights = {role: value[e : e + 1] for role, value in weights.items()}
        problem = (shape, inputs, own, np.array([0, len(own)]), ids[e : e + 1], alone_weights)
        alone = run(fast, problem, recipe)
        np.testing.assert_array_equal(alone.packed[0], together.packed[e])
    stretches = c.GroupState.fresh(shape.pack(weights), recipe.optimizer)
    for first, last in ((0, 1), (1, 3), (3, 4)):
        fast.train_group(shape, recipe, inputs, indices, offsets, ids, stretches, first, last)
    np.testing.assert_array_equal(stretches.packed, together.packed)
    np.testing.assert_array_equal(stretches.second_moment, together.second_moment)


@pytest.mark.parametrize("loop", [fast, reference], ids=["numba", "reference"])
@pytest.mark.parametrize("estimator", [c.ACTIVATION, c.SPSA, c.BACKPROP])
@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["w1", "b1", "w2"])
def test_a_planted_nan_stops_its_expert_alone(loop, estimator, head, poison, where):
    rng = np.random.default_rng()
    problem = make_problem(ROWS, head, 24, rng, sizes=(40, 40, 40))
    recipe = make_recipe(estimator=estimator)
    clean = run(loop, problem, recipe)
    problem[-1][where][1] = np.where(rng.random(problem[-1][where][1].shape) < 0.5, poison, problem[-1][where][1])
    dirty = run(loop, problem, recipe)
    assert dirty.status[[0, 2]].tolist() == [0, 0]
    assert dirty.failed_step[[0, 2]].tolist() == [-1, -1]
    if np.isnan(poison):
        assert dirty.status[1] == c.STATUS_NO_FINITE_PAIR
        assert dirty.failed_step[1] == 0
        assert dirty.dropped[1] > 0
    else:
        # an infinite logit can have a finite gradient; the weight that made it is found at the end at the latest
        assert dirty.status[1] != c.STATUS_OK
    for e in (0, 2):
        np.testing.assert_array_equal(dirty.packed[e], clean.packed[e])


@pytest.mark.parametrize("loop", [fast, reference], ids=["numba", "reference"])
@pytest.mark.parametrize("estimator", [c.ACTIVATION, c.BACKPROP])
def test_an_input_that_is_nan_is_left_out_of_the_update(loop, estimator):
    rng = np.random.default_rng()
    shape, inputs, indices, offsets, ids, weights = make_problem(ROWS, c.HEAD_TREE, 24, rng, sizes=(4,))
    inputs.x[indices[0]] = np.nan
    state = run(loop, (shape, inputs, indices, offsets, ids, weights), make_recipe(estimator=estimator, batch=16))
    assert state.status[0] == c.STATUS_OK
    assert state.dropped[0] > 0
    assert np.isfinite(state.packed).all()
    inputs.x[indices] = np.nan
    state = run(loop, (shape, inputs, indices, offsets, ids, weights), make_recipe(estimator=estimator, batch=16))
    assert state.status[0] == c.STATUS_NO_FINITE_PAIR


@pytest.mark.parametrize("loop", [fast, reference], ids=["numba", "reference"])
def test_a_weight_that_no_batch_visits_is_still_checked(loop):
    rng = np.random.default_rng()
    shape, inputs, indices, offsets, ids, weights = make_problem(ROWS, c.HEAD_TREE, 24, rng, sizes=(20,))
    inputs.y[:] = 0
    weights["w2"][0, -1] = np.nan
    state = run(loop, (shape, inputs, indices, offsets, ids, weights), make_recipe())
    assert state.status[0] == c.STATUS_NONFINITE_WEIGHT


@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
def test_packing_round_trip(head):
    rng = np.random.default_rng()
    shape = c.MlpShape(int(rng.integers(1, 40)), int(rng.integers(1, 70)), 16, head)
    weights = {role: rng.standard_normal((3, *size)).astype(np.float32) for role, size in shape.roles.items()}
    packed = shape.pack(weights)
    assert shape.packed_size % 16 == 0
    for role, value in shape.unpack(packed).items():
        np.testing.assert_array_equal(value, weights[role])
    assert int(shape.parameter_mask().sum()) == shape.num_parameters == sum(v[0].size for v in weights.values())
