"""summary.json, and the table that `train` prints from the same figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..experts.bank import Marker
from ..experts.config import level
from ..router import partition as partitions
from ..router.metrics import load_metrics
from ..router.sources import CALIBRATION, HELDOUT, TRAIN, Corpus
from . import memories, seeds
from .engines.local import LaunchResult
from .rundir import read_json
from .settings import Settings
from .training import Training


def describe_router(run: Path) -> dict[str, Any]:
    """`router` of summary.json, from router and partition."""
    configs = read_json(run / "router" / "router.json", "start a new run")["areas"]
    rows = []
    for config, area in zip(configs, partitions.open_partition(run / "partition"), strict=True):
        loads = load_metrics(area.offsets[1:] - area.offsets[:-1])
        rows.append({"name": config["name"], "strategy": config["strategy"], **loads, "overflow": config["overflow"]})
    return {
        "areas": rows,
        "experts": sum(row["experts"] for row in rows),
        "cold_experts": sum(row["cold"] for row in rows),
    }


def build(
    run: Path,
    preset: str | None,
    settings: Settings,
    corpus: Corpus,
    router: dict[str, Any],
    training: Training,
    markers: dict[int, Marker],
    launched: LaunchResult,
    train_seconds: float,
    workers: int,
    heldout: dict[str, Any],
    baselines: Mapping[str, float | None],
    controls: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """summary.json without `seconds_total`."""
    spec = training.spec
    loads = {row["name"]: row["experts"] for row in router["areas"]}
    parameters = [own.num_parameters * experts for own, experts in zip(training.specs, loads.values(), strict=True)]
    steps = spec.train.steps
    sampled, exact = spec.parameter_split()
    states = [state for marker in markers.values() for state in marker["experts"]["state"]]
    done = states.count("done")
    # a resumed run knows the wall time of its last launch alone
    whole = launched.experts == done + states.count("failed")
    cpu_seconds = sum(sum(marker["experts"]["seconds"]) for marker in markers.values())
    estimator = settings.estimator
    for control, found in controls.items():
        heldout[control] = found.get("loss")
        if control == "backprop":
            baselines = {**baselines, "backprop": found.get("loss")}
    return {
        "schema": 1,
        "preset": preset,
        "seed": settings.train.seed,
        "source": {
            "name": corpus.name,
            "train_items": corpus.count(TRAIN),
            "calibration_items": corpus.count(CALIBRATION),
            "heldout_items": corpus.count(HELDOUT),
            "unit": corpus.unit,
        },
        "router": router,
        "expert": {
            "family": settings.family,
            "head": settings.head,
            "params_per_expert": spec.num_parameters,
            "params_sampled": sampled,
            "params_exact": exact,
            "total_params": sum(parameters),
        },
        "memory": memories.facts(run),
        "seed_experts": {name: seeds.facts(run, name) for name in ("seed", "seed_mixer")}
        if settings.family != "lstm"
        else {},
        "estimator": {
            "name": estimator.name,
            "told": level(estimator, getattr(spec, "expert", None)),
            "perturbations": estimator.num_perturbations if estimator.site != "none" else 0,
            "directions": estimator.directions,
            "difference": estimator.difference,
            "fitness": estimator.fitness,
            "head": estimator.head,
            "evaluations_per_step": spec.evaluations_per_step,
        },
        "train": {
            "steps": steps,
            "expert_steps": steps * done,
            "seconds": train_seconds if whole else None,
            "cpu_seconds": cpu_seconds,
            "expert_steps_per_second": steps * launched.experts / train_seconds if train_seconds else None,
            "probes_per_expert": steps * spec.evaluations_per_step,
            "failed_experts": states.count("failed"),
            "failed_groups": len(launched.failed_groups),
            "dropped_pairs": sum(sum(marker["experts"]["dropped_pairs"]) for marker in markers.values()),
            "backend": spec.backend,
            "device": "cpu",
            "workers": workers,
            "peak_anonymous_mb": launched.peak_anonymous_mb or None,
            "peak_rss_mb": launched.peak_resident_mb or None,
        },
        "diagnostics": _diagnostics(markers),
        "heldout": _without_nan({"frozen_body": None, "backprop": None, "mixers": None, **heldout}),
        "controls": controls,
        "baselines": baselines,
    }


def _diagnostics(markers: dict[int, Marker]) -> list[dict[str, Any]]:
    """Means over the experts that were looked at, by step."""
    rows: dict[int, list[dict]] = {}
    for marker in markers.values():
        for entry in marker.get("diagnostics", []):
            rows.setdefault(entry["step"], []).append(entry)
    found = []
    for step, own in sorted(rows.items()):
        means: dict[str, Any] = {"step": step, "experts": len(own)}
        for field in ("cosine", "relative_variance", "theory", "difference"):
            known = [entry[field] for entry in own if entry[field] is not None]
            means[field] = sum(known) / len(known) if known else None
        found.append(means)
    return found


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and value != value else value for key, value in values.items()}


_LABELS = {
    "unigram": "unigram",
    "bigram": "bigram",
    "kneser_ney_5": "Kneser-Ney, order 5",
    "kneser_ney_8": "Kneser-Ney, order 8",
}


def render(summary: dict[str, Any]) -> str:
    """The table for people."""
    held, train, router = summary["heldout"], summary["train"], summary["router"]
    text = "bits_per_byte" in held
    numbers = "rmse" in held
    unit = "bits/byte" if text else "rmse" if numbers else "nats"
    loss = held["bits_per_byte" if text else "rmse" if numbers else "nll_nats"]
    estimator = summary["estimator"]
    lines = [
        f"{router['experts']:,} experts ({router['cold_experts']:,} cold, {train['failed_experts']:,} failed) in "
        f"{len(router['areas'])} areas, {summary['expert']['params_per_expert']:,} parameters each, "
        f"{estimator['name']}"
        + (
            f", {estimator['perturbations']} {estimator['difference'].replace('_', '-')} probes"
            if estimator["perturbations"]
            else ""
        )
        + f", told {estimator['told']}",
        f"{train['steps']:,} steps each: "
        + (f"{train['seconds']:.1f} s on {train['workers']} workers, " if train["seconds"] is not None else "")
        + f"{train['cpu_seconds']:.0f} CPU-seconds"
        + (f", {train['expert_steps_per_second']:,.0f} expert-steps/s" if train["expert_steps_per_second"] else ""),
        "",
        f"{'held out':<34}{unit:>10}",
    ]
    rows: list[tuple[str, float | None, str]] = []
    if text:
        low, high = held["interval"]
        rows.append(("ensemble", loss, f"95 % over documents: {low:.3f} to {high:.3f}"))
        if held["novel_bits_per_byte"] is not None:
            share = held["novel_bytes"] / max(held["bytes"], 1)
            rows.append(("  on novel bytes", held["novel_bits_per_byte"], f"{share:.0%} of the bytes"))
    else:
        accuracy = held.get("accuracy")
        rows.append(("ensemble", loss, f"accuracy {accuracy:.3f}" if accuracy is not None else ""))
    if "by_k" in held:
        rows += [(f"  nearest {k}", value, "") for k, value in enumerate(held["by_k"], 1) if k < held["k"]]
    else:
        rows.append(("  plain mean of logits", held["mean_logits"], ""))
        rows.append(("  best single area", held["best_area"], "chosen on calibration"))
        before = held.get("untrained_accuracy")
        note = "" if before is None else f"accuracy {before:.3f}"
        rows.append(("  untrained (counts only)", held["untrained"], note))
    for control, label in (
        ("seed", "  seed expert alone"),
        ("mixers", "  all mixers of memory"),
        ("seed_mixer", "  one mixer of memory"),
        ("frozen_body", "  frozen body"),
        ("backprop", "  backprop (first order)"),
    ):
        if held.get(control) is not None:
            seconds = summary["controls"].get(control, {}).get("cpu_seconds")
            rows.append((label, held[control], f"{seconds:.0f} CPU-seconds" if seconds else ""))
    for name, label in _LABELS.items():
        if name in summary["baselines"]:
            rows.append((label, summary["baselines"][name], "counts"))
    lines += [f"{label:<34}{value:>10.3f}  {note}".rstrip() for label, value, note in rows if value is not None]
    if summary["diagnostics"]:
        heads = ("cosine", "variance", "theory", "|L+ - L-|")
        lines += ["", f"{'step':>6}{'experts':>9}" + "".join(f"{head:>11}" for head in heads) + "   of the estimates"]
        for row in summary["diagnostics"]:
            values = (row["cosine"], row["relative_variance"], row["theory"], row["difference"])
            cells = "".join(f"{'' if value is None else format(value, '.4g'):>11}" for value in values)
            lines.append(f"{row['step']:>6}{row['experts']:>9}{cells}".rstrip())
    if summary["memory"]:
        tables, rows = (summary["memory"][field] / 1e6 for field in ("table_bytes", "row_bytes"))
        lines += [
            "",
            f"memory: {tables:,.0f} MB of tables (stored rows: {rows:,.0f} MB) beside "
            f"{4e-6 * summary['expert']['total_params']:,.0f} MB of parameters",
        ]
    if "seconds_total" in summary:
        lines += ["", f"{summary['seconds_total']:.1f} s in all"]
    return "\n".join(lines)
