"""`evaluate`: the held-out split, with another pool or fewer areas if asked."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from .. import rundir, stages
from .. import settings as settings_module
from ..markers import CONTROLS


def run(config: DictConfig) -> dict[str, Any]:
    """`heldout` of summary.json."""
    run_directory = rundir.require(config)
    config = rundir.merged(run_directory, config, may_change=("ensemble",))
    settings = settings_module.read(config)
    heldout = stages.evaluate(run_directory, config, settings)
    for control in CONTROLS:
        if stages.has_control(run_directory, control):
            heldout[control] = stages.evaluate_control(run_directory, config, settings, control)["loss"]
    return {"run": str(run_directory), "heldout": {k: None if v != v else v for k, v in heldout.items()}}


def render(result: dict[str, Any]) -> str:
    """A figure a line."""
    lines = []
    for name, value in result["heldout"].items():
        if isinstance(value, float):
            lines.append(f"{name:<24}{value:>10.4f}")
        elif isinstance(value, list):
            lines.append(f"{name:<24}{'  '.join(f'{entry:.3f}' for entry in value)}")
        else:
            lines.append(f"{name:<24}{value!s:>10}")
    return "\n".join(lines)
