"""The plan: experts cut into groups, the unit of scheduling, storage and tracking."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ..kernels.errors import UserError
from ..kernels.files import write_json_atomic
from .rundir import read_json
from .slices import Slice

SCHEMA = 1


@dataclass(frozen=True)
class Group:
    """Consecutive experts of one area.

    Attributes:
        group: its number: shard of the bank, name of the marker.
        area: number of the area.
        first_expert: global id.
        num_experts: how many.
        inputs: training inputs of all of them.
        busy_experts: experts that hold inputs: what the group costs, since every one trains equally long.
    """

    group: int
    area: int
    first_expert: int
    num_experts: int
    inputs: int
    busy_experts: int


@dataclass(frozen=True)
class Plan:
    """All groups in order of their experts."""

    group_size: int
    groups: tuple[Group, ...]

    @property
    def num_experts(self) -> int:
        """Experts of all groups."""
        return sum(group.num_experts for group in self.groups)


def make(sizes: np.ndarray, first_expert: np.ndarray, group_size: int) -> Plan:
    """Cut areas into groups; the last one of an area may be short.

    Args:
        sizes: int64 [E], inputs of every expert.
        first_expert: int64 [A + 1].
        group_size: experts in a full group.
    """
    groups = []
    for area in range(len(first_expert) - 1):
        for first in range(int(first_expert[area]), int(first_expert[area + 1]), group_size):
            last = min(first + group_size, int(first_expert[area + 1]))
            own = sizes[first:last]
            groups.append(Group(len(groups), area, first, last - first, int(own.sum()), int((own > 0).sum())))
    return Plan(group_size, tuple(groups))


def save(run: Path, plan: Plan, slices: list[Slice]) -> None:
    """Write plan.json."""
    write_json_atomic(
        run / "plan.json",
        {
            "schema": SCHEMA,
            "version": version("colonnade"),
            "group_size": plan.group_size,
            "groups": [asdict(group) for group in plan.groups],
            "slices": [asdict(entry) for entry in slices],
        },
    )


def load(run: Path) -> Plan:
    """Read plan.json."""
    path = run / "plan.json"
    mend = f"run colonnade plan run={run}"
    stored = read_json(path, mend)
    if stored.get("schema") != SCHEMA:
        raise UserError(f"{path}: schema {stored.get('schema')}, this version reads {SCHEMA}; {mend}")
    try:
        return Plan(int(stored["group_size"]), tuple(Group(**entry) for entry in stored["groups"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: field {error} is missing or wrong; {mend}") from None
