"""experts.parquet: one typed row an expert, from the markers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..experts.bank import Marker
from ..kernels.files import fsync_directory
from .plan import Plan

EXPERTS = "experts.parquet"


def rows(
    plan: Plan, markers: dict[int, Marker], area_names: list[str], steps: int, evaluations: list[int]
) -> dict[str, list]:
    """Columns over all experts in order of their ids; an expert whose group is not done is `pending`.

    probes counts forward passes of the expert's batches; `evaluations` are those of a step, by area.
    """
    columns: dict[str, list] = {
        name: []
        for name in (
            "expert",
            "group",
            "area",
            "size",
            "loss_first_nats",
            "loss_last_nats",
            "kept_step",
            "probes",
            "dropped_pairs",
            "seconds",
            "state",
            "reason",
        )
    }
    for group in plan.groups:
        marker = markers.get(group.group)
        own = marker["experts"] if marker else None
        for place in range(group.num_experts):
            state = own["state"][place] if own else "pending"
            entry: dict[str, Any] = {
                "expert": group.first_expert + place,
                "group": group.group,
                "area": area_names[group.area],
                "size": own["size"][place] if own else None,
                "loss_first_nats": own["loss_first"][place] if own else None,
                "loss_last_nats": own["loss_last"][place] if own else None,
                "kept_step": own["kept_step"][place] if own else None,
                "probes": steps * evaluations[group.area] if state == "done" else 0,
                "dropped_pairs": own["dropped_pairs"][place] if own else 0,
                "seconds": own["seconds"][place] if own else 0.0,
                "state": state,
                "reason": own["reason"][place] if own else "",
            }
            for name, value in entry.items():
                columns[name].append(value)
    return columns


def save(run: Path, columns: dict[str, list], seed: int) -> Path:
    """Write experts.parquet; the run's seed names every draw of an expert together with its id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("expert", pa.int32()),
            ("group", pa.int32()),
            ("area", pa.string()),
            ("size", pa.int64()),
            ("seed", pa.uint64()),
            ("loss_first_nats", pa.float64()),
            ("loss_last_nats", pa.float64()),
            ("kept_step", pa.int64()),
            ("probes", pa.int64()),
            ("dropped_pairs", pa.int64()),
            ("seconds", pa.float64()),
            ("state", pa.string()),
            ("reason", pa.string()),
        ],
        metadata={"schema": "1"},
    )
    table = pa.table({**columns, "seed": [seed] * len(columns["expert"])}, schema=schema)
    path, temporary = run / EXPERTS, run / f".{EXPERTS}.tmp"
    pq.write_table(table, temporary)
    os.replace(temporary, path)
    fsync_directory(run)
    return path
