import numpy as np
import pytest
from colonnade.kernels.mlp_forward.numba import path_logits, row_logits
from colonnade.kernels.mlp_resident import contract as c
from colonnade.kernels.mlp_resident import reference


def make(head, kind):
    rng = np.random.default_rng()
    if kind == "text":
        inputs = c.Inputs(
            text=rng.integers(0, 256, 500).astype(np.uint8),
            embedding=rng.standard_normal((256, 5)).astype(np.float32),
            context=7,
        )
    else:
        inputs = c.Inputs(
            x=rng.standard_normal((500, 13)).astype(np.float32), y=rng.integers(0, 8, 500).astype(np.int32)
        )
    shape = c.MlpShape(inputs.num_features, 21, 256 if kind == "text" else 8, head)
    weights = {role: rng.standard_normal((6, *size)).astype(np.float32) for role, size in shape.roles.items()}
    n = 101
    positions = rng.integers(10, 500, n)
    experts = rng.integers(-1, 6, n)
    return shape, inputs, weights, positions, experts


@pytest.mark.parametrize("kind", ["text", "rows"])
@pytest.mark.parametrize("head", [c.HEAD_TREE, c.HEAD_SOFTMAX], ids=["tree", "softmax"])
def test_logits_match_the_reference_and_do_not_depend_on_the_batch(head, kind):
    shape, inputs, weights, positions, experts = make(head, kind)
    packed = shape.pack(weights)
    got = row_logits(shape, inputs, positions, experts, packed)
    batch = reference.gather(inputs, positions, np.dtype(np.float64))
    x, targets = batch.x, batch.targets
    for i, expert in enumerate(experts):
        if expert < 0:
            assert not got[i].any()
            continue
        w = {role: value[expert].astype(np.float64) for role, value in weights.items()}
        expected = reference.activate(shape, x[i] @ w["w1"] + w["b1"]) @ w["w2"].T + w["b2"]
        np.testing.assert_allclose(got[i], expected, rtol=1e-4, atol=1e-4)
        alone = row_logits(shape, inputs, positions[i : i + 1], experts[i : i + 1], packed)
        np.testing.assert_array_equal(alone[0], got[i])
    order = np.argsort(experts, kind="stable")
    np.testing.assert_array_equal(row_logits(shape, inputs, positions[order], experts[order], packed), got[order])
    if head == c.HEAD_TREE:
        along = path_logits(shape, inputs, positions, experts, targets, packed)
        rows = c.tree_rows(targets, shape.tree_depth)
        np.testing.assert_array_equal(along, np.take_along_axis(got, rows, 1))


def test_no_inputs():
    shape, inputs, weights, positions, experts = make(c.HEAD_TREE, "rows")
    assert row_logits(shape, inputs, positions[:0], experts[:0], shape.pack(weights)).shape == (0, 7)


def test_memory_is_part_of_the_logits_along_a_path():
    shape, inputs, _, positions, experts = make(c.HEAD_TREE, "text")
    rng = np.random.default_rng()
    shape = c.MlpShape(shape.num_features, 21, 256, c.HEAD_TREE, 16)
    memory = rng.integers(-127, 128, (500, 8, 16)).astype(np.int8)
    inputs = c.Inputs(inputs.text, inputs.embedding, inputs.context, memory=memory)
    weights = {role: rng.standard_normal((6, *size)).astype(np.float32) for role, size in shape.roles.items()}
    batch = reference.gather(inputs, positions, np.dtype(np.float64))
    got = path_logits(shape, inputs, positions, experts, batch.targets, shape.pack(weights))
    bare = row_logits(shape, inputs, positions, experts, shape.pack(weights))
    rows = c.tree_rows(batch.targets, 8)
    for i, expert in enumerate(experts):
        extra = np.einsum("km,km->k", batch.memory[i], weights["u"][expert]) if expert >= 0 else 0
        np.testing.assert_allclose(got[i], bare[i, rows[i]] + extra, rtol=1e-4, atol=1e-3)
