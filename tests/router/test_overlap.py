import numpy as np
from colonnade.router.sources import HELDOUT, TRAIN, TextCorpus
from colonnade.router.sources.overlap import novel_mask
from hypothesis import given, settings
from hypothesis import strategies as st


def slow(corpus, length):
    trains = [bytes(corpus.data[start:end]) for start, end in corpus.documents(TRAIN)]
    novel = np.ones(len(corpus.data), bool)
    for start, end in corpus.documents(HELDOUT):
        for p in range(start, end - length + 1):
            if any(bytes(corpus.data[p : p + length]) in train for train in trains):
                novel[p : p + length] = False
    return novel[corpus.positions(HELDOUT)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_matches_a_substring_search(seed, length):
    rng = np.random.default_rng(seed)
    documents = [(str(i), bytes(rng.integers(97, 99, 60).tolist()), i % 3) for i in range(6)]
    corpus = TextCorpus.from_documents("x", documents)
    np.testing.assert_array_equal(novel_mask(corpus, corpus.positions(HELDOUT), length), slow(corpus, length))


def test_a_run_across_two_training_documents_is_no_match():
    half = bytes(range(100, 140))
    documents = [("a", half, TRAIN), ("b", half[::-1], TRAIN), ("c", half + half[::-1], HELDOUT), ("d", b"x", 1)]
    corpus = TextCorpus.from_documents("x", documents)
    assert novel_mask(corpus, corpus.positions(HELDOUT), 64).all()
    assert not novel_mask(corpus, corpus.positions(HELDOUT), 40).any()
