"""`partition`: a new run directory with source, relay, router and partition in it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from .. import rundir, stages
from .. import settings as settings_module
from .. import summary as summaries


def run(config: DictConfig) -> dict[str, Any]:
    """Make the run directory and stop before the plan."""
    settings = settings_module.read(config)
    corpus = stages.read_source(settings)
    run_directory = rundir.name_of(config)
    with rundir.created(run_directory), rundir.whole_or_gone(run_directory):
        rundir.store(run_directory, config)
        digests = stages.partition(run_directory, settings, corpus)
        rundir.store_digests(run_directory, digests)
    router = summaries.describe_router(run_directory)
    return {"run": str(run_directory), "router": router, "digests": digests}


def render(result: dict[str, Any]) -> str:
    """A row an area."""
    lines = [f"{'area':<12}{'strategy':<10}{'experts':>8}{'cold':>6}{'max/mean':>10}{'Gini':>7}{'effective':>11}"]
    for area in result["router"]["areas"]:
        lines.append(
            f"{area['name']:<12}{area['strategy']:<10}{area['experts']:>8,}{area['cold']:>6,}"
            f"{area['max_over_mean']:>10.2f}{area['gini']:>7.3f}{area['effective_experts']:>11,.0f}"
        )
    return "\n".join([*lines, "", f"next: colonnade plan run={result['run']}"])
