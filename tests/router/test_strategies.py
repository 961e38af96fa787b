from collections import Counter, defaultdict

import numpy as np
import pytest
from colonnade.kernels.errors import UserError
from colonnade.router import partition as partitions
from colonnade.router.metrics import load_metrics
from colonnade.router.relay import fit_array_relay, fit_text_relay
from colonnade.router.router import Router, RouterConfig, routed_data
from colonnade.router.sources import PAD, TRAIN, TextCorpus, arrays, split_documents
from colonnade.router.strategies import STRATEGIES, AreaConfig
from hypothesis import given, settings
from hypothesis import strategies as st

WORD = set(b"0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def text_corpus(seed=0, size=40_000):
    rng = np.random.default_rng(seed)
    words = [bytes(rng.integers(97, 123, rng.integers(1, 7)).tolist()) for _ in range(40)]
    chosen = rng.zipf(1.6, size // 3) % 40
    content = b" ".join(words[i] for i in chosen)[:size] + b" " * 2000
    return split_documents("x", [("a", content)], seed)


def fitted(config, corpus):
    relay = fit_text_relay(corpus, 4, 5) if isinstance(corpus, TextCorpus) else fit_array_relay(corpus)
    data = routed_data(corpus, relay)
    area, assigned = STRATEGIES[config.strategy].fit(config, data, corpus.positions(TRAIN), relay)
    return area, assigned, data


def context(data, position, config, level):
    """What a hash looks at after `level` splits, as a tuple: the slow truth that keys stand for."""
    found = []
    if config.word:
        p = position - 1
        for word in range(config.word):
            if word:
                stop = p - 8
                while p > stop and data[p] != 0 and data[p] not in WORD:
                    p -= 1
            own = bytearray()
            stop = p - 24
            while p > stop and data[p] in WORD:
                own.append(data[p])
                p -= 1
            found.append(bytes(own))
    found += [int(data[position - lag]) for lag in config.lags]
    further = [lag for lag in range(1, PAD + 1) if lag not in config.lags]
    return (*found, *(int(data[position - lag]) for lag in further[:level]))


AREAS = [
    AreaConfig("a", "hash", 16, lags=(1,)),
    AreaConfig("b", "hash", 64, lags=(2, 1)),
    AreaConfig("c", "hash", 7, word=1),
    AreaConfig("d", "hash", 30, lags=(3,), word=2),
    AreaConfig("e", "hash", 300, lags=(1, 2, 3, 4)),
]


@pytest.mark.parametrize("config", AREAS, ids=lambda c: c.name)
def test_hash_routes_by_contexts_split_where_they_are_heavy(config):
    corpus = text_corpus()
    area, assigned, data = fitted(config, corpus)
    positions = corpus.positions(TRAIN)
    # slow reference: find the level at which each position's context is light enough
    finest = len(positions) * config.slack / config.experts
    split_at = finest
    while True:
        active, leaf = list(range(len(positions))), {}
        for level in range(PAD + 1):
            keys = {i: context(data, positions[i], config, level) for i in active}
            counts = Counter(keys.values())
            heavy = {key for key, count in counts.items() if count > split_at and level < PAD - len(config.lags)}
            leaf.update({i: key for i, key in keys.items() if key not in heavy})
            active = [i for i in active if keys[i] in heavy]
            if not active:
                break
        if len(set(leaf.values())) >= config.experts or split_at < 1:
            break
        split_at /= 2
    experts_of = defaultdict(set)
    for i, key in leaf.items():
        experts_of[key].add(int(assigned[i]))
    assert all(len(experts) == 1 for experts in experts_of.values()), "a context goes to one expert"
    loads = np.bincount(assigned, minlength=config.experts)
    heaviest = Counter(leaf.values())
    assert (loads > 0).all(), "every expert of an area holds inputs"
    # capacity holds, but for contexts that cannot be split any further
    assert loads.max() <= max(finest, max(heaviest.values())) + 1
    # unseen text is routed by the same contexts, whatever else stands in it
    fresh = np.concatenate([np.zeros(PAD, np.uint8), data[positions[200:900]]])
    there = area.assign(fresh, np.arange(PAD + PAD + 30, len(fresh)))
    known = {int(p): int(e) for p, e in zip(positions, assigned, strict=True)}
    again = [known[int(positions[200 + PAD + 30 + i])] for i in range(len(there))]
    same_document = np.diff(positions[200:900]).max() == 1
    assert not same_document or there.tolist() == again


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50), st.floats(1, 3))
def test_hash_invariants(seed, experts, slack):
    corpus = text_corpus(seed, 5000)
    config = AreaConfig("a", "hash", experts, lags=(1,), slack=slack)
    area, assigned, data = fitted(config, corpus)
    positions = corpus.positions(TRAIN)
    assert len(assigned) == len(positions), "nothing is dropped"
    assert assigned.min() >= 0
    assert assigned.max() < experts
    np.testing.assert_array_equal(area.assign(data, positions), assigned)
    order = np.random.default_rng(seed).permutation(len(positions))
    np.testing.assert_array_equal(area.assign(data, positions[order]), assigned[order])


