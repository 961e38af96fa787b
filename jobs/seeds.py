"""The seed expert of a run: trained on a sample of everything, frozen, and shared by all experts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np

from ..ensemble.inputs import num_outputs, training_frequencies
from ..experts.families.mlp import MlpSpec, build_spec
from ..experts.training import train_seed
from ..kernels.errors import UserError
from ..kernels.mlp_resident.contract import Inputs
from ..router.artifact import load_state, save_state
from ..router.relay import Relay
from ..router.sources import HELDOUT, TRAIN, Corpus
from .progress import say
from .settings import Settings

# inputs held at once where memory is computed
_MOST_COMPUTED = 1 << 18
# no expert's id: names the draws of the seeds
_SEED_IDS = {"seed": 0xFFFFFFFE, "seed_mixer": 0xFFFFFFFD}


def seed_name(use_body: bool) -> str:
    """Experts with a hidden layer start from another seed than pure mixers."""
    return "seed" if use_body else "seed_mixer"


def make(run: Path, settings: Settings, corpus: Corpus, relay: Relay, inputs: Inputs) -> None:
    """Train the seeds that the run and its controls need."""
    both = {True} if settings.expert(num_outputs(corpus)).use_body else {False}
    if settings.mixer_areas or "mixers" in settings.controls:
        both = both | {False}
    optimizer = dataclasses.replace(
        settings.optimizer, learning_rate=settings.seed_rate, weight_decay=0.0, anchored=False
    )
    train = dataclasses.replace(settings.train, steps=settings.seed_steps, hold_back=0.0)
    for use_body in sorted(both):
        began = time.perf_counter()
        spec = build_spec(
            settings.expert(num_outputs(corpus), use_body=use_body),
            settings.estimator,
            optimizer,
            train,
            relay.num_features,
            training_frequencies(corpus),
            settings.backend,
        )
        name = seed_name(use_body)
        positions = corpus.positions(TRAIN).astype(np.uint32)
        if inputs.memory_is_computed:
            positions = positions[:: -(-len(positions) // _MOST_COMPUTED)]
        packed = train_seed(spec, inputs, positions, _SEED_IDS[name])
        seconds = time.perf_counter() - began
        loss = _loss(spec, inputs, corpus.positions(HELDOUT), packed)
        facts = {"steps": train.steps, "seconds": seconds, "bytes": packed.nbytes, "heldout_nats": loss}
        save_state(run / name, name, {"packed": packed}, facts)
        say(f"{name}: {train.steps:,} steps on everything in {seconds:.1f} s")


def _loss(spec: MlpSpec, inputs: Inputs, positions: np.ndarray, packed: np.ndarray) -> float:
    """Mean loss (nats), a block of inputs at a time where their memory is computed."""
    if not inputs.memory_is_computed:
        return spec.loss(inputs, positions, packed)
    total = 0.0
    for first in range(0, len(positions), _MOST_COMPUTED):
        block = positions[first : first + _MOST_COMPUTED]
        total += len(block) * spec.loss(inputs.gathered(block), np.arange(len(block)), packed)
    return total / len(positions)


def load_seed(run: Path, name: str) -> np.ndarray:
    """Weights packed [T] of a seed; UserError where it is missing or damaged."""
    return _load(run, name)[0]["packed"]


def facts(run: Path, name: str) -> dict | None:
    """Steps, seconds, bytes and held-out loss of a seed, None where the run has none."""
    if not (run / name / f"{name}.json").exists():
        return None
    known = _load(run, name)[1]
    return {key: known[key] for key in ("steps", "seconds", "bytes", "heldout_nats", "digest")}


def _load(run: Path, name: str) -> tuple[dict[str, np.ndarray], dict]:
    try:
        return load_state(run / name, name)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{run / name}: no readable seed expert ({error}); start a new run") from None
