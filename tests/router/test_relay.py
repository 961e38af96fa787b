import numpy as np
import pytest
from colonnade.kernels.errors import UserError
from colonnade.router.relay import fit_array_relay, fit_text_relay, load_relay
from colonnade.router.sources import HELDOUT, TRAIN, ArrayCorpus, TextCorpus


def corpus(seed=0):
    rng = np.random.default_rng(seed)
    texts = [bytes(rng.integers(97, 110, 400).tolist()) for _ in range(6)]
    return TextCorpus.from_documents("x", [(str(i), t, [0, 0, 0, 1, 2, 2][i]) for i, t in enumerate(texts)])


def slow_embedding(texts, dim):
    """Counts with a dictionary, everything in float64."""
    counts = np.full((256, 512), 1e-3)
    for text in texts:
        for before, here in zip(b"\0" + text, text, strict=False):
            counts[here, before] += 1
            counts[before, 256 + here] += 1
    joint = counts / counts.sum()
    information = np.maximum(np.log(joint / np.outer(joint.sum(1), joint.sum(0))), 0)
    seen = np.bincount(np.frombuffer(b"".join(texts), np.uint8), minlength=256)
    f = seen / seen.sum()
    # principal directions as eigenvectors of the second moment over byte occurrences
    _, vectors = np.linalg.eigh(sum(f[b] * np.outer(information[b], information[b]) for b in range(256)))
    embedding = information @ vectors[:, ::-1][:, :dim]
    for b in range(256):
        length = np.linalg.norm(embedding[b])
        embedding[b] *= seen[b] / (seen[b] + 100) / length if length > 1e-9 else 0
    embedding -= sum(f[b] * embedding[b] for b in range(256))
    power = np.sqrt(sum(f[b] * embedding[b] ** 2 for b in range(256)))
    return embedding / np.maximum(power, 0.1 * power.max())


def test_embedding_matches_a_slow_reference():
    made = corpus()
    texts = [bytes(made.data[start:end]) for start, end in made.documents(TRAIN)]
    relay = fit_text_relay(made, context=3, dim=4)
    expected = slow_embedding(texts, 4)
    for d in range(4):
        # the sign of a direction is free
        sign = np.sign(relay.embedding[:, d] @ expected[:, d])
        np.testing.assert_allclose(relay.embedding[:, d], sign * expected[:, d], atol=1e-4)
    seen = made.data[made.positions(TRAIN)]
    np.testing.assert_allclose(relay.embedding[seen].mean(0), 0, atol=1e-5)
    assert (np.sqrt((relay.embedding[seen] ** 2).mean(0)) < 1 + 1e-5).all()


def test_features_are_the_embeddings_of_the_bytes_before():
    made = corpus()
    relay = fit_text_relay(made, context=3, dim=4)
    positions = made.positions(HELDOUT)
    features = relay.features(made.data, positions)
    for i in (0, 1, 2, 50):
        expected = np.concatenate([relay.embedding[made.data[positions[i] - lag]] for lag in (1, 2, 3)])
        np.testing.assert_array_equal(features[i], expected)
    # before a document stand zeros, not the document before it
    np.testing.assert_array_equal(features[0], np.tile(relay.embedding[0], 3))


def test_the_other_splits_are_not_looked_at():
    made = corpus()
    changed = made.data.copy()
    for split in (1, 2):
        for start, end in made.documents(split):
            changed[start:end] = 120
    other = TextCorpus("x", changed, made.doc_starts, made.doc_ends, made.doc_split, made.doc_names)
    np.testing.assert_array_equal(fit_text_relay(made).embedding, fit_text_relay(other).embedding)
    x = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    split = np.repeat([0, 1, 2], 10).astype(np.uint8)
    rows = ArrayCorpus("x", x, np.arange(30) % 2, split, 2)
    scaled = ArrayCorpus("x", np.where(split[:, None] > 0, 100, x).astype(np.float32), rows.y, split, 2)
    np.testing.assert_array_equal(fit_array_relay(rows).mean, fit_array_relay(scaled).mean)


@pytest.mark.parametrize("pca", [None, 3])
def test_array_relay_matches_scikit_learn(pca, tmp_path):
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng()
    x = (rng.standard_normal((100, 6)) @ rng.standard_normal((6, 6)) + 5).astype(np.float32)
    x[:, 2] = 7
    split = np.zeros(100, np.uint8)
    split[80:] = 2
    relay = fit_array_relay(ArrayCorpus("x", x, np.zeros(100, np.int64), split, 2), pca)
    got = relay.transform(x)
    expected = StandardScaler().fit(x[:80]).transform(x)
    expected[:, 2] = 0
    if pca:
        expected = PCA(pca, svd_solver="full").fit(expected[:80]).transform(expected)
        signs = np.sign((got * expected).sum(0))
        expected *= signs
    np.testing.assert_allclose(got, expected, atol=1e-3)
    assert relay.num_features == got.shape[1]
    np.testing.assert_array_equal(relay.transform(x[7:8])[0], got[7])
    relay.save(tmp_path)
    np.testing.assert_array_equal(load_relay(tmp_path).transform(x), got)
    with pytest.raises(UserError, match=r"expected \[examples, 6\]"):
        relay.transform(x[:, :5])


def test_bad_settings_and_damage(tmp_path):
    made = corpus()
    with pytest.raises(UserError, match=r"relay\.context=33"):
        fit_text_relay(made, context=33)
    with pytest.raises(UserError, match=r"relay\.dim=0"):
        fit_text_relay(made, dim=0)
    short = TextCorpus.from_documents("tiny", [("a", b"abcd", 0), ("b", b"abc", 1), ("c", b"abc", 2)])
    with pytest.raises(UserError, match="longest training document has 4 bytes"):
        fit_text_relay(short, context=5)
    with pytest.raises(UserError, match=r"relay\.pca=9"):
        fit_array_relay(ArrayCorpus("x", np.ones((9, 4), np.float32), np.zeros(9), np.zeros(9, np.uint8), 2), 9)
    fit_text_relay(made).save(tmp_path)
    (tmp_path / "relay.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="digest differs"):
        load_relay(tmp_path)
