"""`plan`: experts cut into groups."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig

from ...kernels.errors import UserError
from .. import plan as plans
from .. import rundir, stages
from .. import settings as settings_module
from ..markers import finished_markers


def run(config: DictConfig) -> dict[str, Any]:
    """Write plan.json of a partitioned run."""
    run_directory = rundir.require(config)
    config = rundir.merged(run_directory, config, may_change=("plan",))
    settings = settings_module.read(config)
    with rundir.locked(run_directory):
        if (run_directory / "plan.json").exists() and finished_markers(run_directory, plans.load(run_directory)):
            raise UserError(f"run={run_directory}: groups are trained by its plan already; start a new run to replan")
        made = stages.plan(run_directory, settings)
        rundir.record(run_directory, config, "plan")
    return {
        "run": str(run_directory),
        "group_size": made.group_size,
        "experts": made.num_experts,
        "groups": [asdict(group) for group in made.groups],
    }


def render(result: dict[str, Any]) -> str:
    """Two lines."""
    groups = result["groups"]
    return (
        f"{result['experts']:,} experts in {len(groups):,} groups of up to {result['group_size']}\n"
        f"next: colonnade launch run={result['run']}"
    )
