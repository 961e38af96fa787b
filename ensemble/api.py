"""Colonnade in a notebook: fit, predict and score on text and on arrays, without a run directory.

    model = ByteModel(experts_per_area=64, steps=200).fit(open("corpus.txt", "rb").read())
    model.score(b"some other text")              # bits per byte
    model.sample(b"def f(", 100)

    classifier = ArrayClassifier(areas=4, experts_per_area=4).fit(x, y)
    classifier.score(x_test, y_test)             # accuracy

Experts are trained in threads of this process; the results are those of a run with the same settings.

Legend: N examples, F0 raw features, V classes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ..experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from ..experts.families.mlp import MlpSpec, build_spec
from ..experts.training import GroupResult, train_group, warm_up
from ..kernels.errors import UserError
from ..kernels.mlp_resident.contract import Inputs
from ..router import partition as partitions
from ..router.relay import Relay, fit_array_relay, fit_text_relay
from ..router.router import Router, RouterConfig
from ..router.sources import CALIBRATION, TRAIN, ArrayCorpus, Corpus, arrays, split_documents
from ..router.strategies import AreaConfig
from . import mixing as mix
from .evaluation import gather
from .inputs import training_frequencies, training_inputs
from .layout import Layout
from .model import EnsembleModel

_GROUP_SIZE = 128
TEXT_CONTEXTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 0),
    ((1, 2), 0),
    ((), 1),
    ((2,), 0),
    ((1, 2, 3), 0),
    ((1, 3), 0),
    ((3,), 0),
    ((4,), 0),
)


class MemoryBank:
    """Weights of trained groups, held in memory; reads like `experts.bank.Bank`."""

    def __init__(self, groups: dict[int, dict[str, np.ndarray]]) -> None:
        self._groups = groups

    def read_experts(self, group: int, places: np.ndarray) -> dict[str, np.ndarray]:
        """Weights by role of the experts at `places` of a group."""
        return {role: values[places] for role, values in self._groups[group].items()}


def fit_ensemble(
    corpus: Corpus, relay: Relay, areas: RouterConfig, spec: MlpSpec, pool: str, head: str, threads: int | None = None
) -> tuple[EnsembleModel, list[dict[str, list]]]:
    """Route, train every expert, fit the mixing weights.

    Args:
        corpus: examples in splits.
        relay: fitted features.
        areas: of the router.
        spec: what an expert is and how it is trained.
        pool: how opinions are combined.
        head: of the experts.
        threads: None for one a core; the result does not depend on it.

    Returns:
        The ensemble, and the columns of every group (see `experts.training.GroupResult`).
    """
    router, assigned = Router.fit(areas, corpus, relay)
    parts = partitions.build(assigned, corpus.positions(TRAIN), router.first_expert)
    layout, bank, results = train_experts(spec, training_inputs(corpus, relay), parts, router.first_expert, threads)
    columns = [result.columns for result in results]
    without = EnsembleModel(relay, router, layout, bank, mix.Mixing(head, pool, np.zeros(0)), spec.frequencies)
    calibration = gather(without, corpus, (CALIBRATION,), untrained=False)[CALIBRATION]
    mixing = mix.fit(head, pool, calibration.trained, calibration.targets)
    return EnsembleModel(relay, router, layout, bank, mixing, spec.frequencies), columns


def train_experts(
    spec: MlpSpec,
    inputs: Inputs,
    parts: list[partitions.AreaPartition],
    first_expert: np.ndarray,
    threads: int | None = None,
) -> tuple[Layout, MemoryBank, list[GroupResult]]:
    """Train every expert of a partition in threads.

    Args:
        spec: what an expert is and how it is trained.
        inputs: the corpus as experts see it.
        parts: inputs of each area's experts.
        first_expert: int64 [A + 1], global id of each area's first expert.
        threads: None for one a core; the result does not depend on it.

    Returns:
        Where experts lie and which are unusable, their weights, and what training told of each group in order.
    """
    warm_up(spec, inputs)
    empty = Layout(spec.shape, first_expert, _GROUP_SIZE, frozenset())
    jobs = []
    for area in range(empty.num_areas):
        first = 0
        for group, count in empty.groups(area):
            jobs.append((area, first, group, count))
            first += count

    def train(job: tuple[int, int, int, int]) -> tuple[int, GroupResult]:
        area, first, group, count = job
        offsets, indices = parts[area].group(first, count)
        ids = np.arange(first, first + count) + first_expert[area]
        return group, train_group(spec, inputs, indices, offsets, ids)

    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as workers:
        found = dict(workers.map(train, jobs))
    results = [found[group] for group in sorted(found)]
    unusable = [
        expert
        for own in (result.columns for result in results)
        for expert, state in zip(own["expert"], own["state"], strict=True)
        if state != "done"
    ]
    layout = Layout(spec.shape, first_expert, _GROUP_SIZE, frozenset(unusable))
    return layout, MemoryBank({group: result.weights for group, result in found.items()}), results


def _fitted(model: EnsembleModel | None) -> EnsembleModel:
    if model is None:
        raise UserError("the model is not fitted; call fit first")
    return model


@dataclass
class ByteModel:
    """A language model over bytes: hash areas, tree heads, logistic mixing.

    Attributes:
        experts_per_area: experts of each area.
        areas: 1 to 8, each looking at another part of the context first.
        context: bytes looked back on.
        dim: dimensions of a byte's embedding.
        expert: what an expert is.
        estimator: how gradients are estimated.
        optimizer: how they are followed.
        steps: updates of every expert.
        batch: inputs a step.
        seed: of everything that is drawn.
        threads: None for one a core.
        model_: the fitted ensemble.
    """

    experts_per_area: int = 64
    areas: int = 8
    context: int = 12
    dim: int = 12
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 300
    batch: int = 64
    seed: int = 0
    threads: int | None = None
    model_: EnsembleModel | None = None

    def fit(self, text: str | bytes | list[str] | list[bytes]) -> ByteModel:
        """Train on a text, or on a list of documents; a tenth of it is held back for calibration and evaluation.

        Raises:
            UserError: a text too short to split, or settings out of range.
        """
        if not 1 <= self.areas <= len(TEXT_CONTEXTS):
            raise UserError(f"areas={self.areas}: must be between 1 and {len(TEXT_CONTEXTS)}")
        documents = text if isinstance(text, list) else [text]
        named = [(f"document {place:09d}", _bytes(content)) for place, content in enumerate(documents)]
        corpus = split_documents("text", named, self.seed)
        relay = fit_text_relay(corpus, self.context, self.dim)
        areas = RouterConfig(
            tuple(
                AreaConfig(f"area{place}", "hash", self.experts_per_area, lags=lags, word=word)
                for place, (lags, word) in enumerate(TEXT_CONTEXTS[: self.areas])
            )
        )
        spec = build_spec(
            self.expert,
            self.estimator,
            self.optimizer,
            TrainConfig(steps=self.steps, batch=self.batch, seed=self.seed),
            relay.num_features,
            training_frequencies(corpus),
        )
        self.model_, _ = fit_ensemble(corpus, relay, areas, spec, "logistic", self.expert.head, self.threads)
        return self

    def score(self, text: str | bytes) -> float:
        """Bits per byte of a text."""
        content = _bytes(text)
        if not content:
            raise UserError("the text is empty; give at least one byte")
        return float(_fitted(self.model_).text_bits(content).mean())

    def predict_log_proba(self, text: str | bytes) -> np.ndarray:
        """Log-probabilities (nats) of the byte that follows a text, float64 [256]."""
        return _fitted(self.model_).next_log_proba(_bytes(text))

    def sample(self, prompt: str | bytes = b"", count: int = 100, temperature: float = 1.0) -> bytes:
        """A continuation of `prompt` by `count` bytes."""
        return _fitted(self.model_).sample(_bytes(prompt), count, self.seed, temperature)


@dataclass
class ArrayClassifier:
    """A classifier of rows: balanced k-means areas, softmax heads, a logarithmic pool.

    Attributes:
        experts_per_area: experts of each area.
        areas: partitions, each from other starting points.
        pca: principal components to work on; None for the standardised columns.
        hidden: units of an expert.
        estimator: how gradients are estimated.
        optimizer: how they are followed.
        steps: updates of every expert.
        batch: inputs a step.
        seed: of everything that is drawn.
        threads: None for one a core.
        model_: the fitted ensemble.
    """

    experts_per_area: int = 4
    areas: int = 8
    pca: int | None = None
    hidden: int = 32
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig("sgd", learning_rate=0.2, clip_norm=0.5, weight_decay=0.001)
    )
    steps: int = 300
    batch: int = 64
    seed: int = 0
    threads: int | None = None
    model_: EnsembleModel | None = None

    def fit(self, x: np.ndarray, y: np.ndarray, split: np.ndarray | None = None) -> ArrayClassifier:
        """Train on rows x [N, F0] and classes y [N].

        Without `split` (see `router.sources.arrays.build`) a twentieth of the rows calibrates the mixing weights and
        another is held out.

        Raises:
            UserError: shapes, types or values that cannot be used.
        """
        return self.fit_corpus(arrays.build("x and y", x, y, split, self.seed))

    def fit_corpus(self, corpus: ArrayCorpus) -> ArrayClassifier:
        """Train on rows that are split already."""
        relay = fit_array_relay(corpus, self.pca)
        areas = RouterConfig(
            tuple(AreaConfig(f"area{a}", "kmeans", self.experts_per_area, seed=a) for a in range(self.areas))
        )
        expert = ExpertConfig(head="softmax", hidden=self.hidden, num_outputs=corpus.num_classes)
        spec = build_spec(
            expert,
            self.estimator,
            self.optimizer,
            TrainConfig(steps=self.steps, batch=self.batch, seed=self.seed),
            relay.num_features,
            training_frequencies(corpus),
        )
        self.model_, _ = fit_ensemble(corpus, relay, areas, spec, "log", "softmax", self.threads)
        return self

    def predict_log_proba(self, x: np.ndarray) -> np.ndarray:
        """Log-probabilities (nats) of the classes, float64 [N, V]."""
        return _fitted(self.model_).predict_log_proba(x)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of the classes, float64 [N, V]."""
        return np.exp(self.predict_log_proba(x))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Classes, int64 [N]."""
        return self.predict_log_proba(x).argmax(1)

    def score(self, x: np.ndarray, y: np.ndarray) -> float:
        """Accuracy."""
        return float((self.predict(x) == np.asarray(y)).mean())


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)
