from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from colonnade.kernels.errors import UserError
from colonnade.kernels.lstm_forward import numba, reference
from colonnade.kernels.lstm_forward.contract import LstmShape
from torch.nn import functional

BACKENDS = pytest.mark.parametrize("backend", [reference, numba], ids=["reference", "numba"])
SHAPES = [
    LstmShape(8),
    LstmShape(16, num_blocks=1),
    LstmShape(24, num_blocks=3),
    LstmShape(32),
    LstmShape(32, head_width=16),
    LstmShape(8, head_width=24, train_embedding=True),
    LstmShape(16, train_embedding=True),
    # widths that the loops round up: alone, with projections, and where both round up to the same
    LstmShape(5, num_blocks=1),
    LstmShape(12, train_embedding=True),
    LstmShape(13, head_width=20),
    LstmShape(12, head_width=16),
]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draw(shape, num_candidates=3, dtype: type = np.float32):
    """Candidates with logits of order one and saturated gates among them, an embedding (or None), and a text."""
    rng = np.random.default_rng()
    flat = np.zeros((num_candidates, shape.num_parameters), dtype)
    for role, view in shape.views(flat).items():
        noise = rng.standard_normal(view.shape)
        view[...] = 1 + 0.3 * noise if "gain" in role else 1.5 * noise / np.sqrt(view.shape[-2])
        if role == "embedding":
            view[...] = 0.5 * noise
    embedding = None if shape.train_embedding else 0.5 * rng.standard_normal((256, shape.embedding_width)).astype(dtype)
    return flat, embedding, rng.integers(0, 256, 400).astype(np.uint8)


def draw_starts(batch, length, lowest=0):
    return np.random.default_rng().integers(lowest, 400 - length + 1, batch)


def torch_log_proba(shape, weights, embedding, text, starts, length):
    """Layer by layer over whole windows, from torch's own LSTM and functional calls, float64."""
    w = {role: torch.tensor(np.asarray(view, np.float64)) for role, view in shape.views(weights).items()}
    table = w["embedding"] if shape.train_embedding else torch.tensor(np.asarray(embedding, np.float64))
    d = shape.width
    windows = torch.tensor(text[np.asarray(starts)[:, None] + np.arange(length)].astype(np.int64))
    x = functional.pad(table[windows[:, :-1]], (0, 0, 1, 0))
    if shape.has_projections:
        x = x @ w["project_in"]
    for block in range(shape.num_blocks):
        own = {role: w[f"block{block}.{role}"] for role in ("wx", "wh", "gain1", "up", "down", "gain2")}
        lstm = torch.nn.LSTM(d, d, bias=False, batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            lstm.load_state_dict({"weight_ih_l0": own["wx"].T, "weight_hh_l0": own["wh"].T})
            x = x + lstm(functional.layer_norm(x, (d,), own["gain1"]))[0]
        x = x + functional.gelu(functional.layer_norm(x, (d,), own["gain2"]) @ own["up"]) @ own["down"]
    y = functional.layer_norm(x, (d,), w["gain"])
    if shape.has_projections:
        y = y @ w["project_out"]
    return functional.log_softmax(y @ table.T, -1).gather(-1, windows[..., None])[..., 0].numpy()


@EVERY_SHAPE
def test_reference_matches_torch(shape):
    weights, embedding, text = draw(shape, 2, np.float64)
    starts = draw_starts(5, 20)
    expected = [torch_log_proba(shape, flat, embedding, text, starts, 20) for flat in weights]
    got, _ = reference.window_log_proba(shape, weights[0], embedding, text, starts, 20)
    np.testing.assert_allclose(got, expected[0], rtol=1e-10, atol=1e-10)
    losses = reference.window_losses(shape, weights, embedding, text, starts, 20)
    np.testing.assert_allclose(losses, -np.mean(expected, -1), rtol=1e-10)


@EVERY_SHAPE
@pytest.mark.parametrize(("batch", "length"), [(1, 33), (3, 2), (16, 1), (17, 33)])
def test_numba_matches_reference(shape, batch, length):
    weights, embedding, text = draw(shape)
    starts = draw_starts(batch, length)
    exact = weights.astype(np.float64)
    expected, state = reference.window_log_proba(shape, exact[0], embedding, text, starts, length)
    got, got_state = numba.window_log_proba(shape, weights[0], embedding, text, starts, length)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    for part, expected_part in zip(got_state, state, strict=True):
        np.testing.assert_allclose(part, expected_part, rtol=2e-4, atol=2e-4)
    losses = numba.window_losses(shape, weights, embedding, text, starts, length)
    expected = reference.window_losses(shape, exact, embedding, text, starts, length)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4)


