import numpy as np
import pytest
from colonnade.ensemble import mixing
from colonnade.ensemble.metrics import document_interval, path_signs, tree_nats
from colonnade.ensemble.pools import (
    SOFTMAX_POOLS,
    TREE_POOLS,
    check_pool,
    fill_missing,
    log_softmax,
    logistic_weights,
    weighted_sum,
)
from colonnade.kernels.errors import UserError
from colonnade.kernels.mlp_resident.contract import tree_rows, tree_signs
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize


def tree_problem(n=400, areas=3, depth=3):
    rng = np.random.default_rng()
    targets = rng.integers(0, 1 << depth, n)
    signs = path_signs(targets, depth)
    strength = rng.uniform(0.2, 1.5, (areas, depth))
    logits = (signs[:, None] * strength + 1.5 * rng.standard_normal((n, areas, depth))).astype(np.float32)
    return logits, targets, signs


def class_problem(n=300, areas=4, classes=5):
    rng = np.random.default_rng()
    targets = rng.integers(0, classes, n)
    logits = rng.standard_normal((n, areas, classes)) * 1.5
    logits[np.arange(n), :, targets] += rng.uniform(0, 2, areas)
    return logits.astype(np.float32), targets


def test_newton_finds_what_scipy_finds():
    logits, _, signs = tree_problem()
    x, s = logits[:, :, 0].astype(np.float64), signs[:, 0].astype(np.float64)
    got = logistic_weights(x, s)

    def loss(w):
        return np.logaddexp(0, -s * (x @ w)).sum() + 0.5 * ((w - 1 / 3) ** 2).sum()

    expected = minimize(loss, np.zeros(3), method="BFGS", options={"gtol": 1e-8}).x
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_separable_calibration_stays_finite():
    x = np.full((20, 2), 30.0)
    assert np.isfinite(logistic_weights(x, np.ones(20))).all()
    np.testing.assert_allclose(logistic_weights(np.zeros((0, 2)), np.zeros(0)), 0.5)


@pytest.mark.parametrize("head", ["tree", "softmax"])
def test_fitted_pools_beat_the_plain_mean_where_they_are_fitted(head):
    if head == "tree":
        logits, targets, _ = tree_problem()
    else:
        logits, targets = class_problem()
    plain = mixing.losses(mixing.fit(head, "mean_logits", logits, targets), logits, targets).mean()
    known = TREE_POOLS if head == "tree" else SOFTMAX_POOLS
    for pool in set(known) - {"mean_logits", "linear"}:
        assert mixing.losses(mixing.fit(head, pool, logits, targets), logits, targets).mean() < plain


def test_linear_weights_are_optimal_on_the_simplex():
    logits, targets = class_problem()
    got = SOFTMAX_POOLS["linear"].fit(logits, targets)
    assert got.sum() == pytest.approx(1)
    assert (got >= 0).all()
    p = np.exp(np.take_along_axis(log_softmax(logits.astype(np.float64)), targets[:, None, None], 2)[:, :, 0])
    # first-order optimality on the simplex: no vertex has a larger mean likelihood ratio than 1
    assert (p / (p @ got)[:, None]).mean(0).max() < 1 + 1e-4


def test_log_pool_is_optimal():
    logits, targets = class_problem()
    pool = SOFTMAX_POOLS["log"]
    got = pool.fit(logits, targets)

    def loss(w):
        chosen = pool.log_proba(logits.astype(np.float64), w)[np.arange(len(targets)), targets]
        return -chosen.sum() + 0.5 * ((w - 1 / 4) ** 2).sum()

    for direction in np.eye(4):
        assert loss(got) <= loss(got + 0.02 * direction) + 1e-3
        assert loss(got) <= loss(got - 0.02 * direction) + 1e-3


@pytest.mark.parametrize("pool", sorted(SOFTMAX_POOLS))
def test_softmax_pools_give_distributions_whatever_the_batch(pool):
    logits, targets = class_problem()
    weights = SOFTMAX_POOLS[pool].fit(logits, targets)
    log_p = SOFTMAX_POOLS[pool].log_proba(logits, weights)
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1, atol=1e-5)
    for i in (0, 7, 299):
        np.testing.assert_array_equal(SOFTMAX_POOLS[pool].log_proba(logits[i : i + 1], weights)[0], log_p[i])


@given(st.integers(1, 8))
def test_path_signs_agree_with_the_kernels(depth):
    targets = np.arange(1 << depth)
    np.testing.assert_array_equal(path_signs(targets, depth), tree_signs(targets, depth))


def test_tree_losses_of_all_leaves_sum_to_one():
    rng = np.random.default_rng()
    nodes = rng.standard_normal(31)
    rows, signs = tree_rows(np.arange(32), 5), tree_signs(np.arange(32), 5)
    assert np.exp(-tree_nats(nodes[rows], signs)).sum() == pytest.approx(1)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_missing_is_the_mean_of_what_is_there(seed):
    rng = np.random.default_rng(seed)
    opinions = rng.standard_normal((20, 4, 3)).astype(np.float32)
    present = rng.random((20, 4)) < 0.5
    poisoned = np.where(present[:, :, None], opinions, np.nan).astype(np.float32)
    fallback = rng.standard_normal(3).astype(np.float32)
    got = fill_missing(poisoned.copy(), present, fallback)
    for i in range(20):
        held = opinions[i][present[i]]
        expected = held.mean(0) if len(held) else fallback
        np.testing.assert_array_equal(got[i][present[i]], held)
        np.testing.assert_allclose(
            got[i][~present[i]], np.broadcast_to(expected, (int((~present[i]).sum()), 3)), atol=1e-6
        )


def test_only_the_best_areas_are_used_on_request():
    logits, targets, _ = tree_problem(areas=5)
    alone = mixing.area_losses("tree", logits, targets).mean(0)
    fitted = mixing.fit("tree", "logistic", logits, targets, top_k=2)
    used = np.flatnonzero(fitted.weights.any(1))
    assert sorted(used) == sorted(np.argsort(alone)[:2])
    np.testing.assert_array_equal(mixing.Mixing.from_json(fitted.to_json()).weights, fitted.weights)
    for k in (0, 6):
        with pytest.raises(UserError, match=f"ensemble.k={k}"):
            mixing.fit("tree", "logistic", logits, targets, top_k=k)


def test_weighted_sum_by_area_and_by_column():
    opinions = np.random.default_rng().standard_normal((5, 3, 4)).astype(np.float32)
    weights = np.array([0.2, 0.3, 0.5])
    np.testing.assert_allclose(weighted_sum(opinions, weights), np.einsum("nak,a->nk", opinions, weights), atol=1e-6)
    columns = np.random.default_rng().random((3, 4))
    np.testing.assert_allclose(weighted_sum(opinions, columns), np.einsum("nak,ak->nk", opinions, columns), atol=1e-6)


@pytest.mark.parametrize(("pool", "head"), [("linear", "tree"), ("logistic", "softmax"), ("magic", "tree")])
def test_pools_that_do_not_fit_the_head(pool, head):
    with pytest.raises(UserError, match="known:"):
        check_pool(pool, head)


def test_document_interval_covers_and_narrows():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(100):
        documents = np.repeat(np.arange(40), rng.integers(50, 150, 40))
        bits = (2 + rng.standard_normal(40))[documents] + rng.standard_normal(len(documents))
        low, high = document_interval(bits, documents, seed=trial, draws=400)
        covered += low < 2 < high
    assert 85 <= covered <= 100
    one = document_interval(np.array([1.0, 3.0]), np.array([5, 5]), seed=0)
    assert one == (2.0, 2.0)
