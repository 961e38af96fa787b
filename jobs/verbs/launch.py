"""`launch`: train the groups that have no marker yet."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from ...kernels.errors import UserError
from .. import fields, rundir, stages, status
from .. import settings as settings_module


def run(config: DictConfig) -> dict[str, Any]:
    """Train what is not finished, and the controls."""
    run_directory = rundir.require(config)
    config = rundir.merged(run_directory, config)
    settings = settings_module.read(config)
    resume = fields.number(config, "resume", bool)
    with rundir.locked(run_directory):
        rundir.record(run_directory, config, "launch")
        _, launched, seconds = stages.launch(run_directory, config, settings, None, resume)
        for control in settings.controls:
            stages.launch(run_directory, config, settings, control, resume)
        if launched.failed_groups:
            raise UserError(
                f"run={run_directory}: {len(launched.failed_groups)} group(s) were given up; see "
                f"{run_directory / 'logs'}, then try them again with resume=true"
            )
        counts = status.collect(run_directory)[0]["experts"]
    return {"run": str(run_directory), "experts": counts, "seconds": seconds}


def render(result: dict[str, Any]) -> str:
    """Counts by state."""
    counts = ", ".join(f"{count:,} {state}" for state, count in result["experts"].items() if count)
    return f"experts: {counts}\nnext: colonnade aggregate run={result['run']}"
