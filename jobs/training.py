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
from ..experts.training import TrainSpec, build_spec
from ..kernels.mlp_resident.contract import Inputs
from ..router.partition import AreaPartition, open_partition
from ..router.relay import load_relay
from ..router.sources import load_corpus
from . import plan as plans
from . import settings as settings_module
from .markers import directory_of


@dataclass(frozen=True)
class Training:
    """Everything a worker needs, and nothing that another worker writes.

    Attributes:
        directory: bank, markers and logs go here: the run directory, or controls/NAME in it.
        spec: what decides an expert's result.
        inputs: the corpus as the kernels see it.
        plan: groups.
        partition: inputs of every expert, by area.
        checkpoint_every: steps.
    """

    directory: Path
    spec: TrainSpec
    inputs: Inputs
    plan: plans.Plan
    partition: list[AreaPartition]
    checkpoint_every: int

    def group_inputs(self, group: plans.Group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(indices, offsets, expert ids) of a group."""
        area_first = min(entry.first_expert for entry in self.plan.groups if entry.area == group.area)
        offsets, indices = self.partition[group.area].group(group.first_expert - area_first, group.num_experts)
        return indices, offsets, np.arange(group.first_expert, group.first_expert + group.num_experts)

    def create_bank(self) -> Bank:
        """The bank, made if need be."""
        roles = self.spec.shape.roles
        self.directory.mkdir(parents=True, exist_ok=True)
        shapes = {**roles, "b0": roles["b2"]}
        return Bank.create(self.directory, shapes, len(self.plan.groups), self.plan.group_size)


def load(run: Path, config: DictConfig, control: str | None = None) -> Training:
    """The training of a run whose partition and plan are made.

    Args:
        run: run directory.
        config: its config.
        control: None for the experts themselves, or the name of a control.
    """
    settings = settings_module.read(config)
    corpus = load_corpus(run / "source")
    relay = load_relay(run / "relay")
    inputs = training_inputs(corpus, relay)
    expert = settings.expert(num_outputs(corpus), train_body=control != "frozen_body")
    estimator = settings.estimator
    if control == "backprop":
        estimator = dataclasses.replace(estimator, name="backprop")
    spec = build_spec(
        expert,
        estimator,
        settings.optimizer,
        settings.train,
        relay.num_features,
        training_frequencies(corpus),
        settings.backend,
    )
    partition = open_partition(run / "partition")
    return Training(
        directory_of(run, control), spec, inputs, plans.load(run), partition, settings.train.checkpoint_every
    )


def layout(training: Training, markers: dict[int, Marker], first_expert: np.ndarray) -> Layout:
    """Where the trained experts lie, and which cannot be used."""
    unusable: set[int] = set()
    for group in training.plan.groups:
        marker = markers.get(group.group)
        states = marker["experts"]["state"] if marker else ["pending"] * group.num_experts
        unusable |= {group.first_expert + place for place, state in enumerate(states) if state != "done"}
    return Layout(training.spec.shape, first_expert, training.plan.group_size, frozenset(unusable))
