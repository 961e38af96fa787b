"""`status`: where a run stands, also while it is under way in another shell."""

from __future__ import annotations

import sys
import time
from typing import Any

from omegaconf import DictConfig, ListConfig

from ...kernels.errors import UserError
from .. import fields, rundir, status
from ..markers import CONTROLS, directory_of

_WATCH_SECONDS = 2.0


def run(config: DictConfig) -> dict[str, Any]:
    """Counts, groups, and the experts asked for."""
    run_directory = rundir.require(config)
    experts = _experts(config)
    state = fields.text(config, "state")
    watch = fields.number(config, "watch", bool)
    while True:
        found, columns = status.collect(run_directory)
        found["controls"] = {
            control: status.collect(run_directory, control)[0]
            for control in CONTROLS
            if directory_of(run_directory, control).is_dir()
        }
        result: dict[str, Any] = {"run": str(run_directory), **found}
        if experts is not None or state is not None:
            result["selected"] = status.select(columns, experts, state)
        if not watch or all(state["experts"]["pending"] + state["experts"]["running"] == 0
                            for state in (found, *found["controls"].values())):  # fmt: skip
            return result
        print(render(result), file=sys.stderr)
        time.sleep(_WATCH_SECONDS)


def _experts(config: DictConfig) -> list[int] | None:
    value = config.experts
    if value is None:
        return None
    values = list(value) if isinstance(value, ListConfig) else [value]
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in values):
        raise UserError(f"experts={value}: must be a list of expert ids, as in experts=[17,42]")
    return values


def render(result: dict[str, Any]) -> str:
    """Counts by state, progress, and a row for each expert asked for."""
    counts = ", ".join(f"{count:,} {state}" for state, count in result["experts"].items() if count)
    done = sum(group["state"] == "done" for group in result["groups"])
    lines = [f"experts: {counts or 'none'}", f"groups: {done:,} of {len(result['groups']):,} committed"]
    for name, control in result["controls"].items():
        committed = sum(group["state"] == "done" for group in control["groups"])
        lines.append(f"{name}: {committed:,} of {len(control['groups']):,} groups committed")
    for state in (result, *result["controls"].values()):
        progress = state["progress"]
        if progress and progress["eta_seconds"] is not None:
            rate = progress["expert_steps_per_second"]
            lines.append(f"under way: {rate:,.0f} expert-steps/s, {progress['eta_seconds']:.0f} s left")
    for row in result.get("selected", []):
        loss = "" if row["loss_last_nats"] is None else f"  loss {row['loss_last_nats']:.3f} nats"
        size = "" if row["size"] is None else f"  {row['size']:,} inputs"
        reason = f"  {row['reason']}" if row["reason"] else ""
        lines.append(f"expert {row['expert']}  {row['area']}  group {row['group']}  {row['state']}{size}{loss}{reason}")
    return "\n".join(lines)