def rows_corpus():
    from sklearn.datasets import make_blobs

    x, y = make_blobs(600, 5, centers=7, random_state=0)
    return arrays.build("x", x, y, None, 0)


@pytest.mark.parametrize("corpus", [text_corpus(), rows_corpus()], ids=["text", "rows"])
def test_kmeans_keeps_to_capacity_and_uses_the_nearest(corpus):
    config = AreaConfig("k", "kmeans", 12, slack=1.25)
    area, assigned, data = fitted(config, corpus)
    positions = corpus.positions(TRAIN)
    loads = np.bincount(assigned, minlength=12)
    assert loads.max() <= np.ceil(1.25 * len(positions) / 12)
    assert loads.sum() == len(positions)
    nearest = area.assign(data, positions)
    assert area.overflow == (nearest != assigned).sum()
    relay = area.relay
    features = relay.features(data, positions) if data.ndim == 1 else data[positions]
    distances = ((features[:, None].astype(np.float64) - area.centroids[None]) ** 2).sum(2)
    chosen = np.take_along_axis(distances, nearest[:, None].astype(int), 1)[:, 0]
    np.testing.assert_allclose(chosen, distances.min(1), atol=1e-3)
    assert distances.min(1).mean() < 0.8 * ((features - features.mean(0)) ** 2).sum(1).mean()


def test_more_experts_than_distinct_points_leaves_cold_ones():
    x = np.repeat(np.arange(4.0), 30)[:, None]
    corpus = arrays.build("x", x, np.arange(120) % 2, None, 0)
    _, assigned, _ = fitted(AreaConfig("k", "kmeans", 10, slack=10), corpus)
    assert len(np.unique(assigned)) == 4


def test_random_depends_on_position_and_seed_alone():
    corpus = text_corpus()
    area, assigned, data = fitted(AreaConfig("r", "random", 50, seed=1), corpus)
    positions = corpus.positions(TRAIN)
    np.testing.assert_array_equal(area.assign(data, positions[::7]), assigned[::7])
    other = fitted(AreaConfig("r", "random", 50, seed=2), corpus)[1]
    assert (other == assigned).mean() < 0.1
    loads = np.bincount(assigned, minlength=50)
    assert ((loads - loads.mean()) ** 2 / loads.mean()).sum() < 49 + 6 * np.sqrt(98)


def make_router(corpus):
    areas = tuple(
        AreaConfig(name, name, 20 + i, lags=(1,) if name == "hash" else (), seed=3)
        for i, name in enumerate(sorted(STRATEGIES))
    )
    relay = fit_text_relay(corpus, 4, 5)
    return Router.fit(RouterConfig(areas), corpus, relay), relay


