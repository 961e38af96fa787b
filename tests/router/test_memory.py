"""The fitted memory: what its features say, what training leaves out, and its files."""

import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from colonnade.jobs import memories
from colonnade.jobs.settings import read
from colonnade.kernels.errors import UserError
from colonnade.kernels.mlp_resident.contract import MEMORY_UNIT, tree_rows
from colonnade.kernels.ngram_memory.numba import LEVELS
from colonnade.router.memory.memory import CorpusMemory, calibrated, fit_memory, load_memory
from colonnade.router.sources import CALIBRATION, HELDOUT, TRAIN, TextCorpus
from hydra import compose, initialize_config_module
from scipy.special import logit

ORDERS = (1, 2, 3, 4, 5, 6, 8)
WORD, TWO_WORDS = 7, 8
LEAVE_OUT = pytest.mark.parametrize("leave_out", ["document", "position"])
SPLITS = (TRAIN, TRAIN, TRAIN, HELDOUT, TRAIN, CALIBRATION, TRAIN)


def lay_out(texts, splits=SPLITS):
    return TextCorpus.from_documents("x", [(f"{i}", *each) for i, each in enumerate(zip(texts, splits, strict=True))])


def draw_texts(sizes=(150, 0, 1, 90, 200, 60, 130)):
    rng = np.random.default_rng()
    words = [b"alpha", b"beta", b"(x, y)", b"alphabet", b"\n", b"x_1", b"\xc3\xa9t\xc3\xa9"]
    return [b" ".join(words[i] for i in rng.integers(0, len(words), size))[:size] for size in sizes]


def pasts(corpus, p):
    """What each of the nine contexts holds before a position."""
    before = corpus.data[p - 32 : p].tobytes()
    word = re.search(rb"\w{0,22}\Z", before).group()
    rest = re.sub(rb"[^\w\0]{1,8}\Z", b"", before[: len(before) - len(word)])
    return [*(before[-order:] for order in ORDERS), word, (word, re.search(rb"\w*\Z", rest).group())]


def count(corpus, positions):
    """Counters of followers by (number of the context, what it holds)."""
    found = defaultdict(Counter)
    for p in positions:
        for key in enumerate(pasts(corpus, p)):
            found[key][int(corpus.data[p])] += 1
    return found


def visible(corpus, leave_out):
    """The nine counters that each position with a byte may see."""
    training = corpus.positions(TRAIN)
    whole, found = count(corpus, training), {}
    for start, end, split in zip(corpus.doc_starts, corpus.doc_ends, corpus.doc_split, strict=True):
        others = whole
        if split == TRAIN and leave_out == "document":
            others = count(corpus, training[(training < start) | (training >= end)])
        for p in range(start, end):
            itself = Counter([int(corpus.data[p])] if split == TRAIN and leave_out == "position" else [])
            found[p] = [others[key] - itself for key in enumerate(pasts(corpus, p))]
    return found


def branches(counter, target, k):
    """Counts of the branch taken towards the target at depth k, and of the other."""
    low = 7 - k
    taken = sum(n for byte, n in counter.items() if byte >> low == target >> low)
    return taken, sum(n for byte, n in counter.items() if byte >> low == target >> low ^ 1)


def level(number):
    return max(i for i, low in enumerate(LEVELS) if low <= number)


def quantised(log_odds):
    return np.clip(np.rint(np.asarray(log_odds) / MEMORY_UNIT), -127, 127)


def counted_odds(corpus, seen):
    outcomes = np.full((9, 8, len(LEVELS), len(LEVELS)), 0.5)
    for p in corpus.positions(TRAIN):
        for o, counter in enumerate(seen[p]):
            for k in range(8):
                taken, other = branches(counter, int(corpus.data[p]), k)
                outcomes[o, k, level(taken), level(other)] += 1
    return quantised(np.log(outcomes / outcomes.swapaxes(2, 3)))


