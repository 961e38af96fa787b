"""What a training directory trains: the run's experts, or one of its controls on the same partition."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from ..ensemble.inputs import num_outputs, training_frequencies, training_inputs
from ..ensemble.layout import Layout
from ..experts.bank import Bank, Marker
from ..experts.families.general import GeneralSpec
from ..experts.families.lstm import WindowInputs
from ..experts.families.mlp import MlpSpec, build_spec
from ..experts.families.module import CountBiases, ModuleBody, module_spec
from ..kernels.mlp_resident.contract import Inputs
from ..router.partition import AreaPartition, open_partition
from ..router.relay import Relay, load_relay
from ..router.sources import Corpus, TextCorpus, load_corpus
from . import code, memories, windows
from . import plan as plans
from . import settings as settings_module
from .markers import directory_of
from .seeds import load_seed, seed_name
from .settings import Settings


@dataclass(frozen=True)
class Training:
    """Everything a worker needs, and nothing that another worker writes.

    Attributes:
        directory: bank, markers and logs go here: the run directory, or controls/NAME in it.
        specs: what decides an expert's result, one an area.
        inputs: the corpus as the kernels see it.
        plan: groups.
        partition: inputs of every expert, by area.
        checkpoint_every: steps.
    """

    directory: Path
    specs: tuple[MlpSpec | GeneralSpec, ...]
    inputs: Inputs | WindowInputs
    plan: plans.Plan
    partition: list[AreaPartition]
    checkpoint_every: int

    @property
    def spec(self) -> MlpSpec | GeneralSpec:
        """Of the first area; steps, batch, shape and backend are those of all."""
        return self.specs[0]

    def group_inputs(self, group: plans.Group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(indices, offsets, expert ids) of a group."""
        area_first = min(entry.first_expert for entry in self.plan.groups if entry.area == group.area)
        offsets, indices = self.partition[group.area].group(group.first_expert - area_first, group.num_experts)
        return indices, offsets, np.arange(group.first_expert, group.first_expert + group.num_experts)

    def create_bank(self) -> Bank:
        """The bank, made if need be."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return Bank.create(self.directory, self.spec.roles, len(self.plan.groups), self.plan.group_size)


def area_specs(
    run: Path, settings: Settings, corpus: Corpus, relay: Relay, control: str | None
) -> tuple[MlpSpec | GeneralSpec, ...]:
    """What decides an expert's result, one spec an area."""
    estimator, optimizer = settings.estimator, settings.optimizer
    if control == "backprop":
        estimator = dataclasses.replace(estimator, name="backprop", directions="signs", head="delta")

    if settings.family == "module":
        spec = module_spec(
            code.imported("expert.module", settings.module),
            settings.module,
            settings.expert(num_outputs(corpus)),
            estimator,
            optimizer,
            settings.train,
            relay.num_features,
            training_frequencies(corpus),
        )
        return (spec,) * len(settings.router().areas)

    def build(use_body: bool) -> MlpSpec:
        expert = settings.expert(num_outputs(corpus), control != "frozen_body", use_body)
        name = seed_name(expert.use_body)
        return build_spec(
            expert,
            estimator,
            optimizer,
            settings.train,
            relay.num_features,
            training_frequencies(corpus),
            settings.backend,
            load_seed(run, name) if settings.seed_steps else None,
        )

    mixers = settings.mixer_areas
    names = [area.name for area in settings.router().areas]
    made = {use_body: build(use_body) for use_body in {name not in mixers and control != "mixers" for name in names}}
    return tuple(made[name not in mixers and control != "mixers"] for name in names)


def load(run: Path, config: DictConfig, control: str | None = None) -> Training:
    """The training of a run whose partition and plan are made.

    Args:
        run: run directory.
        config: its config.
        control: None for the experts themselves, or the name of a control.
    """
    settings = settings_module.read(config)
    corpus = load_corpus(run / "source")
    if settings.family == "lstm":
        assert isinstance(corpus, TextCorpus)
        spec, seen = windows.spec_and_inputs(run, settings, corpus)
        partition = open_partition(run / "partition")
        directory = directory_of(run, control)
        return Training(directory, (spec,), seen, plans.load(run), partition, settings.train.checkpoint_every)
    relay = load_relay(run / "relay")
    inputs = training_inputs(corpus, relay, memories.open_for_training(run, corpus) if settings.memory else None)
    specs = area_specs(run, settings, corpus, relay, control)
    partition = open_partition(run / "partition")
    return Training(
        directory_of(run, control), specs, inputs, plans.load(run), partition, settings.train.checkpoint_every
    )


def layout(training: Training, markers: dict[int, Marker], first_expert: np.ndarray) -> Layout:
    """Where the trained experts lie, and which cannot be used."""
    unusable: set[int] = set()
    for group in training.plan.groups:
        marker = markers.get(group.group)
        states = marker["experts"]["state"] if marker else ["pending"] * group.num_experts
        unusable |= {group.first_expert + place for place, state in enumerate(states) if state != "done"}
    spec = training.spec
    if isinstance(spec, MlpSpec):
        shape = spec.shape
    else:
        assert isinstance(spec.body, ModuleBody)
        assert isinstance(spec.fixed, CountBiases)
        shape = spec.body.shape(spec.fixed.head)
    return Layout(shape, first_expert, training.plan.group_size, frozenset(unusable))
