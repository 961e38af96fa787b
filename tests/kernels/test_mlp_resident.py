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


ACTIVATION = {"site": c.ACTIVATIONS}
ONE_SIDED = {"site": c.ACTIVATIONS, "difference": c.ONE_SIDED}
SPSA = {"site": c.WEIGHTS, "directions": c.SIGNS, "head_rule": c.HEAD_SAME, "perturbation_size": 0.02}
BACKPROP = {"site": c.CALCULUS}
WEIGHT_RULES = {
    f"{directions}-{name}": {
        "site": c.WEIGHTS,
        "directions": c.DIRECTIONS[directions],
        "perturbation_size": 0.02,
        "rank": 2,
        "density": 0.5 if directions == "sparse" else 1.0,
        **choices,
    }
    for directions in ("signs", "sparse", "gaussian", "lowrank", "subspace")
    for name, choices in {
        "central": {"head_rule": c.HEAD_SAME},
        "fzoo": {"head_rule": c.HEAD_SAME, "difference": c.ONE_SIDED, "fitness": c.STD},
        "normalised-pairs": {"head_rule": c.HEAD_PAIRS, "fitness": c.NORMALISED},
        "ranks": {"head_rule": c.HEAD_SAME, "fitness": c.RANKS, "perturbation_size": 0.1},
        "one-sided-delta": {"head_rule": c.HEAD_DELTA, "difference": c.ONE_SIDED, "rescale": False},
    }.items()
}
RULES = {
    "activation-signs": {"directions": c.SIGNS},
    "activation-hadamard": {},
    "one-sided": {"difference": c.ONE_SIDED},
    "one-sided-signs-std": {"difference": c.ONE_SIDED, "directions": c.SIGNS, "fitness": c.STD},
    "activation-normalised": {"fitness": c.NORMALISED},
    "activation-delta": {"head_rule": c.HEAD_DELTA},
    "spsa": SPSA,
    "backprop": BACKPROP,
}
HEADS = {"tree": c.HEAD_TREE, "softmax": c.HEAD_SOFTMAX, "regression": c.HEAD_REGRESSION}
MEMORY = "memory"


