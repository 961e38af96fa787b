"""An ensemble whose experts see memory: scores are distributions, of any batch, and nothing sees itself."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from colonnade.ensemble import mixing as mix
from colonnade.ensemble import model as models
from colonnade.ensemble.api import MemoryBank
from colonnade.ensemble.evaluation import gather
from colonnade.ensemble.inputs import training_frequencies, training_inputs
from colonnade.ensemble.layout import Layout
from colonnade.ensemble.metrics import LOG2
from colonnade.ensemble.model import EnsembleModel, input_digests, load, write_manifest
from colonnade.experts.bank import Bank
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.mlp import build_spec
from colonnade.experts.training import train_group
from colonnade.kernels.errors import UserError
from colonnade.router import partition
from colonnade.router.memory.memory import CorpusMemory, fit_memory
from colonnade.router.relay import fit_text_relay
from colonnade.router.router import Router, RouterConfig
from colonnade.router.sources import CALIBRATION, HELDOUT, PAD, TRAIN, TextCorpus
from colonnade.router.strategies import AreaConfig

EXPERTS = 3
AREAS = RouterConfig((AreaConfig("a1", "hash", EXPERTS, lags=(1,)), AreaConfig("word", "hash", EXPERTS, word=1)))
WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "(x, y)",
    "return",
    "\n",
    "it's",
    "0.5",
    "été",
    "a_very_long_name_of_it_all",
]


def draw_text(rng, size=350):
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), size // 4)).encode()[:size]


def make_corpus(heldout=(b"", b"")):
    """Fourteen documents for training, three for calibration, then those held out."""
    rng = np.random.default_rng(5)
    entries = [(f"{i}", draw_text(rng), CALIBRATION if i > 13 else TRAIN) for i in range(17)]
    return TextCorpus.from_documents("x", [*entries, *((f"h{i}", text, HELDOUT) for i, text in enumerate(heldout))])


@dataclass(frozen=True)
class Trained:
    corpus: TextCorpus
    fitted: CorpusMemory
    rows: np.ndarray
    weights: dict
    model: EnsembleModel


def train(corpus, leave_out="document", stored=True):
    """A memory, a few steps of every expert, and the mixing of their answers."""
    relay = fit_text_relay(corpus, 4, 5)
    router, assigned = Router.fit(AREAS, corpus, relay)
    fitted = fit_memory(corpus, leave_out)
    rows = np.zeros((len(corpus.data), 8, 16), np.int8)
    fitted.fill(rows)
    inputs = training_inputs(corpus, relay, rows if stored else fitted)
    spec = build_spec(ExpertConfig(hidden=8, memory=True), EstimatorConfig(), OptimizerConfig(),
                      TrainConfig(steps=25, batch=16), relay.num_features, training_frequencies(corpus))  # fmt: skip
    weights = {}
    for area, part in enumerate(partition.build(assigned, corpus.positions(TRAIN), router.first_expert)):
        offsets, indices = part.group(0, EXPERTS)
        ids = np.arange(EXPERTS) + router.first_expert[area]
        weights[area] = train_group(spec, inputs, indices, offsets, ids).weights
    layout = Layout(spec.shape, router.first_expert, EXPERTS, frozenset([4]))
    mixing = mix.Mixing("tree", "logistic", np.zeros(0))
    model = EnsembleModel(relay, router, layout, MemoryBank(weights), mixing, spec.frequencies, fitted.memory)
    found = gather(model, corpus, (CALIBRATION,), untrained=False, memory=rows)[CALIBRATION]
    mixing = mix.fit("tree", "logistic", found.trained, found.targets)
    return Trained(corpus, fitted, rows, weights, replace(model, mixing=mixing))


@pytest.fixture(scope="module")
def trained():
    rng = np.random.default_rng(6)
    return train(make_corpus((draw_text(rng), draw_text(rng, 123))))


def heldout_text(corpus):
    start, end = corpus.documents(HELDOUT)[0]
    return corpus.data[start:end].tobytes()


def test_all_next_bytes_sum_to_one_and_the_real_one_is_scored_so(trained):
    text = heldout_text(trained.corpus)
    bits = trained.model.text_bits(text)
    for place in (0, 1, 2, 9, 60, 200, 349):
        log_p = trained.model.next_log_proba(text[:place])
        assert log_p.shape == (256,)
        assert np.exp(log_p).sum() == pytest.approx(1, abs=1e-9)
        assert -log_p[text[place]] / LOG2 == pytest.approx(bits[place], abs=1e-5)
    # another byte at the last place is scored as the distribution before it says
    for byte in (0, 1, 127, 128, 255):
        own = trained.model.text_bits(text[:60] + bytes([byte]))[60]
        assert own == pytest.approx(-trained.model.next_log_proba(text[:60])[byte] / LOG2, abs=1e-5)


def test_memory_is_what_makes_the_model_good(trained):
    text = heldout_text(trained.corpus)
    assert all(values["u"].any() for values in trained.weights.values())
    nothing = fit_memory(make_corpus(), "document").memory
    nothing = replace(nothing, odds=np.zeros_like(nothing.odds))
    bits, without = trained.model.text_bits(text), replace(trained.model, memory=nothing).text_bits(text)
    assert bits.mean() < without.mean() - 0.05


def test_scoring_of_a_split_is_that_of_its_texts(trained):
    corpus, model = trained.corpus, trained.model
    stored = gather(model, corpus, (HELDOUT, CALIBRATION), memory=trained.rows)
    computed = gather(model, corpus, (HELDOUT, CALIBRATION))
    for split in (HELDOUT, CALIBRATION):
        np.testing.assert_array_equal(stored[split].trained, computed[split].trained)
        np.testing.assert_array_equal(stored[split].untrained, computed[split].untrained)
        bits = mix.losses(model.mixing, stored[split].trained, stored[split].targets) / LOG2
        texts = [corpus.data[start:end].tobytes() for start, end in corpus.documents(split)]
        np.testing.assert_array_equal(np.concatenate([model.text_bits(text) for text in texts]), bits)


def test_the_same_answers_in_any_batch(trained, monkeypatch):
    text = heldout_text(trained.corpus)
    model = trained.model
    whole = model.text_bits(text)
    for cut in (0, 1, 17, 300):
        np.testing.assert_array_equal(model.text_bits(text[:cut]), whole[:cut])
    inputs = model.inputs(np.frombuffer(bytes(PAD) + text, np.uint8))
    places = np.random.default_rng().permutation(len(text))[:40] + PAD
    together = model.opinions(inputs, places, None).trained
    for some in (places[:1], places[7:20], places[::-1]):
        apart = model.opinions(inputs, some, None).trained
        np.testing.assert_array_equal(apart, together[[places.tolist().index(place) for place in some]])
    monkeypatch.setattr(models, "_CHUNK_PATH", 37)
    np.testing.assert_array_equal(model.text_bits(text), whole)


def test_what_follows_a_byte_does_not_count(trained):
    text = heldout_text(trained.corpus)
    whole = trained.model.text_bits(text)
    other = trained.model.text_bits(text[:200] + text[:150][::-1])
    np.testing.assert_array_equal(other[:200], whole[:200])
    assert (other[200:] != whole[200:]).any()


def test_a_long_text_is_continued_from_its_end_alone(trained):
    end = b"; a_very_long_name_of_it_all (x, y) some_other_very_long_na"
    for before in (b"", b"alpha beta 0.5 ", b"_" * 60):
        text = before + b"alpha" + end
        expected = trained.model.next_log_proba(text[-2 * PAD :])
        np.testing.assert_array_equal(trained.model.next_log_proba(text), expected)


def test_held_out_text_changes_nothing_that_is_fitted(trained):
    text = heldout_text(trained.corpus)
    other = train(make_corpus((b"zq" * 300, draw_text(np.random.default_rng(7)))))
    for area, values in trained.weights.items():
        for role, array in values.items():
            np.testing.assert_array_equal(other.weights[area][role], array)
    np.testing.assert_array_equal(other.model.mixing.weights, trained.model.mixing.weights)
    np.testing.assert_array_equal(other.model.text_bits(text), trained.model.text_bits(text))
    # a string that only the held-out text repeats stays news
    places = other.corpus.positions(HELDOUT)[100:600]
    assert not other.rows[places][:, :, 1:9].any()
    bits = other.model.text_bits(b"zq" * 300)
    np.testing.assert_array_equal(bits[100::2], bits[100])


@pytest.mark.parametrize("leave_out", ["document", "position"])
def test_experts_are_the_same_whether_rows_are_stored_or_computed(leave_out, trained):
    corpus = trained.corpus
    first = trained if leave_out == "document" else train(corpus, leave_out)
    second = train(corpus, leave_out, stored=False)
    for area, values in first.weights.items():
        for role, array in values.items():
            np.testing.assert_array_equal(second.weights[area][role], array)
    assert leave_out == "document" or (first.rows != trained.rows).any()


def test_a_saved_run_gives_the_same_model_and_wants_its_memory(trained, tmp_path):
    model, shape = trained.model, trained.model.layout.shape
    model.relay.save(tmp_path / "relay")
    model.router.save(tmp_path / "router")
    trained.fitted.save(tmp_path / "memory")
    bank = Bank.create(tmp_path, {**shape.roles, "b0": shape.roles["b2"]}, 2, EXPERTS)
    for area, weights in trained.weights.items():
        bank.write_group(area, weights)
    digests = input_digests(tmp_path)
    assert set(digests) == {"relay", "router", "memory"}
    write_manifest(tmp_path, model.layout, model.mixing, model.frequencies, digests)
    text = heldout_text(trained.corpus)
    again = load(tmp_path)
    np.testing.assert_array_equal(again.text_bits(text), model.text_bits(text))
    np.testing.assert_array_equal(again.next_log_proba(text), model.next_log_proba(text))
    fit_memory(trained.corpus, "position").save(tmp_path / "memory")
    with pytest.raises(UserError, match="memory: is not what the experts were trained with"):
        load(tmp_path)
    (tmp_path / "memory" / "memory.json").unlink()
    with pytest.raises(UserError, match="memory: missing; the experts were trained with it"):
        load(tmp_path)
