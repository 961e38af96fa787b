import numpy as np
import pytest
from colonnade.kernels.errors import UserError
from colonnade.router.sources import (
    CALIBRATION,
    HELDOUT,
    PAD,
    TRAIN,
    SourceConfig,
    TextCorpus,
    arrays,
    load_corpus,
    load_source,
    split_documents,
)
from colonnade.router.sources.splits import cluster_near_copies, fraction, split_rows
from hypothesis import given, settings
from hypothesis import strategies as st


def lines(rng, count):
    return b"\n".join(bytes(rng.integers(97, 123, 12).tolist()) for _ in range(count)) + b"\n"


def many_documents(count=200, seed=None):
    rng = np.random.default_rng(seed)
    return [(f"folder/{i:03d}.txt", lines(rng, int(rng.integers(5, 40)))) for i in range(count)]


def split_of(corpus):
    return dict(zip(corpus.doc_names, corpus.doc_split.tolist(), strict=True))


def test_documents_are_laid_out_with_zeros_before_each():
    documents = many_documents(60)
    corpus = split_documents("x", documents, 0)
    content = dict(documents)
    for name, start, end in zip(corpus.doc_names, corpus.doc_starts, corpus.doc_ends, strict=True):
        assert bytes(corpus.data[start:end]) == content[name]
        assert not corpus.data[start - PAD : start].any()


def test_splits_share_no_byte_and_leave_none_out():
    corpus = split_documents("x", many_documents(), 0)
    positions = [corpus.positions(split) for split in (TRAIN, CALIBRATION, HELDOUT)]
    every = np.concatenate(positions)
    assert (
        len(np.unique(every))
        == len(every)
        == sum(end - start for start, end in zip(corpus.doc_starts, corpus.doc_ends, strict=True))
    )
    for split, own in enumerate(positions):
        assert len(own) == corpus.count(split) > 0
        assert set(corpus.doc_split[corpus.doc_of(own)].tolist()) == {split}


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(60, 150))
def test_nothing_moves_when_unrelated_documents_are_added(seed, kept):
    documents = many_documents(200, seed)
    few = split_of(split_documents("x", documents[:kept], 3))
    many = split_of(split_documents("x", documents, 3))
    # a split that would be empty borrows a document; only that one may differ
    moved = [name for name in few if few[name] != many[name]]
    empty = sum(
        all(fraction(n, 3) >= high or fraction(n, 3) < low for n in few) for low, high in ((0, 0.05), (0.05, 0.1))
    )
    assert len(moved) <= empty


def test_shares_are_about_ninety_five_five():
    corpus = split_documents("x", many_documents(3000, 1), 0)
    shares = np.bincount(corpus.doc_split) / len(corpus.doc_split)
    assert abs(shares[HELDOUT] - 0.05) < 0.015
    assert abs(shares[CALIBRATION] - 0.05) < 0.015


def test_near_copies_fall_in_one_split_wherever_their_names_hash():
    rng = np.random.default_rng(0)
    documents = many_documents(200, 0)
    for family in range(40):
        body = lines(rng, 40)
        for copy in range(3):
            documents.append((f"copy{copy}/family{family}.py", body + lines(rng, 10)))
    corpus = split_documents("x", documents, 0)
    splits = split_of(corpus)
    used = set()
    for family in range(40):
        own = {splits[f"copy{copy}/family{family}.py"] for copy in range(3)}
        assert len(own) == 1
        used |= own
    assert len(used) > 1


def test_clusters_match_a_pairwise_reference():
    rng = np.random.default_rng()
    pool = [lines(rng, 1) for _ in range(60)]
    documents = [b"".join(pool[i] for i in rng.choice(60, int(rng.integers(5, 25)), replace=False)) for _ in range(30)]
    got = cluster_near_copies(documents)
    sets = [set(document.split()) for document in documents]
    holders = {line: sum(line in own for own in sets) for line in set().union(*sets)}
    sets = [{line for line in own if holders[line] <= 20} for own in sets]
    parent = list(range(30))
    changed = True
    while changed:
        changed = False
        for a in range(30):
            for b in range(30):
                shared = len(sets[a] & sets[b])
                if a != b and shared >= 5 and shared > 0.5 * min(len(sets[a]), len(sets[b])) and parent[a] != parent[b]:
                    parent[a] = parent[b] = min(parent[a], parent[b])
                    changed = True
    assert got == parent


@pytest.mark.parametrize("size", [3 * 1024, 10_000, 200_000, 9_000_000])
def test_one_file_is_cut_into_blocks(size):
    content = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8).tobytes()
    corpus = split_documents("x", [("big", content)], 0)
    lengths = corpus.doc_ends - corpus.doc_starts
    assert lengths.sum() == size
    assert lengths.max() <= 64 << 10
    assert {TRAIN, CALIBRATION, HELDOUT} == set(corpus.doc_split.tolist())
    assert size < 60 * (64 << 10) or lengths.max() == 64 << 10


def test_the_standard_library_is_there_without_tests():
    corpus = load_source(SourceConfig("stdlib"))
    assert isinstance(corpus, TextCorpus)
    assert corpus.count(TRAIN) > 5_000_000
    assert "json/decoder.py" in corpus.doc_names
    assert not any("site-packages" in name or "/test/" in f"/{name}" for name in corpus.doc_names)
    thin = load_source(SourceConfig("stdlib", fraction=0.1))
    assert set(thin.doc_names) < set(corpus.doc_names)
    assert 0.05 < len(thin.doc_names) / len(corpus.doc_names) < 0.15
    whole = split_of(corpus)
    assert sum(whole[name] != split for name, split in split_of(thin).items()) < 5