def counted_row(counters, target, odds):
    """Features [8, 16] towards bit 1, and the one of the last seven that holds the interpolated odds at each depth."""
    row, slots = np.zeros((8, 16)), []
    for k in range(8):
        sign = 1 if target >> (7 - k) & 1 else -1
        p, longest = 0.5, 0
        for o, counter in enumerate(counters):
            taken, other = branches(counter, target, k)
            if taken + other:
                row[k, o] = sign * odds[o, k, level(taken), level(other)]
                if o < len(ORDERS):
                    p, longest = (taken + len(counter) * p) / (taken + other + len(counter)), o
        row[k, 9 + longest] = quantised(sign * logit(min(max(p, 1e-4), 1 - 1e-4)))
        slots.append(9 + longest)
    return row, slots


def filled(fitted):
    rows = np.zeros((len(fitted.corpus.data), 8, 16), np.int8)
    fitted.fill(rows)
    return rows


@LEAVE_OUT
def test_rows_are_quantised_features_of_plain_counts(leave_out):
    corpus = lay_out(draw_texts())
    fitted, seen = fit_memory(corpus, leave_out), visible(corpus, leave_out)
    np.testing.assert_array_equal(fitted.memory.odds, counted_odds(corpus, seen))
    rows = filled(fitted)
    training = set(corpus.positions(TRAIN).tolist())
    for p, counters in seen.items():
        truth, slots = counted_row(counters, int(corpus.data[p]), fitted.memory.odds)
        if p in training:
            truth[np.arange(8), slots] = rows[p, np.arange(8), slots]
        np.testing.assert_array_equal(rows[p], truth)
    assert not np.delete(rows, list(seen), 0).any(), "nothing in the padding"
    assert rows[list(seen)].any(axis=(0, 1)).all(), "every feature says something somewhere"


def test_calibration_is_the_log_of_how_often_with_half_a_count_added():
    outcomes = np.random.default_rng().integers(0, 9, (9, 8, len(LEVELS), len(LEVELS)))
    outcomes[0, 0, 1, 2], outcomes[0, 0, 2, 1] = 10**9, 0
    odds = calibrated(outcomes)
    np.testing.assert_array_equal(odds, -odds.swapaxes(2, 3))
    np.testing.assert_array_equal(odds, quantised(np.log((outcomes + 0.5) / (outcomes.swapaxes(2, 3) + 0.5))))
    assert (odds.dtype, odds[0, 0, 1, 2]) == (np.int8, 127)


@LEAVE_OUT
@pytest.mark.parametrize("k", [0, 3, 7])
def test_swapping_the_branches_of_a_depth_negates_its_features_alone(leave_out, k):
    # two bits set at least: no byte becomes the padding's zero
    texts = [np.random.default_rng().choice([3, 5, 77, 200, 201, 255], n).astype(np.uint8) for n in (90, 40, 300)]
    splits = (TRAIN, HELDOUT, TRAIN)
    mirrored = [[(text ^ mask).tobytes() for text in texts] for mask in (0, 1 << (7 - k))]
    rows, swapped = (filled(fit_memory(lay_out(each, splits), leave_out)) for each in mirrored)
    assert rows[:, k].any()
    rows[:, k] *= -1
    # other bytes make other words
    np.testing.assert_array_equal(np.delete(swapped, [WORD, TWO_WORDS], 2), np.delete(rows, [WORD, TWO_WORDS], 2))


def test_all_bytes_below_a_node_find_the_same_features_there():
    corpus = lay_out(draw_texts())
    memory = fit_memory(corpus).memory
    leaves = np.arange(256)
    for p in corpus.positions(HELDOUT)[[0, 1, 50]]:
        rows, nodes = memory.rows(corpus.data, np.full(256, p), leaves), np.zeros((255, 16))
        nodes[tree_rows(leaves, 8)] = rows
        np.testing.assert_array_equal(nodes[tree_rows(leaves, 8)], rows)


def test_words_are_known_after_other_bytes():
    corpus = lay_out([b"one, two; "] * 9 + [b"!two", b"(one -- two", b"(on2 -- two"], [TRAIN] * 9 + [HELDOUT] * 3)
    rows = filled(fit_memory(corpus)).any(1)
    word, two_words, others = rows[corpus.doc_ends[9:] - 1]
    assert word[WORD], "tw was seen, though not after !"
    assert not word[[2, 3, 4, 5, 6, TWO_WORDS]].any()
    assert two_words[TWO_WORDS]
    assert not two_words[3:7].any()
    assert others[WORD] > others[TWO_WORDS]


