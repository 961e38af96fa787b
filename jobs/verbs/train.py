"""`train`: all stages, from nothing or from where an interrupted run stands."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ...kernels.errors import UserError
from ...kernels.files import write_json_atomic
from ...router.sources import CALIBRATION, HELDOUT, Corpus, load_corpus
from .. import fields, rundir, stages, tracking
from .. import settings as settings_module
from .. import summary as summaries
from ..progress import say
from ..slices import cpu_slices


def run(config: DictConfig) -> dict[str, Any]:
    """Partition, plan, launch, aggregate, evaluate; summary.json."""
    began = time.time()
    if fields.number(config, "resume", bool):
        return _resume(config, began)
    settings = settings_module.read(config)
    # a mistake in the data is found before anything is written
    corpus = stages.read_source(settings)
    run_directory = rundir.name_of(config)
    with rundir.created(run_directory):
        say(f"run {run_directory}")
        with rundir.whole_or_gone(run_directory):
            rundir.store(run_directory, config)
            rundir.store_digests(run_directory, stages.partition(run_directory, settings, corpus))
            stages.plan(run_directory, settings)
        return _train(run_directory, config, settings, corpus, False, began)


def _resume(config: DictConfig, began: float) -> dict[str, Any]:
    if rundir.is_multirun():
        run_directory = rundir.name_of(config)
        if not rundir.is_run(run_directory):
            # the sweep was interrupted before this job's turn
            config.resume = False
            return run(config)
    else:
        run_directory = rundir.require(config)
    config = rundir.merged(run_directory, config)
    settings = settings_module.read(config)
    with rundir.locked(run_directory):
        say(f"run {run_directory}")
        rundir.record(run_directory, config, "train")
        if (run_directory / "plan.json").exists():
            corpus = load_corpus(run_directory / "source")
        else:
            corpus = stages.read_source(settings)
            rundir.store_digests(run_directory, stages.partition(run_directory, settings, corpus))
            stages.plan(run_directory, settings)
        return _train(run_directory, config, settings, corpus, True, began)


def _train(
    run_directory: Path,
    config: DictConfig,
    settings: settings_module.Settings,
    corpus: Corpus,
    resume: bool,
    began: float,
) -> dict[str, Any]:
    training, launched, seconds = stages.launch(run_directory, config, settings, None, resume)
    for control in settings.controls:
        stages.launch(run_directory, config, settings, control, resume)
    if settings.family == "lstm":
        gathered = None
        _, markers = stages.list_experts(run_directory, config, settings)
    else:
        _, gathered, markers = stages.aggregate(run_directory, config, settings, (CALIBRATION, HELDOUT))
    heldout = stages.evaluate(run_directory, config, settings, gathered)
    del gathered
    controls = {
        control: stages.evaluate_control(run_directory, config, settings, control) for control in settings.controls
    }
    baselines = stages.baselines(run_directory, settings) if fields.number(config, "baselines", bool) else {}
    summary = summaries.build(
        run=run_directory,
        preset=rundir.load_facts(run_directory)["preset"],
        settings=settings,
        corpus=corpus,
        router=summaries.describe_router(run_directory),
        training=training,
        markers=markers,
        launched=launched,
        train_seconds=seconds,
        workers=len(cpu_slices(settings.workers)),
        heldout=heldout,
        baselines=baselines,
        controls=controls,
    )
    summary["seconds_total"] = time.time() - began
    write_json_atomic(run_directory / "summary.json", summary)
    tracking.track(run_directory, config, training.plan, markers, summary, began)
    if launched.failed_groups:
        raise UserError(
            f"run={run_directory}: {len(launched.failed_groups)} group(s) were given up, their experts are left out; "
            f"see {run_directory / 'logs'}, then try them again with resume=true"
        )
    return summary


def render(result: dict[str, Any]) -> str:
    """The table for people."""
    return summaries.render(result)
