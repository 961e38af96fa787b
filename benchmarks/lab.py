"""One partition of a text, on which experiments train experts in threads and compare held-out losses.

Settings are those of tenk at a fraction of the text and of the experts: the same inputs an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from colonnade.ensemble import mixing as mix
from colonnade.ensemble.api import TEXT_CONTEXTS, train_experts
from colonnade.ensemble.evaluation import gather
from colonnade.ensemble.inputs import training_frequencies, training_inputs
from colonnade.ensemble.metrics import LOG2
from colonnade.ensemble.model import EnsembleModel
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.mlp import MlpSpec, build_spec
from colonnade.router import partition as partitions
from colonnade.router.relay import fit_text_relay
from colonnade.router.router import Router, RouterConfig
from colonnade.router.sources import CALIBRATION, HELDOUT, TRAIN, SourceConfig, load_source
from colonnade.router.strategies import AreaConfig

PACE_STEPS = 40


@dataclass(frozen=True)
class Found:
    """What one training gave: calibration and held-out bits/byte, CPU-seconds in the loops, failed experts, and what
    was found of the estimates where the spec asks for it."""

    calibration: float
    heldout: float
    cpu_seconds: float
    failed: int
    diagnostics: list[dict]


class Lab:
    """A corpus with its relay and router, and the experts' inputs.

    Args:
        fraction: of the library's documents.
        experts: in each area.
        areas: the first so many of tenk's hash areas.
        strategy: `hash`, or `kmeans` or `random`: areas that differ by their seeds.
        split_seed: of the split.
        path: of another text than the standard library.
        context: bytes looked back on.
        dim: of the embedding of each.
        lags: what the areas hash, where it is not tenk's.
    """

    def __init__(
        self, fraction=0.125, experts=160, areas=4, strategy="hash", split_seed=0, path=None, context=12, dim=12,
        lags=None,
    ) -> None:  # fmt: skip
        self.corpus = load_source(SourceConfig("text" if path else "stdlib", path, split_seed, fraction))
        self.relay = fit_text_relay(self.corpus, context, dim)
        config = RouterConfig(
            tuple(
                AreaConfig(
                    f"a{place}",
                    strategy,
                    experts,
                    lags=own if strategy == "hash" else (),
                    seed=place,
                    word=word if strategy == "hash" else 0,
                )
                for place, (own, word) in enumerate([(lags, 0)] if lags else TEXT_CONTEXTS[:areas])
            )
        )
        self.router, assigned = Router.fit(config, self.corpus, self.relay)
        self.parts = partitions.build(assigned, self.corpus.positions(TRAIN), self.router.first_expert)
        self.inputs = training_inputs(self.corpus, self.relay)
        self.frequencies = training_frequencies(self.corpus)

    def spec(self, expert=None, estimator=None, optimizer=None, train=None, seed_expert=None) -> MlpSpec:
        """A spec on this corpus; defaults are tenk's."""
        return build_spec(
            expert or ExpertConfig(),
            estimator or EstimatorConfig(),
            optimizer or OptimizerConfig(),
            train or TrainConfig(),
            self.relay.num_features,
            self.frequencies,
            "auto",
            seed_expert,
        )

    def train(self, spec: MlpSpec, untrained: bool = False) -> Found:
        """Train every expert and mix; with `untrained` the count biases alone are scored."""
        layout, bank, results = train_experts(spec, self.inputs, self.parts, self.router.first_expert)
        model = EnsembleModel(
            self.relay, self.router, layout, bank, mix.Mixing("tree", "logistic", np.zeros(0)), self.frequencies
        )
        gathered = gather(model, self.corpus, (CALIBRATION, HELDOUT), untrained=untrained)
        sides = {split: own.untrained if untrained else own.trained for split, own in gathered.items()}
        calibration, heldout = gathered[CALIBRATION], gathered[HELDOUT]
        mixing = mix.fit("tree", "logistic", sides[CALIBRATION], calibration.targets)
        losses = [
            float(mix.losses(mixing, sides[split], own.targets).mean() / LOG2)
            for split, own in ((CALIBRATION, calibration), (HELDOUT, heldout))
        ]
        columns = [result.columns for result in results]
        seconds = sum(sum(own["seconds"]) for own in columns)
        looks = [row for result in results for row in result.diagnostics]
        return Found(*losses, seconds, sum(own["state"].count("failed") for own in columns), looks)

    def pace(self, make) -> float:
        """CPU-seconds of one step of all experts, from a short training of `make(steps)`."""
        return self.train(make(PACE_STEPS)).cpu_seconds / PACE_STEPS
