"""Runs whose experts see whole windows: partition, seed, evaluation."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..ensemble.metrics import LOG2, document_interval
from ..ensemble.windows import WindowModel, mean_probability, score_windows
from ..experts.bank import Bank, Marker
from ..experts.families.general import GeneralSpec
from ..experts.families.lstm import (
    WindowInputs,
    initial_embedding,
    lstm_spec,
    train_seed_body,
)
from ..kernels.errors import UserError
from ..kernels.files import write_json_atomic
from ..router import partition as partitions
from ..router.artifact import load_state, save_state
from ..router.sources import CALIBRATION, HELDOUT, TRAIN, TextCorpus
from ..router.windows.cutting import windows
from .plan import Plan
from .progress import say
from .rundir import read_json
from .settings import Settings

SEED = "seed"
_SEED_ID = 0xFFFFFFFE


@dataclass(frozen=True)
class Seed:
    """What every expert shares.

    Attributes:
        body: float32 [T] that experts start from, or None for random starts.
        embedding: float32 [256, w].
    """

    body: np.ndarray | None
    embedding: np.ndarray


def partition(run: Path, settings: Settings, corpus: TextCorpus) -> dict[str, str]:
    """Source, router, partition, seed; returns their digests."""
    from ..router.windows.router import WindowRouter

    began = time.perf_counter()
    own = settings.windows()
    # a split without a window is found before anything is written
    counts = [len(windows(corpus, split, own.length)[0]) for split in (TRAIN, CALIBRATION, HELDOUT)]
    say(
        f"source {corpus.name}: {counts[0]:,} windows of {own.length:,} bytes to train on, {counts[1]:,} for "
        f"calibration, {counts[2]:,} held out"
    )
    router, starts, assigned = WindowRouter.fit(
        corpus, own.length, own.prefix, own.experts, own.dim, own.slack, settings.train.seed
    )
    for note in router.notes:
        say(f"note: {note}")
    areas = partitions.build(assigned[:, None], starts, np.array([0, own.experts]))
    corpus.save(run / "source")
    router.save(run / "router")
    partitions.save(run / "partition", areas)
    digest = _digest(run / "router" / "windows.json")
    area = {"name": "windows", "strategy": "kmeans", "overflow": 0}
    write_json_atomic(run / "router" / "router.json", {"schema": 1, "digest": digest, "areas": [area]})
    say(f"router: {router.num_experts:,} experts; partition in {time.perf_counter() - began:.1f} s")
    digests = {"source": corpus.digest, "router": digest}
    _make_seed(run, settings, corpus, starts)
    return digests | {"seed": _digest(run / SEED / f"{SEED}.json")}


def _digest(path: Path) -> str:
    return read_json(path, "start a new run")["digest"]


def _make_seed(run: Path, settings: Settings, corpus: TextCorpus, starts: np.ndarray) -> None:
    began = time.perf_counter()
    config = settings.lstm()
    alone = dataclasses.replace(config, train_embedding=False, loss_coupling="independent")
    if not settings.seed_steps:
        embedding = initial_embedding(config.shape.embedding_width, settings.train.seed)
        save_state(run / SEED, SEED, {"embedding": embedding}, {"steps": 0, "seconds": 0.0})
        return
    optimizer = dataclasses.replace(settings.optimizer, learning_rate=settings.seed_rate, anchored=False)
    if optimizer.schedule == "plateau":
        optimizer = dataclasses.replace(optimizer, schedule="constant")
    train = dataclasses.replace(settings.train, steps=settings.seed_steps, hold_back=0.0)
    spec = lstm_spec(alone, settings.estimator, optimizer, train)
    body, embedding, loss = train_seed_body(
        spec, corpus.data, settings.windows().length, starts.astype(np.uint32), _SEED_ID, settings.head_rate
    )
    seconds = time.perf_counter() - began
    facts = {"steps": train.steps, "seconds": seconds, "train_nats": loss, "bytes": body.nbytes + embedding.nbytes}
    save_state(run / SEED, SEED, {"body": body, "embedding": embedding}, facts)
    say(f"seed: {train.steps:,} steps on all windows in {seconds:.1f} s, {loss / LOG2:.3f} bits/byte in training")


def load_shared(run: Path) -> Seed:
    """The seed of a run; UserError where it is missing or damaged."""
    try:
        arrays, _ = load_state(run / SEED, SEED)
        return Seed(arrays.get("body"), arrays["embedding"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{run / SEED}: no readable seed expert ({error}); start a new run") from None


def spec_and_inputs(run: Path, settings: Settings, corpus: TextCorpus) -> tuple[GeneralSpec, WindowInputs]:
    """What decides an expert's result, and what it is trained on."""
    config, shared = settings.lstm(), load_shared(run)
    start = shared.body
    if start is not None and config.train_embedding:
        start = np.concatenate([start, shared.embedding.reshape(-1)])
    spec = lstm_spec(config, settings.estimator, settings.optimizer, settings.train, start)
    embedding = None if config.train_embedding else shared.embedding
    return spec, WindowInputs(corpus.data, settings.windows().length, embedding)


