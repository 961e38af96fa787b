"""Which groups of a training directory are finished: all that `status` needs, and quick to import."""

from __future__ import annotations

from pathlib import Path

from ..experts.bank import Marker, read_marker
from ..kernels.errors import UserError
from . import plan as plans

CONTROLS = ("frozen_body", "backprop", "mixers")


def directory_of(run: Path, control: str | None) -> Path:
    """Where the experts (None) or a control are trained."""
    return run if control is None else run / "controls" / control


def finished_markers(directory: Path, plan: plans.Plan) -> dict[int, Marker]:
    """Markers of the groups that are done, by group."""
    found = {}
    for group in plan.groups:
        marker = read_marker(directory, group.group)
        if marker is not None and marker["state"] == "done":
            if marker["first_expert"] != group.first_expert or marker["num_experts"] != group.num_experts:
                raise UserError(f"{directory}/groups/{group.group}.json: is of another plan; start a new run directory")
            found[group.group] = marker
    return found
