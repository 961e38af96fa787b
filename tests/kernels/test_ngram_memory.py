"""Count tables and the features made of them, against counters and formulas in plain Python."""

import math
import re
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from colonnade.kernels.ngram_memory import numba as loops
from colonnade.router.memory import memory as features
from colonnade.router.memory.memory import CONTEXTS, CorpusMemory, fit_memory
from colonnade.router.memory.tables import ALL, Context, Table
from colonnade.router.sources import HELDOUT, TRAIN, TextCorpus
from hypothesis import example, given, settings
from hypothesis import strategies as st

# few different bytes, so that contexts repeat: words, gaps, the padding's zero, and the ends of the range
TEXTS = st.lists(st.lists(st.sampled_from(b"ab9_ .\0\xff"), max_size=40).map(bytes), min_size=1, max_size=6)
EVERY_CONTEXT = pytest.mark.parametrize("context", [*CONTEXTS, Context(words=3)], ids=lambda context: context.name)


def laid_out(texts, split=TRAIN):
    corpus = TextCorpus.from_documents("x", [(f"{i}", text, split) for i, text in enumerate(texts)])
    return corpus, corpus.positions(split)


def places(texts):
    return [(number, place) for number, text in enumerate(texts) for place in range(len(text))]


def past(text, place, context):
    """What a context holds before a place: bytes, zeros before the document's start, or words, last first."""
    if context.order:
        return (bytes(context.order) + text[:place])[-context.order :]
    rest, words = text[:place], []
    for number in range(context.words):
        if number:
            rest = re.sub(rb"[^0-9A-Za-z_\0]{1,8}\Z", b"", rest)
        words.append(re.search(rb"[0-9A-Za-z_]{0,22}\Z", rest).group())
        rest = rest[: len(rest) - len(words[-1])]
    return tuple(words)


def count(texts, context, skip=()):
    """Counter of followers by context, of all places but some."""
    found = defaultdict(Counter)
    for number, place in places(texts):
        if (number, place) not in skip:
            found[past(texts[number], place, context)][texts[number][place]] += 1
    return found


def branches(counter, target, k):
    """(count of the branch taken towards the target at depth k, of the other)."""
    low = 7 - k
    taken = sum(n for byte, n in counter.items() if byte >> low == target >> low)
    return taken, sum(n for byte, n in counter.items() if byte >> low == target >> low ^ 1)


def level(number):
    return max(i for i, low in enumerate(loops.LEVELS) if low <= number)


def hashes_of(context, corpus, positions, salt=ALL):
    return context.hashes(corpus.data, positions, np.full(len(positions), salt, np.uint64))


def followers(table, context):
    entries = table.followers[table.offsets[context] : table.offsets[context + 1]]
    return {int(entry & 255): int(entry >> 8) for entry in entries}


@EVERY_CONTEXT
@settings(max_examples=25, deadline=None)
@given(texts=TEXTS, others=TEXTS)
@example(texts=[b""], others=[b"a"])
@example(texts=[b"a", b"", b"b"], others=[b"a"])
@example(texts=[b"a" * 30 + b" " + b"b" * 21, b"a" * 23 + b".........b", b"a........b b"], others=[b"b" * 45])
def test_a_table_is_a_counter_of_followers_by_context(context, texts, others):
    corpus, positions = laid_out(texts)
    hashes = hashes_of(context, corpus, positions)
    table = Table.build(hashes, corpus.data[positions])
    truth = count(texts, context)
    assert len(table.checks) == len(truth)
    assert len(table.followers) == sum(map(len, truth.values()))
    for found, (number, place) in zip(table.find(hashes), places(texts), strict=True):
        assert found >= 0
        assert followers(table, found) == truth[past(texts[number], place, context)]
    # contexts of other texts, seen or not
    found = table.find(hashes_of(context, *laid_out(others)))
    for own, (number, place) in zip(found, places(others), strict=True):
        key = past(others[number], place, context)
        assert (own >= 0) == (key in truth)
        assert own < 0 or followers(table, own) == truth[key]
    assert (table.find(hashes_of(context, corpus, positions, 3)) == -1).all(), "another salt, another context"
    np.testing.assert_array_equal(Table.restore(table.arrays()).find(hashes), table.find(hashes))