def open_model(run: Path, settings: Settings, plan: Plan, markers: dict[int, Marker]) -> WindowModel:
    """The trained experts of a run; UserError where none can be used."""
    from ..router.windows.router import WindowRouter

    own, config = settings.windows(), settings.lstm()
    bank = Bank(run)
    usable = {
        group.first_expert + place: (group.group, place)
        for group in plan.groups
        if group.group in markers
        for place, state in enumerate(markers[group.group]["experts"]["state"])
        if state == "done"
    }
    if not usable:
        raise UserError(f"{run}: no expert can be used; see experts.parquet for the reasons")

    def weights_of(expert: int) -> np.ndarray:
        group, place = usable[expert]
        roles = bank.read_experts(group, np.array([place]))
        return np.concatenate([roles[role].reshape(-1) for role in config.shape.roles])

    embedding = None if config.train_embedding else load_shared(run).embedding
    top_k = min(settings.top_k or own.top_k, len(usable))
    router = WindowRouter.load(run / "router")
    return WindowModel(config.shape, router, weights_of, np.array(sorted(usable)), embedding, top_k)


def evaluate(run: Path, settings: Settings, corpus: TextCorpus, plan: Plan, markers: dict[int, Marker]) -> dict:
    """`heldout` of summary.json: bits per byte over the bytes after the prefix, and how many there are.

    Besides: `by_k`, the loss when the k nearest experts are averaged, and `seed`, the seed expert alone.
    """
    own, shared = settings.windows(), load_shared(run)
    model = open_model(run, settings, plan, markers)
    starts, _ = windows(corpus, HELDOUT, own.length)
    log_p = model.log_proba(corpus.data, starts)
    scored = scored_positions(settings, corpus)
    bits = -mean_probability(log_p, model.top_k).reshape(-1) / LOG2
    found: dict[str, Any] = {
        "bits_per_byte": float(bits.mean()),
        "interval": list(document_interval(bits, corpus.doc_of(scored), settings.train.seed)),
        "bytes": len(bits),
        "by_k": [float(-mean_probability(log_p, k).mean() / LOG2) for k in range(1, model.top_k + 1)],
        "novel_bits_per_byte": None,
        "pool": "mean_proba",
        "k": model.top_k,
        "seed": None,
    }
    if shared.body is not None:
        shape = dataclasses.replace(settings.lstm(), train_embedding=False).shape
        only = np.zeros((len(starts), 1), np.int64)
        body = shared.body
        by_seed = score_windows(
            shape, lambda _: body, shared.embedding, corpus.data, starts, own.length, own.prefix, only
        )
        found["seed"] = float(-by_seed.mean(dtype=np.float64) / LOG2)
    return found


def scored_positions(settings: Settings, corpus: TextCorpus) -> np.ndarray:
    """Positions that the held-out loss is over, int64."""
    own = settings.windows()
    starts, _ = windows(corpus, HELDOUT, own.length)
    return (starts[:, None] + np.arange(own.prefix, own.length)).reshape(-1)
