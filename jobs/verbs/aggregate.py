"""`aggregate`: from a bank of experts to one model."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from .. import rundir, stages
from .. import settings as settings_module


def run(config: DictConfig) -> dict[str, Any]:
    """Check the bank, list the experts, fit the mixing weights."""
    run_directory = rundir.require(config)
    config = rundir.merged(run_directory, config, may_change=("ensemble",))
    settings = settings_module.read(config)
    with rundir.locked(run_directory):
        rundir.record(run_directory, config, "aggregate")
        model, _, markers = stages.aggregate(run_directory, config, settings)
    return {
        "run": str(run_directory),
        "groups": len(markers),
        "unusable_experts": len(model.layout.unusable),
        "pool": model.mixing.pool,
        "weights": model.mixing.weights.tolist(),
    }


def render(result: dict[str, Any]) -> str:
    """What was combined."""
    return (
        f"{result['groups']:,} groups combined by pool {result['pool']}, {result['unusable_experts']:,} experts left "
        f"out\nnext: colonnade evaluate run={result['run']}"
    )