@EVERY_CONTEXT
def test_neighbours_of_a_document_do_not_matter(context):
    text = np.random.default_rng().choice(list(b"ab9 ."), 50).astype(np.uint8).tobytes()
    alone = hashes_of(context, *laid_out([text]))
    for before in ([b""], [b"a" * 60], [b"b" * 7, b"", b"b"]):
        corpus, positions = laid_out([*before, text, b"a"])
        np.testing.assert_array_equal(hashes_of(context, corpus, positions[-51:-1]), alone)


def test_a_large_table_finds_its_contexts_and_no_others():
    rng = np.random.default_rng(0)
    hashes, others = rng.integers(0, (1 << 64) - 1, (2, 30_001), np.uint64)
    table = Table.build(hashes, np.zeros(len(hashes), np.uint8))
    seen = np.unique(hashes >> 8)
    np.testing.assert_array_equal(table.find(hashes), np.searchsorted(seen, hashes >> 8))
    np.testing.assert_array_equal(table.checks, seen.astype(np.uint32))
    assert (table.find(others) == -1).all()


def test_counts_stop_growing_at_24_bits():
    top = (1 << 24) - 1
    contexts, checks, offsets = np.empty(1, np.uint64), np.empty(1, np.uint32), np.empty(2, np.int32)
    counted = np.empty(1, np.uint32)
    for size in (top - 1, top, top + 3):
        grams = np.full(size, 0x4109, np.uint64)
        assert loops.run_lengths(grams, contexts, checks, offsets, counted) == (1, 1)
        assert (int(counted[0] >> 8), int(counted[0] & 255), checks[0], offsets[1]) == (min(size, top), 9, 0x41, 1)


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.data())
def test_evidence_is_how_far_followers_go_with_the_target(texts, data):
    context = Context(order=1)
    corpus, positions = laid_out(texts)
    hashes = hashes_of(context, corpus, positions)
    table = Table.build(hashes, corpus.data[positions])
    targets = np.array([data.draw(st.integers(0, 255)) for _ in positions], np.uint8)
    evidence, distinct = np.ones((len(positions), 9), np.int32), np.zeros(len(positions), np.int32)
    table.add_evidence(hashes, targets, 1, evidence, distinct)
    truth = count(texts, context)
    for i, (number, place) in enumerate(places(texts)):
        counter, target = truth[past(texts[number], place, context)], int(targets[i])
        bits = f"{target:08b}"
        shares = [sum(n for byte, n in counter.items() if f"{byte:08b}"[:far] == bits[:far]) for far in range(9)]
        exactly = [more - less for more, less in zip(shares, [*shares[1:], 0], strict=True)]
        assert evidence[i].tolist() == [1 + n for n in exactly]
        assert distinct[i] == len(counter)
    table.add_evidence(hashes, targets, -1, evidence, distinct)
    assert (evidence == 1).all()