def test_a_thinned_small_text_is_still_there(tmp_path):
    (tmp_path / "one").write_bytes(b"abcdefgh" * 600)
    whole = load_source(SourceConfig("text", str(tmp_path / "one")))
    thin = load_source(SourceConfig("text", str(tmp_path / "one"), fraction=0.1))
    assert thin.digest == whole.digest


def test_round_trip_and_damage(tmp_path):
    corpus = split_documents("x", many_documents(60), 0)
    corpus.save(tmp_path)
    again = load_corpus(tmp_path)
    assert again.digest == corpus.digest
    np.testing.assert_array_equal(again.data, corpus.data)
    assert again.doc_names == corpus.doc_names
    path = tmp_path / "source.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="digest differs"):
        load_corpus(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="no readable source"):
        load_corpus(tmp_path)


def test_text_from_file_folder_and_glob(tmp_path):
    for name, content in many_documents(80):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden").write_bytes(b"x" * 5000)
    folder = load_source(SourceConfig("text", str(tmp_path)))
    pattern = load_source(SourceConfig("text", str(tmp_path / "folder" / "*.txt")))
    assert sorted(folder.doc_names) == [f"folder/{i:03d}.txt" for i in range(80)]
    assert sorted(pattern.doc_names) == [f"{i:03d}.txt" for i in range(80)]
    one = tmp_path / "one"
    one.write_bytes(b"abc" * 4000)
    assert load_source(SourceConfig("text", str(one))).count(TRAIN) > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: SourceConfig("text", None), "source.path: not given"),
        (lambda p: SourceConfig("text", str(p / "nothing")), "no such file"),
        (lambda p: SourceConfig("text", str(p)), "holds no files"),
        (lambda p: SourceConfig("text", str(_write(p / "empty", b""))), "empty file"),
        (lambda p: SourceConfig("text", str(_write(p / "short", b"abc"))), "too few to split"),
        (lambda p: SourceConfig("arrays", None), "source.path: not given"),
        (lambda p: SourceConfig("arrays", str(p / "x.npz")), "no such file"),
        (lambda p: SourceConfig("arrays", str(_write(p / "x.npz", b"junk"))), "not an .npz"),
        (lambda p: SourceConfig("poems"), "known: stdlib, text, digits, arrays"),
        (lambda p: SourceConfig("stdlib", fraction=0), "source.fraction"),
        (lambda p: SourceConfig("digits", fraction=0.5), "only texts"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, make, words):
    with pytest.raises(UserError, match=words) as caught:
        load_source(make(tmp_path))
    assert "\n" not in str(caught.value)


def _write(path, content):
    path.write_bytes(content)
    return path


X = np.arange(40, dtype=np.float64).reshape(20, 2)
Y = np.arange(20) % 3


@pytest.mark.parametrize(
    ("x", "y", "split", "words"),
    [
        (X[:, 0], Y, None, r"x has shape \(20,\)"),
        (X, Y[:-1], None, r"y has shape \(19,\)"),
        (np.where(X == 7, np.nan, X), Y, None, r"not finite in 1 row\(s\), the first 3"),
        (np.where(X == 7, np.inf, X), Y, None, "not finite"),
        (X, np.where(Y == 1, -1, Y), None, "negative"),
        (X, np.where(Y == 1, 5, Y), None, "class 1 never occurs"),
        (X, np.zeros(20, int), None, "only one class"),
        (X, np.where(Y == 1, np.nan, Y), None, "y is not finite"),
        (X, Y.astype(str), None, r"expected integers \(classes\) or floats"),
        (X.astype(str), Y, None, "expected numbers"),
        (X, Y, np.zeros(19), "split has shape"),
        (X, Y, np.array(["train"] * 19 + ["rest"]), "known: train, calibration, heldout"),
        (X, Y, np.zeros(20, int), "leaves calibration empty"),
        (X[:2], Y[:2], None, "at least 3"),
    ],
)
def test_arrays_that_cannot_be_used(x, y, split, words):
    with pytest.raises(UserError, match=words):
        arrays.build("a.npz", x, y, split, 0)


def test_floats_are_numbers_to_predict():
    corpus = arrays.build("a.npz", X, Y + 0.5, None, 0)
    assert corpus.num_classes == 0
    np.testing.assert_array_equal(corpus.y, np.asarray(Y + 0.5, np.float32))


def test_arrays_bring_their_own_split(tmp_path):
    split = np.array(["train"] * 10 + ["calibration"] * 5 + ["heldout"] * 5)
    np.savez(tmp_path / "a.npz", x=X, y=Y, split=split)
    corpus = load_source(SourceConfig("arrays", str(tmp_path / "a.npz")))
    assert [corpus.count(s) for s in (TRAIN, CALIBRATION, HELDOUT)] == [10, 5, 5]
    corpus.save(tmp_path / "saved")
    assert load_corpus(tmp_path / "saved").digest == corpus.digest


def test_pickles_are_not_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object), y=Y)
    with pytest.raises(UserError, match="plain arrays"):
        load_source(SourceConfig("arrays", str(tmp_path / "a.npz")))


def test_rows_keep_their_split_when_rows_are_added():
    np.testing.assert_array_equal(split_rows(1000, 5), split_rows(2000, 5)[:1000])
    assert not np.array_equal(split_rows(1000, 5), split_rows(1000, 6))
