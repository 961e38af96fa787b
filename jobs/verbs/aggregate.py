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
        if settings.family == "lstm":
            # the nearest experts' mean has no weights to fit
            _, markers = stages.list_experts(run_directory, config, settings)
            states = [state for marker in markers.values() for state in marker["experts"]["state"]]
            unusable, pool, weights = sum(state != "done" for state in states), settings.pool, []
        else:
            model, _, markers = stages.aggregate(run_directory, config, settings)
            unusable, pool = len(model.layout.unusable), model.mixing.pool
            weights = model.mixing.weights.tolist()
    return {
        "run": str(run_directory),
        "groups": len(markers),
        "unusable_experts": unusable,
        "pool": pool,
        "weights": weights,
    }


def render(result: dict[str, Any]) -> str:
    """What was combined."""
    return (
        f"{result['groups']:,} groups combined by pool {result['pool']}, {result['unusable_experts']:,} experts left "
        f"out\nnext: colonnade evaluate run={result['run']}"
    )