@pytest.mark.parametrize("leave_out", ["document", "position"])
@settings(max_examples=12, deadline=None)
@given(texts=TEXTS, seed=st.integers(0, 1 << 30))
def test_training_odds_are_those_of_a_recount_without_what_is_left_out(leave_out, texts, seed):
    corpus, positions = laid_out(texts)
    fitted = fit_memory(corpus, leave_out)
    # any odds, to tell every pair of levels from every other
    odds = np.random.default_rng(seed).integers(-127, 128, fitted.memory.odds.shape).astype(np.int8)
    rows = CorpusMemory(replace(fitted.memory, odds=odds), corpus, fitted.documents).rows(positions)
    chosen = list(enumerate(places(texts)))
    for i, (number, place) in chosen[:: 1 + len(chosen) // 25]:
        skip = {(number, place)}
        if leave_out == "document":
            skip = {(number, other) for other in range(len(texts[number]))}
        target = texts[number][place]
        for o, context in enumerate(CONTEXTS):
            counter = count(texts, context, skip)[past(texts[number], place, context)]
            for k in range(8):
                taken, other = branches(counter, target, k)
                known = int(odds[o, k, level(taken), level(other)]) if taken + other else 0
                assert rows[i, k, o] == (known if target >> (7 - k) & 1 else -known)


def test_tally_counts_decisions_by_the_levels_of_their_branches():
    rng = np.random.default_rng()
    edges = np.concatenate([loops.LEVELS, loops.LEVELS[1:] - 1, [1023, 1024, 1025, 10**6]])
    evidence = rng.choice(edges, (400, 9)).astype(np.int32)
    outcomes = np.full((8, loops.NUM_LEVELS, loops.NUM_LEVELS), 7)
    loops.tally(evidence, 399, outcomes)
    truth = np.full_like(outcomes, 7)
    for row in evidence[:399]:
        for k in range(8):
            truth[k, level(row[k + 1 :].sum()), level(row[k])] += 1
    np.testing.assert_array_equal(outcomes, truth)


@pytest.mark.parametrize(("chained", "bins"), [((0, 1, 2), 3), ((4, 1, 3, 0), 2), ((2,), 1), ((3, 1), 2)])
def test_features_follow_their_formulas(chained, bins):
    rng = np.random.default_rng()
    n, contexts, unit = 150, 5, 0.25
    evidence = rng.choice([0, 0, 0, 1, 2, 3, 30, 3000, 10**7], (contexts, n, 9)).astype(np.int32)
    evidence[:, ::7] = 0
    evidence[rng.random((contexts, n)) < 0.3] = 0
    distinct = rng.integers(0, 40, (contexts, n)).astype(np.int32)
    odds = rng.integers(-127, 128, (contexts, 8, loops.NUM_LEVELS, loops.NUM_LEVELS)).astype(np.int8)
    targets = rng.integers(0, 256, n).astype(np.uint8)
    rows = np.full((n, 8, contexts + bins + 1), 99, np.int8)
    loops.write_features(evidence, distinct, n, targets, odds, np.array(chained), bins, unit, rows)
    truth = np.zeros_like(rows)
    truth[..., -1] = 99
    for i in range(n):
        for k in range(8):
            sign = 1 if f"{targets[i]:08b}"[k] == "1" else -1
            taken, other = evidence[:, i, k + 1 :].sum(1).astype(float), evidence[:, i, k].astype(float)
            p, longest = 0.5, 0
            for o in range(contexts):
                if taken[o] + other[o]:
                    truth[i, k, o] = sign * odds[o, k, level(taken[o]), level(other[o])]
            for rank, o in enumerate(chained):
                if taken[o] + other[o]:
                    d = max(distinct[o, i], 1)
                    p, longest = (taken[o] + d * p) / (taken[o] + other[o] + d), rank
            p = min(max(p, 1e-4), 1 - 1e-4)
            # the shortest contexts share the first slot where there are fewer slots than contexts
            slot = contexts + max(longest - (len(chained) - bins), 0)
            truth[i, k, slot] = np.clip(np.rint(sign * math.log(p / (1 - p)) / unit), -127, 127)
    np.testing.assert_array_equal(rows, truth)


@pytest.mark.parametrize("leave_out", ["document", "position"])
def test_blocks_and_threads_change_nothing(leave_out, monkeypatch):
    rng = np.random.default_rng()
    sizes = [1, 0, 2047, 2049, 700, 2048]
    texts = [rng.choice(list(b"abcdef 9."), size).astype(np.uint8).tobytes() for size in sizes]
    entries = [(f"{i}", text, HELDOUT if i == 2 else TRAIN) for i, text in enumerate(texts)]
    corpus = TextCorpus.from_documents("x", entries)

    def everything():
        fitted = fit_memory(corpus, leave_out)
        rows = np.zeros((len(corpus.data), 8, 16), np.int8)
        fitted.fill(rows)
        return fitted, rows

    fitted, rows = everything()
    assert rows.any()
    positions = rng.permutation(corpus.positions(TRAIN))[:3001]
    np.testing.assert_array_equal(fitted.rows(positions), rows[positions])
    np.testing.assert_array_equal(fitted.rows(positions[:1]), rows[positions[:1]])
    held = corpus.positions(HELDOUT)[::-1]
    np.testing.assert_array_equal(fitted.memory.rows(corpus.data, held, corpus.data[held]), rows[held])
    np.testing.assert_array_equal(fitted.rows(held), rows[held])
    assert fitted.rows(held[:0]).shape == (0, 8, 16)
    for block, threads in ((1000, 1), (37, 5)):
        monkeypatch.setattr(features, "_BLOCK", block)
        monkeypatch.setattr(features, "ThreadPoolExecutor", lambda _, threads=threads: ThreadPoolExecutor(threads))
        again, same = everything()
        np.testing.assert_array_equal(again.memory.odds, fitted.memory.odds)
        np.testing.assert_array_equal(same, rows)