def make_recipe(**changes):
    base = c.Recipe(
        site=c.ACTIVATIONS,
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


def make_problem(kind, head, hidden, rng, sizes=(100, 1, 0, 57), scale=0.3, activation=c.RELU):
    if kind in (TEXT, MEMORY):
        inputs = c.Inputs(
            text=rng.integers(0, 256, 3000).astype(np.uint8),
            embedding=rng.standard_normal((256, 5)).astype(np.float32),
            context=3,
            memory=rng.integers(-127, 128, (3000, 8, 16)).astype(np.int8) if kind == MEMORY else None,
        )
        outputs = 256
    else:
        outputs = {c.HEAD_SOFTMAX: 10, c.HEAD_TREE: 8, c.HEAD_REGRESSION: 3}[head]
        targets = rng.integers(0, outputs, 3000).astype(np.int32)
        if head == c.HEAD_REGRESSION:
            targets = rng.standard_normal((3000, outputs)).astype(np.float32)
        inputs = c.Inputs(x=rng.standard_normal((3000, 11)).astype(np.float32), y=targets)
    shape = c.MlpShape(inputs.num_features, hidden, outputs, head, 16 if kind == MEMORY else 0, activation)
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


def check_against_reference(problem, recipe):
    got, expected = run(fast, problem, recipe), run(reference, problem, recipe, wide=True)
    # a difference of two losses near L over 2e carries eps L / e; four steps at rate .1 add it up, Adam divides it
    # by a root mean square that its epsilon keeps above 1e-3; scaled fitness divides by a spread of the order of e
    smallest = min(recipe.perturbation_size, recipe.head_perturbation_size)
    noise = 2**-23 * max(expected.curve.max(), 1) / smallest
    tolerance = 4 * 0.1 * noise * (1 / 1e-3 if recipe.optimizer == c.ADAM else 4)
    if recipe.fitness != c.PLAIN:
        tolerance *= 4 / smallest
    assert np.abs(got.packed - expected.packed).max() < tolerance
    # weights that differ by so much have losses that do
    np.testing.assert_allclose(got.curve, expected.curve, rtol=3e-5, atol=max(1e-4, tolerance))
    np.testing.assert_array_equal(got.dropped, 0)
    np.testing.assert_array_equal(got.status, 0)
    shape, weights = problem[0], problem[-1]
    before = shape.pack(weights)
    np.testing.assert_array_equal(got.packed[2], before[2], "an expert without inputs keeps its weights")
    assert np.abs(got.packed[1] - before[1]).max() > 1e-4, "an expert with one input learns"
    padding = shape.parameter_mask() == 0
    assert not got.packed[:, padding].any()
    if not recipe.train_body or not recipe.use_body:
        np.testing.assert_array_equal(got.packed[:, : shape.offset_w2], before[:, : shape.offset_w2])
    return got


@pytest.mark.parametrize("kind", [TEXT, ROWS])
@pytest.mark.parametrize("head", list(HEADS.values()), ids=list(HEADS))
@pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
@pytest.mark.parametrize("train_body", [True, False], ids=["body", "frozen"])
def test_compiled_loop_matches_the_reference(kind, head, rule, train_body):
    if kind == TEXT and head == c.HEAD_REGRESSION:
        pytest.skip("a text has no numbers to predict")
    rng = np.random.default_rng()
    problem = make_problem(kind, head, int(rng.integers(17, 45)), rng)
    shape = problem[0]
    anchor = rng.choice([None, 1]) and shape.pack({role: 0.5 * value[:1] for role, value in problem[-1].items()})[0]
    recipe = make_recipe(
        optimizer=int(rng.choice([c.SGD, c.MOMENTUM, c.ADAM])),
        train_body=train_body,
        num_perturbations=int(rng.integers(2, 20)),
        batch=int(rng.integers(1, 30)),
        clip_norm=0.7,
        weight_decay=0.3,
        anchor=anchor,
        **rule,
    )
    check_against_reference(problem, recipe)


@pytest.mark.parametrize("rule", list(WEIGHT_RULES.values()), ids=list(WEIGHT_RULES))
@pytest.mark.parametrize("kind", [MEMORY, ROWS])
def test_weight_space_rules_match_the_reference(kind, rule):
    rng = np.random.default_rng()
    head = c.HEAD_TREE if kind == MEMORY else int(rng.choice([c.HEAD_SOFTMAX, c.HEAD_REGRESSION]))
    problem = make_problem(kind, head, int(rng.integers(17, 45)), rng)
    check_against_reference(problem, make_recipe(num_perturbations=5, clip_norm=0.7, **rule))


@pytest.mark.parametrize("rule", [ACTIVATION, ONE_SIDED, SPSA, BACKPROP])
@pytest.mark.parametrize("use_body", [True, False], ids=["both", "mixer"])
def test_memory_matches_the_reference(rule, use_body):
    rng = np.random.default_rng()
    problem = make_problem(MEMORY, c.HEAD_TREE, int(rng.integers(17, 45)), rng)
    check_against_reference(problem, make_recipe(use_body=use_body, weight_decay=0.3, clip_norm=0.7, **rule))


@pytest.mark.parametrize("rule", [ACTIVATION, ONE_SIDED, BACKPROP])
@pytest.mark.parametrize("head", list(HEADS.values()), ids=list(HEADS))
def test_sign_activations_match_the_reference(rule, head):
    rng = np.random.default_rng()
    problem = make_problem(ROWS, head, int(rng.integers(17, 45)), rng, activation=c.SIGN)
    check_against_reference(problem, make_recipe(clip_norm=0.7, **{"perturbation_size": 0.5, **rule}))


@pytest.mark.parametrize("loop", [fast, reference], ids=["numba", "reference"])
def test_weights_on_a_grid_stay_on_it_and_keep_their_mean(loop):
    rng = np.random.default_rng()
    shape, inputs, indices, offsets, ids, weights = make_problem(
        ROWS, c.HEAD_SOFTMAX, 20, rng, sizes=(60,), activation=c.SIGN
    )
    grid = np.full(shape.packed_size, 0.25, np.float32) * shape.parameter_mask()
    weights = {role: np.round(value / 0.25) * 0.25 for role, value in weights.items()}
    problem = (shape, inputs, indices, offsets, ids, weights)
    rounded = run(loop, problem, make_recipe(grid=grid, levels=3), steps=1)
    parameters = grid > 0
    levels = rounded.packed[0, parameters] / 0.25
    np.testing.assert_array_equal(levels, np.round(levels))
    assert np.abs(levels).max() <= 3
    # many draws of the rounding: their mean is the step without it
    exact = run(reference, problem, make_recipe(), wide=True, steps=1).packed[0, parameters]
    inside = np.abs(exact) < 0.75
    state, total = exact.copy(), 0.0
    for step in range(400):
        state = np.zeros(shape.packed_size)
        state[parameters] = exact
        reference.round_to_grid(state, make_recipe(grid=grid, levels=3), parameters, step, 7)
        total += state[parameters]
    assert np.abs(total / 400 - exact)[inside].max() < 5 * 0.125 / np.sqrt(400) + 1e-6


def test_both_loops_round_alike():
    rng = np.random.default_rng()
    problem = make_problem(ROWS, c.HEAD_SOFTMAX, 20, rng, activation=c.SIGN)
    shape = problem[0]
    recipe = make_recipe(grid=np.full(shape.packed_size, 0.25, np.float32) * shape.parameter_mask())
    got, expected = (run(loop, problem, recipe, steps=1).packed for loop in (fast, reference))
    # a step that lies within rounding of a draw may fall on the other side
    assert (got != expected).mean() < 1e-3


@pytest.mark.parametrize("loss", ["zero_one", "function"])
@pytest.mark.parametrize("head", [c.HEAD_SOFTMAX, c.HEAD_TREE], ids=["softmax", "tree"])
def test_black_box_losses_are_followed_by_probes_alone(loss, head):
    rng = np.random.default_rng(0)
    problem = make_problem(ROWS, head, 24, rng, sizes=(60,))

    def hinge(outputs, targets):
        chosen = np.take_along_axis(outputs, targets[:, None], 1)
        return np.maximum(0, 1 - chosen + outputs).sum(1) - 1

    if loss == "function" and head == c.HEAD_TREE:
        pytest.skip("a function of the outputs needs all of them")
    code = c.LOSS_ZERO_ONE if loss == "zero_one" else c.LOSS_FUNCTION
    recipe = make_recipe(
        loss=code, loss_function=hinge, perturbation_size=0.5, head_perturbation_size=0.5, batch=32,
        learning_rates=np.full(40, 0.2, np.float32),
    )  # fmt: skip
    assert not fast.can_run(recipe)
    shape, inputs, indices, _, _, weights = problem
    state = run(reference, problem, recipe)
    batch = reference.gather(inputs, indices.astype(np.int64), np.dtype(np.float32))
    after = reference.losses(shape, recipe, {k: v[0] for k, v in shape.unpack(state.packed).items()}, batch)
    before = reference.losses(shape, recipe, {k: v[0] for k, v in weights.items()}, batch)
    assert after.shape == (60,)
    assert after.mean() < 0.9 * before.mean()


def autograd(shape, weights, x, targets):
    """Mean loss's gradient by role, in float64, by torch."""
    tensors = {role: torch.tensor(value, dtype=torch.float64, requires_grad=True) for role, value in weights.items()}
    logits = torch.relu(torch.tensor(x) @ tensors["w1"] + tensors["b1"]) @ tensors["w2"].T + tensors["b2"]
    target = torch.tensor(targets)
    if shape.head == c.HEAD_SOFTMAX:
        loss = torch.nn.functional.cross_entropy(logits, target)
    else:
        rows, signs = (c.tree_rows(targets, shape.tree_depth), c.tree_signs(targets, shape.tree_depth))
        chosen = torch.gather(logits, 1, torch.tensor(rows))
        loss = torch.nn.functional.softplus(-torch.tensor(signs) * chosen).sum(1).mean()
    loss.backward()
    return {role: tensor.grad.numpy() for role, tensor in tensors.items()}


def one_batch(kind, head, hidden, batch):
    rng = np.random.default_rng()
    shape, inputs, indices, _, _, weights = make_problem(kind, head, hidden, rng)
    chosen = reference.gather(inputs, indices[:batch].astype(np.int64), np.dtype(np.float64))
    return shape, {role: value[0].astype(np.float64) for role, value in weights.items()}, chosen


@pytest.mark.parametrize("kind", [TEXT, ROWS])
@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
@pytest.mark.parametrize("hidden", [32, 19])
def test_a_full_hadamard_basis_gives_the_analytic_gradient(kind, head, hidden):
    shape, weights, batch = one_batch(kind, head, hidden, 64)
    recipe = make_recipe(num_perturbations=32, perturbation_size=1e-5, head_perturbation_size=1e-5, batch=len(batch.x))
    estimate, *_ = reference.estimate(shape, recipe, weights, batch, 3, 5)
    exact = autograd(shape, weights, batch.x, batch.targets)
    for role in exact:
        assert np.linalg.norm(estimate[role] - exact[role]) < 1e-3 * np.linalg.norm(exact[role]), role


@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
def test_backprop_is_the_analytic_gradient(head):
    shape, weights, batch = one_batch(ROWS, head, 21, 17)
    estimate, *_ = reference.estimate(shape, make_recipe(batch=17, **BACKPROP), weights, batch, 0, 0)
    exact = autograd(shape, weights, batch.x, batch.targets)
    for role in exact:
        np.testing.assert_allclose(estimate[role], exact[role], atol=1e-12)


def test_spsa_projects_the_analytic_gradient_on_its_directions():
    shape, weights, batch = one_batch(ROWS, c.HEAD_TREE, 19, 16)
    recipe = make_recipe(num_perturbations=3, batch=16, **{**SPSA, "perturbation_size": 1e-6})
    estimate, *_ = reference.estimate(shape, recipe, weights, batch, 2, 9)
    exact = autograd(shape, weights, batch.x, batch.targets)
    directions = [
        reference.weight_direction(shape, c.SIGNS, 1.0, 1, batch.x, batch.x, recipe.seed, 2, 9, j) for j in range(3)
    ]
    slopes = [sum((exact[role] * z[role]).sum() for role in exact) for z in directions]
    for role in exact:
        expected = sum(slope * z[role] for slope, z in zip(slopes, directions, strict=True)) / 3
        np.testing.assert_allclose(estimate[role], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("directions", [c.SIGNS, c.HADAMARD])
def test_the_activation_estimate_is_unbiased(directions):
    shape, weights, batch = one_batch(ROWS, c.HEAD_SOFTMAX, 19, 8)
    recipe = make_recipe(
        directions=directions, num_perturbations=4, perturbation_size=1e-5, head_perturbation_size=1e-5, batch=8
    )
    draws = np.stack([reference.estimate(shape, recipe, weights, batch, step, 1)[0]["b1"] for step in range(2000)])
    exact = autograd(shape, weights, batch.x, batch.targets)["b1"]
    standard_error = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - exact) < 5 * standard_error + 1e-8)