def test_router_ids_are_global_and_survive_a_round_trip(tmp_path):
    corpus = text_corpus()
    (router, assigned), relay = make_router(corpus)
    assert router.first_expert.tolist() == [0, 20, 41, 63]
    for a in range(3):
        assert assigned[:, a].min() >= router.first_expert[a]
        assert assigned[:, a].max() < router.first_expert[a + 1]
    router.save(tmp_path)
    again = Router.load(tmp_path, relay)
    positions = np.arange(PAD + 50, 3000)
    np.testing.assert_array_equal(router.assign(corpus.data, positions), again.assign(corpus.data, positions))
    assert [area.overflow for area in again.areas] == [area.overflow for area in router.areas]
    (refit, same), _ = make_router(corpus)
    np.testing.assert_array_equal(same, assigned, "the same seed gives the same assignment")
    (tmp_path / "router.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="digest differs"):
        Router.load(tmp_path, relay)
    assert refit.num_experts == 63


def test_partition_holds_every_input_once_and_round_trips(tmp_path):
    corpus = text_corpus()
    (router, assigned), _ = make_router(corpus)
    positions = corpus.positions(TRAIN)
    areas = partitions.build(assigned, positions, router.first_expert)
    partitions.save(tmp_path / "p", areas)
    opened = partitions.open_partition(tmp_path / "p")
    for a, (area, stored) in enumerate(zip(areas, opened, strict=True)):
        np.testing.assert_array_equal(np.sort(area.indices), positions)
        for expert in range(len(area.offsets) - 1):
            own = area.indices[area.offsets[expert] : area.offsets[expert + 1]]
            expected = positions[assigned[:, a] == router.first_expert[a] + expert]
            np.testing.assert_array_equal(own, expected)
        offsets, indices = stored.group(5, 9)
        np.testing.assert_array_equal(indices, area.indices[area.offsets[5] : area.offsets[14]])
        assert offsets[0] == 0
        assert offsets[-1] == len(indices)
    np.testing.assert_array_equal(partitions.sizes(opened), np.concatenate([np.diff(area.offsets) for area in areas]))
    with pytest.raises(UserError, match="no readable partition"):
        partitions.open_partition(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: RouterConfig(()), "at least one area"),
        (lambda: RouterConfig((AreaConfig("a", "magic", 3),)), "known: hash, kmeans, random"),
        (lambda: AreaConfig("a", "hash", 0), "experts=0"),
        (lambda: AreaConfig("a", "hash", 3, lags=(0,)), r"lags=\[0\]"),
        (lambda: AreaConfig("a", "hash", 3, lags=(1, 1)), "different numbers"),
        (lambda: AreaConfig("a", "hash", 3, word=3), "word=3"),
        (lambda: AreaConfig("a", "hash", 3, slack=0.5), "slack=0.5"),
        (lambda: fitted(AreaConfig("a", "hash", 3), text_corpus()), r"needs lags=\[1,...\] or word=1"),
        (lambda: fitted(AreaConfig("a", "hash", 3, lags=(1,)), rows_corpus()), "needs text"),
    ],
)
def test_areas_that_cannot_be(build, words):
    with pytest.raises(UserError, match=words):
        build()


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50))
def test_load_metrics_match_their_definitions(sizes):
    got = load_metrics(np.array(sizes))
    total = sum(sizes)
    assert got["cold"] == sizes.count(0)
    if total:
        count = len(sizes)
        assert got["max_over_mean"] == pytest.approx(max(sizes) * count / total)
        gini = sum(abs(a - b) for a in sizes for b in sizes) / (2 * count * total)
        assert got["gini"] == pytest.approx(gini, abs=1e-9)
        share = np.array([size / total for size in sizes if size])
        assert got["effective_experts"] == pytest.approx(np.exp(-(share * np.log(share)).sum()))