@EVERY_SHAPE
def test_a_result_depends_on_its_window_and_candidate_alone(shape):
    weights, embedding, text = draw(shape, 5)
    starts = draw_starts(37, 33)
    losses = numba.window_losses(shape, weights, embedding, text, starts, 33)
    log_proba, (h, c) = numba.window_log_proba(shape, weights[2], embedding, text, starts, 33)
    for b in (0, 15, 16, 36):
        alone = numba.window_losses(shape, weights[2:3], embedding, text, starts[b : b + 1], 33)
        np.testing.assert_array_equal(alone[0, 0], losses[2, b])
        own, (own_h, own_c) = numba.window_log_proba(shape, weights[2], embedding, text, starts[b : b + 1], 33)
        np.testing.assert_array_equal(own[0], log_proba[b])
        np.testing.assert_array_equal(own_h[:, 0], h[:, b])
        np.testing.assert_array_equal(own_c[:, 0], c[:, b])
    np.testing.assert_array_equal(numba.window_losses(shape, weights[::-1], embedding, text, starts, 33)[::-1], losses)
    order = np.random.default_rng().permutation(37)
    moved = numba.window_losses(shape, weights, embedding, text, starts[order], 33)
    np.testing.assert_array_equal(moved, losses[:, order])


def test_calls_in_several_threads_do_not_meet():
    shape = LstmShape(16)
    weights, embedding, text = draw(shape, 8)
    starts = draw_starts(16, 33)
    losses = numba.window_losses(shape, weights, embedding, text, starts, 33)
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda w: numba.window_losses(shape, w[None], embedding, text, starts, 33), weights))
    np.testing.assert_array_equal(np.concatenate(parts), losses)


@BACKENDS
@EVERY_SHAPE
def test_parts_with_a_carried_state_equal_the_whole(backend, shape):
    weights, embedding, text = draw(shape)
    starts = draw_starts(5, 33)
    whole, end = backend.window_log_proba(shape, weights[0], embedding, text, starts, 33)
    parts, state, position = [], None, 0
    for length in (15, 1, 17):
        part, state = backend.window_log_proba(shape, weights[0], embedding, text, starts + position, length, state)
        parts.append(part)
        position += length
    if backend is numba:
        np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
        np.testing.assert_array_equal(state, end)
    else:
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_a_call_leaves_the_state_it_was_given(backend):
    shape = LstmShape(16)
    weights, embedding, text = draw(shape)
    starts = draw_starts(3, 8, lowest=4)
    _, state = backend.window_log_proba(shape, weights[0], embedding, text, starts - 4, 4)
    before = np.copy(state)
    first, _ = backend.window_log_proba(shape, weights[0], embedding, text, starts, 4, state)
    np.testing.assert_array_equal(state, before)
    again, _ = backend.window_log_proba(shape, weights[0], embedding, text, starts, 4, state)
    np.testing.assert_array_equal(first, again)


@BACKENDS
@EVERY_SHAPE
def test_probabilities_of_all_bytes_sum_to_one(backend, shape):
    weights, embedding, text = draw(shape)
    prefix = text[:9]
    candidates = np.concatenate([np.append(prefix, byte) for byte in range(256)]).astype(np.uint8)
    log_proba, _ = backend.window_log_proba(shape, weights[0], embedding, candidates, np.arange(256) * 10, 10)
    np.testing.assert_allclose(np.exp(log_proba[:, -1].astype(np.float64)).sum(), 1, rtol=1e-5)
    # and what came before does not look ahead
    before = np.broadcast_to(log_proba[0, :-1], log_proba[:, :-1].shape)
    if backend is numba:
        np.testing.assert_array_equal(log_proba[:, :-1], before)
    else:
        np.testing.assert_allclose(log_proba[:, :-1], before, rtol=1e-5)


@BACKENDS
def test_the_first_byte_is_predicted_from_nothing(backend):
    shape = LstmShape(16)
    weights, embedding, text = draw(shape)
    log_proba, _ = backend.window_log_proba(shape, weights[0], embedding, text, np.array([0, 7]), 1)
    # a zero input stays zero all the way: every byte is as likely as any other
    np.testing.assert_allclose(log_proba, -np.log(256), rtol=1e-6)


