from collections import Counter, defaultdict

import numpy as np
import pytest
from colonnade.ensemble.baselines import KneserNey, ngram_baselines
from colonnade.ensemble.baselines.ngrams import packed
from colonnade.router.sources import HELDOUT, TRAIN, split_documents


class SlowKneserNey:
    """Dictionaries and float64, straight from the paper's formulas."""

    def __init__(self, data, positions, order):
        self.order = order
        self.counts = {order: Counter(bytes(data[p - order + 1 : p + 1]) for p in positions)}
        grams = set(self.counts[order])
        for n in range(order - 1, 0, -1):
            self.counts[n] = Counter(gram[1:] for gram in grams)
            grams = set(self.counts[n])
        self.tables = {n: self._table(n) for n in range(1, order + 1)}

    def _table(self, n):
        counts = self.counts[n]
        of = Counter(counts.values())
        if of[1] and of[2]:
            y = of[1] / (of[1] + 2 * of[2])
            d1, d2 = 1 - 2 * y * of[2] / of[1], 2 - 3 * y * of[3] / of[2]
            d3 = 3 - 4 * y * of[4] / of[3] if of[3] else d2
            d = [0, min(max(d1, 0), 1), min(max(d2, 0), 2), min(max(d3, 0), 3)]
        else:
            d = [0, 0.75, 0.75, 0.75]
        totals, taken = defaultdict(int), defaultdict(float)
        for gram, count in counts.items():
            totals[gram[:-1]] += count
            taken[gram[:-1]] += d[min(count, 3)]
        return d, totals, taken

    def probability(self, context, byte, n=None):
        n = self.order if n is None else n
        if n == 0:
            return 1 / 256
        context = context[len(context) - (n - 1) :] if n > 1 else b""
        below = self.probability(context, byte, n - 1)
        d, totals, taken = self.tables[n]
        if context not in totals:
            return below
        count = self.counts[n][context + bytes([byte])]
        return (count - d[min(count, 3)] + taken[context] * below) / totals[context]


def corpus(seed=0, size=6000):
    rng = np.random.default_rng(seed)
    content = bytes((97 + rng.zipf(1.5, size) % 12).astype(np.uint8).tolist())
    return split_documents("x", [("a", content)], seed)


@pytest.mark.parametrize("orders", [(1,), (2,), (5,), (8,), (3, 5, 8)])
def test_matches_the_formulas(orders):
    made = corpus()
    train, held = made.positions(TRAIN), made.positions(HELDOUT)
    got = KneserNey(made.data, train, orders).probabilities(made.data, held)
    assert sorted(got) == sorted(orders)
    for order in orders:
        slow = SlowKneserNey(made.data, train, order)
        expected = [slow.probability(bytes(made.data[p - order + 1 : p]), int(made.data[p])) for p in held]
        np.testing.assert_allclose(got[order], expected, rtol=1e-12)


def test_probabilities_sum_to_one():
    made = corpus(3)
    model = KneserNey(made.data, made.positions(TRAIN), (5, 8))
    for position in made.positions(HELDOUT)[:40]:
        context = packed(made.data, np.array([position]))[0] & ~np.uint64(255)
        every = model.of_keys(context | np.arange(256, dtype=np.uint64))
        for order in (5, 8):
            assert every[order].sum() == pytest.approx(1, abs=1e-9)
            assert (every[order] > 0).all()


def test_simple_baselines_are_distributions_too():
    made = corpus(4)
    train, held = made.positions(TRAIN), made.positions(HELDOUT)
    got = ngram_baselines(made.data, train, held, (5,))
    here = np.bincount(made.data[train], minlength=256)
    p = (here[made.data[held[0]]] + 1 / 256) / (len(train) + 1)
    assert got["unigram"][0] == pytest.approx(-np.log2(p))
    before = made.data[train - 1] == made.data[held[0] - 1]
    both = before & (made.data[train] == made.data[held[0]])
    assert got["bigram"][0] == pytest.approx(-np.log2((both.sum() + p) / (before.sum() + 1)))


def test_longer_contexts_help_on_real_text():
    from colonnade.router.sources import SourceConfig, load_source

    made = load_source(SourceConfig("stdlib", fraction=0.05))
    got = ngram_baselines(made.data, made.positions(TRAIN), made.positions(HELDOUT))
    means = [got[name].mean() for name in ("kneser_ney_8", "kneser_ney_5", "bigram", "unigram")]
    assert means == sorted(means)
