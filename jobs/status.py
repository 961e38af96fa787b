"""What is done, running, pending, failed and cold, from the markers and the launcher's progress file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ..kernels.errors import UserError
from . import plan as plans
from .markers import directory_of, finished_markers
from .progress import PROGRESS, STALE_SECONDS
from .rundir import read_json
from .table import rows

STATES = ("done", "running", "pending", "failed", "cold")


def area_names(run: Path) -> list[str]:
    """Names of the areas, in order."""
    stored = read_json(run / "router" / "router.json", f"run colonnade partition run={run}")
    return [entry["name"] for entry in stored["areas"]]


def under_way(directory: Path) -> dict[str, Any] | None:
    """What the launcher of a training directory last wrote; None where none is at work there."""
    path = directory / PROGRESS
    try:
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            # a launcher that was killed leaves its file behind
            return None
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def collect(run: Path, control: str | None = None) -> tuple[dict[str, Any], dict[str, list]]:
    """(the status as JSON, columns of all experts) of a run's experts or of a control."""
    directory = directory_of(run, control)
    plan = plans.load(run)
    markers = finished_markers(directory, plan)
    progress = under_way(directory)
    running = set(progress["running"]) if progress else set()
    names = area_names(run)
    columns = rows(plan, markers, names, 0, [0] * len(names))
    for place, group in enumerate(columns["group"]):
        if columns["state"][place] == "pending" and group in running:
            columns["state"][place] = "running"
    groups = []
    for group in plan.groups:
        marker = markers.get(group.group)
        groups.append(
            {
                "group": group.group,
                "area": group.area,
                "experts": group.num_experts,
                "state": "done" if marker else "running" if group.group in running else "pending",
                "failed": len(marker["failed"]) if marker else 0,
            }
        )
    counts = {state: columns["state"].count(state) for state in STATES}
    return {"experts": counts, "groups": groups, "progress": progress}, columns


def select(columns: dict[str, list], experts: list[int] | None, state: str | None) -> list[dict[str, Any]]:
    """Rows of the experts asked for; UserError for an id or a state that does not exist."""
    if state is not None and state not in STATES:
        raise UserError(f"state={state}: unknown; known: {', '.join(STATES)}")
    total = len(columns["expert"])
    for expert in experts or []:
        if not 0 <= expert < total:
            raise UserError(f"experts=[{expert}]: no such expert; the run has 0 to {total - 1}")
    wanted = None if experts is None else set(experts)
    return [
        {name: values[place] for name, values in columns.items() if name not in ("probes",)}
        for place in range(total)
        if (wanted is None or columns["expert"][place] in wanted)
        and (state is None or columns["state"][place] == state)
    ]