def test_a_candidate_that_is_not_finite_spoils_its_own_losses_alone():
    shape = LstmShape(16)
    weights, embedding, text = draw(shape, 3)
    starts = draw_starts(17, 9)
    losses = numba.window_losses(shape, weights, embedding, text, starts, 9)
    for role in ("block0.wx", "block1.down", "gain"):
        for value in (np.nan, np.inf):
            broken = weights.copy()
            shape.views(broken)[role][1].flat[3] = value
            got = numba.window_losses(shape, broken, embedding, text, starts, 9)
            np.testing.assert_array_equal(got[[0, 2]], losses[[0, 2]])
            if role == "gain" or np.isnan(value):
                assert np.isnan(got[1]).all()


def test_saturated_gates_and_large_logits():
    shape = LstmShape(16)
    weights, embedding, text = draw(shape)
    weights *= 30
    starts = draw_starts(16, 5)
    expected = reference.window_losses(shape, weights.astype(np.float64), embedding, text, starts, 5)
    got = numba.window_losses(shape, weights, embedding, text, starts, 5)
    np.testing.assert_allclose(got, expected, rtol=1e-3)


@pytest.mark.parametrize("d", [8, 24, 32, 64])
def test_parameter_count(d):
    assert LstmShape(d).num_parameters == 32 * d**2 + 5 * d
    assert LstmShape(d, head_width=d).num_parameters == 32 * d**2 + 5 * d
    assert LstmShape(d, head_width=16 if d != 16 else 8).num_parameters == 32 * d**2 + 5 * d + 2 * d * 16
    assert LstmShape(d, num_blocks=1, train_embedding=True).num_parameters == 16 * d**2 + 3 * d + 256 * d


@EVERY_SHAPE
def test_views_cover_the_flat_vector_in_the_order_of_roles(shape):
    flat = np.arange(2 * shape.num_parameters, dtype=np.float32).reshape(2, -1)
    views = shape.views(flat)
    assert list(views) == list(shape.roles)
    assert all(view.shape == (2, *shape.roles[role]) for role, view in views.items())
    assert all(np.shares_memory(view, flat) for view in views.values())
    np.testing.assert_array_equal(np.concatenate([view.reshape(2, -1) for view in views.values()], 1), flat)


@EVERY_SHAPE
def test_gain_mask(shape):
    mask = shape.gain_mask()
    assert mask.dtype == bool
    assert mask.sum() == (2 * shape.num_blocks + 1) * shape.width
    for role, view in shape.views(mask).items():
        assert (view == (role.split(".")[-1] in ("gain", "gain1", "gain2"))).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 0}, "width=0: must be at least 1"),
        ({"width": 16, "head_width": -1}, "head_width=-1: must be at least 1"),
        ({"width": 16, "num_blocks": 0}, "num_blocks=0: must be at least 1"),
    ],
)
def test_sizes_are_refused_in_one_line(sizes, message):
    with pytest.raises(UserError, match=message) as error:
        LstmShape(**sizes)
    assert "\n" not in str(error.value)


@BACKENDS
def test_windows_are_refused_in_one_line(backend):
    shape = LstmShape(8)
    weights, embedding, text = draw(shape)
    no_state = (np.zeros((2, 1, 8), np.float32),) * 2
    for starts, length, state, table, message in (
        ([395], 6, None, embedding, "starts: 395 lies outside"),
        ([-1], 6, None, embedding, "starts: -1 lies outside"),
        ([0], 6, no_state, embedding, "starts: 0 lies outside"),
        ([0], 0, None, embedding, "length=0"),
        ([0], 6, None, None, "embedding: expected shape"),
        ([0], 6, None, np.zeros((256, 4)), "embedding: expected shape"),
    ):
        with pytest.raises(UserError, match=message) as error:
            backend.window_log_proba(shape, weights[0], table, text, np.array(starts), length, state)
        assert "\n" not in str(error.value)


@BACKENDS
def test_no_windows(backend):
    shape = LstmShape(8)
    weights, embedding, text = draw(shape)
    none = np.zeros(0, np.int64)
    assert backend.window_losses(shape, weights, embedding, text, none, 4).shape == (3, 0)
    assert backend.window_losses(shape, weights[:0], embedding, text, np.array([1]), 4).shape == (0, 1)
    assert backend.window_log_proba(shape, weights[0], embedding, text, none, 4)[0].shape == (0, 4)
