"""MLflow: one parent run, one child a group, written by the launcher alone.

Ten thousand experts are searched through experts.parquet, an artifact of the parent, not through as many runs.
A tracker that fails costs a line on stderr, never the run.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..experts.bank import Marker
from .fields import text
from .plan import Plan
from .progress import say
from .rundir import plain

_PARAM_LENGTH = 500


def default_uri(run: Path) -> str:
    """sqlite beside the run directories."""
    return f"sqlite:///{run.resolve().parent / 'mlflow.db'}"


def track(
    run: Path, config: DictConfig, plan: Plan, markers: dict[int, Marker], summary: dict[str, Any], began: float
) -> None:
    """Log a finished run, begun at a Unix time, with its groups, its summary and its experts."""
    if config.tracking.name == "none":
        return
    try:
        _track(run, config, plan, markers, summary, int(began * 1000))
    except Exception as error:
        say(f"tracking: not logged ({' '.join(str(error).split())[:300]}); the run itself is complete")


def _track(
    run: Path, config: DictConfig, plan: Plan, markers: dict[int, Marker], summary: dict[str, Any], began: int
) -> None:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # a server that is not there is given up within seconds, not after minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    # the store's migrations are of no interest to whoever trains; importing mlflow sets the level, so this comes after
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    uri = text(config, "tracking.uri") or default_uri(run)
    client = MlflowClient(tracking_uri=uri)
    name = text(config, "tracking.experiment") or "colonnade"
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        local = uri.startswith("sqlite:")
        place = (run.resolve().parent / "mlflow-artifacts").as_uri() if local else None
        identity = client.create_experiment(name, artifact_location=place)
    else:
        identity = experiment.experiment_id
    now = int(time.time() * 1000)
    parent = client.create_run(identity, start_time=began, run_name=run.name)
    params = [Param(key, str(value)[:_PARAM_LENGTH]) for key, value in flat(plain(config)).items()]
    metrics = [Metric(key, float(value), now, 0) for key, value in flat(summary).items() if _is_metric(value)]
    client.log_batch(parent.info.run_id, metrics=metrics, params=params[:100])
    if len(params) > 100:
        client.log_batch(parent.info.run_id, params=params[100:200])
    for group in plan.groups:
        marker = markers.get(group.group)
        if marker is None:
            continue
        child = client.create_run(
            identity,
            start_time=began,
            run_name=f"group-{group.group}",
            tags={"mlflow.parentRunId": parent.info.run_id},
        )
        own = marker["experts"]
        values = {
            "train/loss_first_nats": _mean(own["loss_first"]),
            "train/loss_last_nats": _mean(own["loss_last"]),
            "train/seconds": sum(own["seconds"]),
            "train/failed_experts": len(marker["failed"]),
            "router/inputs": group.inputs,
        }
        client.log_batch(
            child.info.run_id,
            metrics=[Metric(key, float(value), now, 0) for key, value in values.items() if _is_metric(value)],
            params=[
                Param("area", str(group.area)),
                Param("first_expert", str(group.first_expert)),
                Param("num_experts", str(group.num_experts)),
            ],
            tags=[RunTag("state", marker["state"])],
        )
        client.set_terminated(child.info.run_id)
    for file in ("summary.json", "experts.parquet", "config.yaml"):
        if (run / file).exists():
            client.log_artifact(parent.info.run_id, str(run / file))
    client.set_terminated(parent.info.run_id)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with / between the names; lists are left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}/")
        elif not isinstance(value, list):
            found[f"{prefix}{key}"] = value
    return found


def _is_metric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: list[float | None]) -> float:
    held = [value for value in values if value is not None]
    return sum(held) / len(held) if held else math.nan
