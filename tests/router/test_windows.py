import numpy as np
import pytest
from colonnade.kernels.errors import UserError
from colonnade.router.sources import CALIBRATION, HELDOUT, TRAIN, TextCorpus
from colonnade.router.windows import balanced
from colonnade.router.windows.balanced import balanced_spherical_kmeans, bounds
from colonnade.router.windows.cutting import windows
from colonnade.router.windows.router import WindowRouter
from colonnade.router.windows.tfidf import TfidfSvd
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from sklearn.feature_extraction.text import TfidfVectorizer

TOPICS = 6


def word(number):
    return "".join(chr(97 + (number // 20**place) % 20) for place in range(5)) + "xyz"


def topic_text(topic, size, rng):
    """Words of a topic, half of them from a pool that all topics share."""
    own = rng.integers(0, 60, size // 5) + 100 * (topic + 1)
    shared = rng.integers(0, 100, size // 5)
    chosen = np.where(rng.random(size // 5) < 0.5, own, shared)
    return " ".join(word(int(i)) for i in chosen).encode()[:size]


def topic_corpus(documents=96, size=2100, seed=0):
    """Documents of one topic each, topics in turn; every eighth is held out."""
    rng = np.random.default_rng(seed)
    entries = [(f"{i}", topic_text(i % TOPICS, size, rng), HELDOUT if i % 8 == 7 else TRAIN) for i in range(documents)]
    return TextCorpus.from_documents("topics", entries)


def topics_of(corpus, starts):
    return np.array([int(corpus.doc_names[i]) % TOPICS for i in corpus.doc_of(starts)])


def unit_rows(n, dim, seed):
    x = np.random.default_rng(seed).standard_normal((n, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def planted(clusters, each, dim=16, noise=0.15, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(clusters), each))
    x = unit_rows(clusters, dim, seed + 1)[labels] + noise * rng.standard_normal((len(labels), dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.fixture(scope="module")
def fitted():
    corpus = topic_corpus()
    return corpus, *WindowRouter.fit(corpus, 512, 128, TOPICS, 32, 1.0, 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 120))
def test_windows_fill_single_documents_from_their_start(sizes, length):
    corpus = TextCorpus.from_documents("x", [(f"{i}", b"a" * size, TRAIN) for i, size in enumerate(sizes)])
    if max(sizes) < length:
        with pytest.raises(UserError, match=f"x: no document of the train split holds a window of {length} bytes"):
            windows(corpus, TRAIN, length)
        return
    starts, dropped = windows(corpus, TRAIN, length)
    assert starts.dtype == np.int64
    assert dropped == sum(size % length for size in sizes)
    assert len(starts) == sum(size // length for size in sizes)
    covered = (starts[:, None] + np.arange(length)).ravel()
    assert len(np.unique(covered)) == len(covered), "windows do not overlap"
    assert np.isin(covered, corpus.positions(TRAIN)).all(), "nor reach into padding"
    np.testing.assert_array_equal(corpus.doc_of(starts), corpus.doc_of(starts + length - 1))


def test_windows_keep_to_their_split():
    corpus = topic_corpus()
    starts, _ = windows(corpus, HELDOUT, 512)
    assert (corpus.doc_split[corpus.doc_of(starts)] == HELDOUT).all()
    with pytest.raises(UserError, match=r"calibration split holds a window of 512 bytes \(the longest has 0\)"):
        windows(corpus, CALIBRATION, 512)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.floats(1, 3), st.integers(0, 100), st.booleans())
@example(90, 90, 1.0, 0, True)
@example(37, 36, 1.0, 0, False)
@example(37, 1, 1.0, 0, False)
def test_every_row_finds_a_cluster_within_the_bounds(n, clusters, slack, seed, duplicates):
    clusters = min(n, clusters)
    x = unit_rows(n, 5, seed)
    if duplicates:
        x[: n // 2] = x[0]
        x[n // 2 : 2 * n // 3] = 0
    centroids, assigned = balanced_spherical_kmeans(x, clusters, slack, 4, seed)
    loads = np.bincount(assigned, minlength=clusters)
    assert assigned.dtype == np.int32
    assert len(loads) == clusters
    assert loads.max() <= np.ceil(slack * n / clusters)
    assert loads.min() >= bounds(n, clusters, slack)[0] >= 1
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)
    again = balanced_spherical_kmeans(x, clusters, slack, 4, seed)
    np.testing.assert_array_equal(again[0], centroids)
    np.testing.assert_array_equal(again[1], assigned)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_without_slack_sizes_differ_by_one_at_most(n, clusters):
    n, clusters = max(n, clusters), min(n, clusters)
    assert bounds(n, clusters, 1.0) == (n // clusters, -(-n // clusters))


@pytest.mark.parametrize("clusters", [2, 5, 20])
def test_planted_clusters_are_recovered(clusters):
    x, labels = planted(clusters, 40)
    centroids, assigned = balanced_spherical_kmeans(x, clusters, 1.0, 20, 0)
    table = np.zeros((clusters, clusters), int)
    np.add.at(table, (labels, assigned), 1)
    assert table[linear_sum_assignment(-table)].sum() >= 0.98 * len(x)
    cosine = (x * centroids[assigned]).sum(1).mean()
    shuffled = np.random.default_rng(0).permutation(assigned)
    sums = np.zeros_like(centroids)
    np.add.at(sums, shuffled, x)
    assert cosine > 1.3 * np.linalg.norm(sums, axis=1).sum() / len(x)
    assert ((x @ centroids.T).argmax(1) == assigned).mean() > 0.97


def test_assignment_is_near_the_best_under_its_bounds():
    x = unit_rows(240, 8, 0)
    centroids, assigned = balanced_spherical_kmeans(x, 12, 1.0, 20, 0)
    scores = x @ centroids.T
    rows, places = linear_sum_assignment(-np.repeat(scores, 20, axis=1))
    assert scores[np.arange(240), assigned].sum() > 0.97 * scores[rows, places // 20].sum()


def test_rows_with_most_to_lose_choose_first():
    centroids = np.eye(2, dtype=np.float32)
    angles = np.array([0.7, 0.1, 0.2, 1.4])
    x = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    assert balanced._assign(x, centroids, 2, 2).tolist() == [1, 0, 0, 1]


def test_more_clusters_than_seeding_steps():
    x, _ = planted(300, 2, noise=0.02)
    centroids, assigned = balanced_spherical_kmeans(x, 300, 1.0, 5, 0)
    assert (np.bincount(assigned, minlength=300) == 2).all()
    assert (x * centroids[assigned]).sum(1).mean() > 0.9


@pytest.mark.slow
def test_about_as_many_clusters_as_rows():
    x = unit_rows(12_000, 32, 0)
    _, assigned = balanced_spherical_kmeans(x, 10_240, 1.0, 1, 0)
    loads = np.bincount(assigned, minlength=10_240)
    assert set(loads.tolist()) == {1, 2}


def test_embedding_is_scikit_learns():
    rng = np.random.default_rng(0)
    texts = [topic_text(i % TOPICS, 400, rng) + b" the and \xff\xfe" for i in range(80)]
    embedding, note = TfidfSvd.fit(texts, 10, 0)
    vectorizer = TfidfVectorizer(sublinear_tf=True, min_df=5, stop_words="english", decode_error="replace")
    weights = vectorizer.fit_transform(texts)
    assert embedding.vocabulary == vectorizer.get_feature_names_out().tolist()
    assert "the" not in embedding.vocabulary
    x = weights @ embedding.components.T.astype(np.float64)
    x -= x.mean(0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(embedding.transform(texts), x, atol=1e-5)
    assert note == ""
    assert embedding.components.shape == (10, len(embedding.vocabulary))
    # randomised, but close to the best projection there is
    best = np.linalg.svd(weights.toarray(), compute_uv=False)[:10]
    assert np.linalg.norm(weights @ embedding.components.T) > 0.99 * np.linalg.norm(best)


def test_embedding_of_a_text_stands_alone_and_survives_a_round_trip(tmp_path):
    rng = np.random.default_rng(1)
    texts = [topic_text(i % TOPICS, 300, rng) for i in range(60)]
    embedding, _ = TfidfSvd.fit(texts, 16, 7)
    x = embedding.transform([*texts, b"", b"neverseen otherword", b"\xff\x00\x80"])
    assert x.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(x[:60], axis=1), 1, atol=1e-6)
    assert not x[60:].any(), "texts without a known word are zero rows"
    for i in (0, 17, 61):
        np.testing.assert_array_equal(embedding.transform([[*texts, b"", b"neverseen otherword"][i]])[0], x[i])
    assert embedding.transform([]).shape == (0, 16)
    embedding.save(tmp_path)
    again = TfidfSvd.load(tmp_path)
    assert again.vocabulary == embedding.vocabulary
    np.testing.assert_array_equal(again.transform(texts), x[:60])
    same, _ = TfidfSvd.fit(texts, 16, 7)
    np.testing.assert_array_equal(same.transform(texts), x[:60], "the same seed gives the same embedding")


def test_words_beyond_ascii_survive_a_round_trip(tmp_path):
    texts = ["größe été слово слово".encode()] * 6
    embedding, note = TfidfSvd.fit(texts, 50, 0)
    assert note == "dim=50 became 3: 6 windows with 3 words allow no more"
    embedding.save(tmp_path)
    assert TfidfSvd.load(tmp_path).vocabulary == ["größe", "été", "слово"]
    assert not embedding.transform(texts).any(), "equal texts have no direction"


def test_features_are_the_most_frequent_words():
    embedding, _ = TfidfSvd.fit([b"aaa aaa bbb bbb bbb ccc"] * 5 + [b"ddd"], 2, 0, max_features=2)
    assert embedding.vocabulary == ["aaa", "bbb"]


def test_router_finds_topics_and_shares_them_out_equally(fitted):
    corpus, router, starts, assigned = fitted
    assert assigned.dtype == np.int32
    assert len(assigned) == len(starts) == 84 * 4
    loads = np.bincount(assigned, minlength=TOPICS)
    assert loads.max() - loads.min() <= 1
    table = np.zeros((TOPICS, TOPICS), int)
    np.add.at(table, (topics_of(corpus, starts), assigned), 1)
    assert table[linear_sum_assignment(-table)].sum() > 0.9 * len(starts)
    assert router.notes[0] == f"{84 * 52} training bytes at the ends of documents fill no window"


def test_a_prefix_is_routed_as_its_window_is(fitted):
    corpus, router, _, _ = fitted
    starts, _ = windows(corpus, HELDOUT, 512)
    texts = [corpus.data[start : start + 512].tobytes() for start in starts]
    whole = (router.embedding.transform(texts) @ router.centroids.T).argmax(1)
    ids, scores = router.assign([text[:128] for text in texts], 3)
    assert (ids[:, 0] == whole).mean() > 0.8, "chance is 1 in 6"
    assert (ids == whole[:, None]).any(1).mean() > 0.95
    np.testing.assert_array_equal(router.assign(texts, 3)[0], ids, "nothing beyond the prefix counts")
    np.testing.assert_array_equal(router.assign(texts[5:6], 3)[1], scores[5:6])
    assert ids.dtype == np.int32
    assert scores.dtype == np.float32
    assert (np.diff(scores, axis=1) <= 1e-6).all(), "nearest first"
    x = router.embedding.transform([text[:128] for text in texts])
    np.testing.assert_allclose(scores, np.sort(x @ router.centroids.T, axis=1)[:, :-4:-1], atol=1e-6)


def test_router_survives_a_round_trip(fitted, tmp_path):
    corpus, router, starts, assigned = fitted
    router.save(tmp_path)
    again = WindowRouter.load(tmp_path)
    texts = [*(corpus.data[start : start + 512].tobytes() for start in starts[:50]), b"", b"unseenword"]
    for got, expected in zip(again.assign(texts, 4), router.assign(texts, 4), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (again.length, again.prefix, again.notes) == (512, 128, router.notes)
    assert router.assign(texts, 2)[0][-1].tolist() == [0, 1], "no known word"
    _, same_starts, same = WindowRouter.fit(corpus, 512, 128, TOPICS, 32, 1.0, 3)
    np.testing.assert_array_equal(same, assigned)
    np.testing.assert_array_equal(same_starts, starts)
    (tmp_path / "windows.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"no readable window router \(digest differs\)"):
        WindowRouter.load(tmp_path)
    (tmp_path / "tfidf.json").unlink()
    with pytest.raises(UserError, match="no readable window embedding"):
        WindowRouter.load(tmp_path)


def test_one_expert_needs_no_words(tmp_path):
    content = np.random.default_rng(0).bytes(5000)
    corpus = TextCorpus.from_documents("noise", [("a", content, TRAIN)])
    router, starts, assigned = WindowRouter.fit(corpus, 1024, 256, 1, 128, 1.0, 0)
    assert len(starts) == 4
    assert assigned.tolist() == [0] * 4
    router.save(tmp_path)
    ids, scores = WindowRouter.load(tmp_path).assign([content[:256], b""], 1)
    assert ids.tolist() == [[0], [0]]
    assert scores.tolist() == [[0], [0]]


def test_as_many_experts_as_windows():
    corpus = topic_corpus(24)
    _, starts, assigned = WindowRouter.fit(corpus, 512, 128, 84, 32, 1.0, 0)
    assert len(starts) == 84
    assert sorted(assigned.tolist()) == list(range(84))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: windows(topic_corpus(8), TRAIN, 0), "length=0"),
        (lambda: WindowRouter.fit(topic_corpus(8), 512, 600, 2), "prefix=600: must be between 1 and the window"),
        (lambda: WindowRouter.fit(topic_corpus(8), 512, 0, 2), "prefix=0"),
        (lambda: WindowRouter.fit(topic_corpus(8), 512, 128, 29), "num_experts=29: must be between 1 and 28"),
        (lambda: WindowRouter.fit(topic_corpus(8), 512, 128, 0), "num_experts=0"),
        (lambda: WindowRouter.fit(topic_corpus(8), 512, 128, 1)[0].assign([b""], 2), "top_k=2"),
        (lambda: TfidfSvd.fit([b"one two"] * 4, 2, 0), "fewer than two words occur in at least 5 of 4 windows"),
        (lambda: TfidfSvd.fit([b"the and"] * 9, 2, 0), "fewer than two words"),
        (lambda: TfidfSvd.fit([bytes([97 + i] * 3) for i in range(9)], 2, 0), "fewer than two words"),
        (lambda: TfidfSvd.fit([b"single"] * 9, 2, 0), "fewer than two words"),
        (lambda: TfidfSvd.fit([b"one two"] * 9, 0, 0), "dim=0"),
        (lambda: balanced_spherical_kmeans(unit_rows(3, 2, 0), 4), "num_experts=4: must be between 1 and 3"),
        (lambda: balanced_spherical_kmeans(unit_rows(3, 2, 0), 2, 0.9), "slack=0.9"),
        (lambda: balanced_spherical_kmeans(unit_rows(3, 2, 0), 2, 1.0, 0), "iterations=0"),
        (lambda: balanced_spherical_kmeans(np.full((3, 2), np.nan), 2), "not finite"),
    ],
)
def test_routers_that_cannot_be(build, words):
    with pytest.raises(UserError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)