@LEAVE_OUT
@pytest.mark.parametrize("split", [TRAIN, HELDOUT])
def test_a_document_sees_itself_only_in_training_that_leaves_out_positions(split, leave_out):
    corpus = lay_out([b"some other text, some other text; " * 3, b"QZ/UV+WX*RS." * 5], (TRAIN, split))
    rows = filled(fit_memory(corpus, leave_out))[corpus.doc_starts[1] + 12 : corpus.doc_ends[1]]
    assert rows[:, :, 2:7].any() == (split == TRAIN and leave_out == "position")


def test_other_splits_are_not_counted():
    texts = draw_texts()
    other = [text if split == TRAIN else b"beta alpha " * 9 for text, split in zip(texts, SPLITS, strict=True)]
    first, second = (fit_memory(lay_out(each)).memory for each in (texts, other))
    np.testing.assert_array_equal(first.odds, second.odds)
    for one, same in zip(first.tables, second.tables, strict=True):
        np.testing.assert_equal(one.arrays(), same.arrays())


def test_texts_without_a_training_byte():
    corpus = lay_out([b"", b"abc"], (TRAIN, HELDOUT))
    assert not filled(fit_memory(corpus)).any()
    with pytest.raises(UserError, match=r"relay\.leave_out=word: unknown; known: document, position"):
        fit_memory(corpus, "word")


@LEAVE_OUT
def test_a_saved_memory_gives_the_same_rows(leave_out, tmp_path):
    corpus = lay_out(draw_texts())
    assert load_memory(tmp_path) is None
    with pytest.raises(UserError, match="no memory; start a new run"):
        CorpusMemory.load(tmp_path, corpus)
    fitted = fit_memory(corpus, leave_out)
    fitted.save(tmp_path)
    np.testing.assert_array_equal(filled(CorpusMemory.load(tmp_path, corpus)), filled(fitted))


@pytest.mark.parametrize("name", ["memory", "documents"])
def test_a_flipped_byte_is_refused_in_one_line(name, tmp_path):
    corpus = lay_out(draw_texts((80, 0, 1, 9, 70, 9, 60)))
    fit_memory(corpus).save(tmp_path)
    arrays, manifest = tmp_path / f"{name}.safetensors", tmp_path / f"{name}.json"
    lines = [re.search(rb'"%s".*' % field, manifest.read_bytes()) for field in (b"schema", b"digest")]
    places = [(manifest, place) for line in lines for place in range(*line.span())]
    places += [(arrays, int(place)) for place in np.random.default_rng().integers(0, arrays.stat().st_size, 9)]
    for path, place in [*places, (arrays, 0), (arrays, -1)]:
        whole, damaged = path.read_bytes(), bytearray(path.read_bytes())
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"no readable memory .*; start a new run") as error:
            CorpusMemory.load(tmp_path, corpus)
        assert "\n" not in str(error.value)
        path.write_bytes(whole)


@LEAVE_OUT
def test_rows_are_stored_up_to_the_stated_size(leave_out, tmp_path):
    corpus = lay_out(draw_texts())
    expected, size = filled(fit_memory(corpus, leave_out)), 128 * len(corpus.data)
    memories.make(tmp_path / "stored", corpus, leave_out, size)
    memories.make(tmp_path / "computed", corpus, leave_out, size - 1)
    np.testing.assert_array_equal(memories.open_for_training(tmp_path / "stored", corpus), expected)
    computed = memories.open_for_training(tmp_path / "computed", corpus)
    positions = corpus.positions(TRAIN)
    np.testing.assert_array_equal(computed.rows(positions), expected[positions])
    assert not (tmp_path / "computed" / "memory" / "rows.int8").exists()
    path = tmp_path / "stored" / "memory" / "rows.int8"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"rows\.int8: missing or damaged; start a new run"):
        memories.open_rows(tmp_path / "stored")


@pytest.mark.parametrize("value", [-1, (1 << 50) + 1])
def test_a_size_out_of_range_is_refused(value):
    with initialize_config_module("colonnade.conf", version_base="1.3"):
        config = compose("config", overrides=["preset=memory", f"relay.memory_bytes={value}"])
    with pytest.raises(UserError, match=rf"relay\.memory_bytes={value}: must be between 0 and"):
        read(config)