@pytest.mark.parametrize("rule", [ACTIVATION, ONE_SIDED, SPSA, BACKPROP])
def test_alone_in_a_group_and_in_stretches_bit_for_bit(rule):
    rng = np.random.default_rng()
    sizes = tuple(rng.integers(0, 50, 128))
    shape, inputs, indices, offsets, _, weights = make_problem(TEXT, c.HEAD_TREE, 32, rng, sizes)
    ids = rng.permutation(10_240)[:128]
    recipe = make_recipe(optimizer=c.ADAM, batch=16, **rule)
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
@pytest.mark.parametrize("rule", [ACTIVATION, ONE_SIDED, SPSA, BACKPROP])
@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["w1", "b1", "w2"])
def test_a_planted_nan_stops_its_expert_alone(loop, rule, head, poison, where):
    rng = np.random.default_rng()
    problem = make_problem(ROWS, head, 24, rng, sizes=(40, 40, 40))
    recipe = make_recipe(**rule)
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
@pytest.mark.parametrize("rule", [ACTIVATION, ONE_SIDED, BACKPROP])
def test_an_input_that_is_nan_is_left_out_of_the_update(loop, rule):
    rng = np.random.default_rng()
    shape, inputs, indices, offsets, ids, weights = make_problem(ROWS, c.HEAD_TREE, 24, rng, sizes=(4,))
    inputs.x[indices[0]] = np.nan
    state = run(loop, (shape, inputs, indices, offsets, ids, weights), make_recipe(batch=16, **rule))
    assert state.status[0] == c.STATUS_OK
    assert state.dropped[0] > 0
    assert np.isfinite(state.packed).all()
    inputs.x[indices] = np.nan
    state = run(loop, (shape, inputs, indices, offsets, ids, weights), make_recipe(batch=16, **rule))
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
