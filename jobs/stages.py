"""The pipeline's stages. Each works from what the one before left in the run directory."""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from ..ensemble import evaluation
from ..ensemble import mixing as mix
from ..ensemble import model as models
from ..ensemble.baselines import ngram_baselines
from ..ensemble.inputs import num_outputs, training_inputs
from ..ensemble.metrics import LOG2
from ..experts.bank import Bank, Marker, damaged_files, marker_path
from ..experts.families.mlp import check_loss
from ..experts.families.module import ModuleBody, torch_loss
from ..experts.training import warm_up
from ..kernels.errors import UserError
from ..router import partition as partitions
from ..router.memory.memory import load_memory
from ..router.relay import ArrayRelay, Relay, fit_array_relay, fit_text_relay, load_relay
from ..router.router import Router
from ..router.sources import CALIBRATION, HELDOUT, TRAIN, ArrayCorpus, Corpus, TextCorpus, load_corpus, load_source
from . import code, memories, seeds, table, windows
from . import plan as plans
from .engines.local import LaunchResult, LocalEngine
from .markers import directory_of, finished_markers
from .progress import Progress, say
from .settings import Settings
from .slices import cpu_slices
from .status import area_names
from .training import Training, layout
from .training import load as load_training


def read_source(settings: Settings) -> Corpus:
    """The corpus, checked against what the experts can be."""
    corpus = load_source(settings.source)
    if settings.family == "lstm":
        return corpus
    numbers = not isinstance(corpus, TextCorpus) and not corpus.num_classes
    if numbers != (settings.head == "regression"):
        kind = "numbers" if numbers else "classes"
        heads = "regression" if numbers else "softmax"
        raise UserError(
            f"expert.head={settings.head}: the targets of {corpus.name} are {kind}; use expert.head={heads}"
        )
    expert = settings.expert(num_outputs(corpus))
    check_loss(expert)
    if settings.family == "module":
        assert isinstance(corpus, ArrayCorpus)
        features = settings.relay_pca or corpus.x.shape[1]
        factory = code.imported("expert.module", settings.module)
        ModuleBody(factory, settings.module, features, expert.num_outputs, torch_loss(expert))
    return corpus


def fit_relay(settings: Settings, corpus: Corpus) -> Relay:
    """Features of the corpus."""
    if isinstance(corpus, TextCorpus):
        return fit_text_relay(corpus, settings.relay_context, settings.relay_dim)
    return fit_array_relay(corpus, settings.relay_pca)


def partition(run: Path, settings: Settings, corpus: Corpus) -> dict[str, str]:
    """Source, relay, router, partition; returns their digests."""
    if settings.family == "lstm":
        assert isinstance(corpus, TextCorpus)
        return windows.partition(run, settings, corpus)
    began = time.perf_counter()
    counts = [corpus.count(split) for split in (TRAIN, CALIBRATION, HELDOUT)]
    say(
        f"source {corpus.name}: {counts[0]:,} {corpus.unit}s to train on, {counts[1]:,} for calibration, "
        f"{counts[2]:,} held out"
    )
    relay = fit_relay(settings, corpus)
    router, assigned = Router.fit(settings.router(), corpus, relay)
    areas = partitions.build(assigned, corpus.positions(TRAIN), router.first_expert)
    corpus.save(run / "source")
    relay.save(run / "relay")
    router.save(run / "router")
    if settings.memory:
        assert isinstance(corpus, TextCorpus)
        memories.make(run, corpus, settings.leave_out, settings.memory_bytes)
    partitions.save(run / "partition", areas)
    sizes = partitions.sizes(areas)
    cold = int((sizes == 0).sum())
    note = f", {cold:,} of them cold (no inputs)" if cold else ""
    say(
        f"router: {router.num_experts:,} experts in {len(areas)} areas{note}; "
        f"partition in {time.perf_counter() - began:.1f} s"
    )
    if settings.seed_steps:
        memory = memories.open_for_training(run, corpus) if settings.memory else None
        seeds.make(run, settings, corpus, relay, training_inputs(corpus, relay, memory))
    digests = {"source": corpus.digest, **models.input_digests(run)}
    known = {name: seeds.facts(run, name) for name in ("seed", "seed_mixer")}
    return digests | {name: found["digest"] for name, found in known.items() if found}


def plan(run: Path, settings: Settings) -> plans.Plan:
    """plan.json from the partition."""
    areas = partitions.open_partition(run / "partition")
    first_expert = np.concatenate([[0], np.cumsum([len(area.offsets) - 1 for area in areas])])
    made = plans.make(partitions.sizes(areas), first_expert, settings.group_size)
    plans.save(run, made, cpu_slices(settings.workers))
    return made


def damaged(directory: Path, markers: dict[int, Marker]) -> dict[int, list[str]]:
    """Damaged files by group."""
    found = {group: damaged_files(directory, marker) for group, marker in markers.items()}
    return {group: files for group, files in found.items() if files}


def launch(
    run: Path, config: DictConfig, settings: Settings, control: str | None, resume: bool
) -> tuple[Training, LaunchResult, float]:
    """Train every group without a marker; returns the training, the engine's result and the seconds it took.

    With `resume`, committed groups whose files are damaged lose their marker first and are trained again.
    """
    training = load_training(run, config, control)
    training.create_bank()
    markers = finished_markers(training.directory, training.plan)
    if resume:
        for group, files in damaged(training.directory, markers).items():
            say(f"group {group}: {', '.join(files)} damaged; training it again")
            marker_path(training.directory, group).unlink()
            del markers[group]
    groups = [group for group in training.plan.groups if group.group not in markers]
    label = "experts" if control is None else control
    if not groups:
        say(f"{label}: nothing left to train")
        return training, LaunchResult(0, {}, 0.0, 0.0), 0.0
    for spec in {id(spec): spec for spec in training.specs}.values():
        warm_up(spec, training.inputs)
    began = time.perf_counter()
    steps = training.spec.train.steps
    progress = Progress(training.directory, label, sum(group.busy_experts for group in groups), steps)
    slices = cpu_slices(settings.workers)
    say(f"{label}: {progress.total:,} experts in {len(groups):,} groups on {min(len(slices), len(groups))} worker(s)")
    engine = LocalEngine(run, training.directory, control, slices, settings.retries)
    try:
        result = engine.launch(groups, progress)
    finally:
        progress.close()
    for group, reason in result.failed_groups.items():
        say(f"group {group} was given up: {reason}")
    return training, result, time.perf_counter() - began


def markers_or_complain(run: Path, directory: Path, plan: plans.Plan) -> dict[int, Marker]:
    """Markers of the finished groups, their files intact; UserError names what is missing or damaged."""
    markers = finished_markers(directory, plan)
    mend = f"colonnade launch run={shlex.quote(str(run))} resume=true"
    missing = [group for group in plan.groups if group.group not in markers]
    if missing and len(missing) == len(plan.groups):
        raise UserError(f"{directory}: no group is finished; train with: {mend}")
    if missing:
        say(f"note: {len(missing)} of {len(plan.groups)} groups are not finished; their experts are left out")
    for group, files in damaged(directory, markers).items():
        own = plan.groups[group]
        raise UserError(
            f"{directory / files[0]}: damaged (group {group}, experts {own.first_expert} to "
            f"{own.first_expert + own.num_experts - 1}); train it again with: {mend}"
        )
    return markers


def build_model(run: Path, training: Training, markers: dict[int, Marker], mixing: mix.Mixing) -> models.EnsembleModel:
    """The ensemble around a training directory's experts."""
    relay = load_relay(run / "relay")
    router = Router.load(run / "router", relay)
    places = layout(training, markers, router.first_expert)
    bank, frequencies = Bank(training.directory), training.spec.frequencies
    return models.EnsembleModel(relay, router, places, bank, mixing, frequencies, load_memory(run / "memory"))


def placeholder(settings: Settings) -> mix.Mixing:
    """A mixing without weights, for gathering the opinions that weights are fitted to."""
    return mix.Mixing(settings.head, settings.pool, np.zeros(0))


def list_experts(run: Path, config: DictConfig, settings: Settings) -> tuple[Training, dict[int, Marker]]:
    """Check the bank and write experts.parquet."""
    training = load_training(run, config)
    markers = markers_or_complain(run, training.directory, training.plan)
    evaluations = [spec.evaluations_per_step for spec in training.specs]
    columns = table.rows(training.plan, markers, area_names(run), training.spec.train.steps, evaluations)
    table.save(run, columns, settings.train.seed)
    return training, markers


def aggregate(
    run: Path, config: DictConfig, settings: Settings, splits: tuple[int, ...] = (CALIBRATION,)
) -> tuple[models.EnsembleModel, dict[int, evaluation.SplitOpinions], dict[int, Marker]]:
    """List the experts, fit the mixing weights, write the manifest."""
    training, markers = list_experts(run, config, settings)
    corpus = load_corpus(run / "source")
    model = build_model(run, training, markers, placeholder(settings))
    gathered = evaluation.gather(model, corpus, splits, memory=_rows(run, settings))
    calibration = gathered[CALIBRATION]
    mixing = mix.fit(settings.head, settings.pool, calibration.trained, calibration.targets, settings.top_k)
    models.write_manifest(run, model.layout, mixing, training.spec.frequencies, models.input_digests(run))
    return dataclasses.replace(model, mixing=mixing), gathered, markers


def evaluate(
    run: Path,
    config: DictConfig,
    settings: Settings,
    gathered: dict[int, evaluation.SplitOpinions] | None = None,
) -> dict[str, Any]:
    """`heldout` of summary.json."""
    corpus = load_corpus(run / "source")
    if settings.family == "lstm":
        assert isinstance(corpus, TextCorpus)
        plan = plans.load(run)
        return windows.evaluate(run, settings, corpus, plan, markers_or_complain(run, run, plan))
    model = models.load(run, own_module(settings))
    if gathered is None:
        markers_or_complain(run, run, plans.load(run))
        gathered = evaluation.gather(model, corpus, (CALIBRATION, HELDOUT), memory=_rows(run, settings))
    calibration, heldout = gathered[CALIBRATION], gathered[HELDOUT]
    mixing = model.mixing
    if settings.pool != mixing.pool or settings.top_k is not None:
        mixing = mix.fit(settings.head, settings.pool, calibration.trained, calibration.targets, settings.top_k)
    if isinstance(corpus, TextCorpus):
        found: dict[str, Any] = dict(
            evaluation.evaluate_text(corpus, heldout, calibration, mixing, settings.train.seed)
        )
    else:
        assert isinstance(model.relay, ArrayRelay)
        found = dict(evaluation.evaluate_arrays(heldout, calibration, mixing, model.relay.target_scale))
    found["pool"] = mixing.pool
    unit = LOG2 if isinstance(corpus, TextCorpus) else 1.0
    for name in ("seed", "seed_mixer"):
        known = seeds.facts(run, name)
        if known:
            found[name] = known["heldout_nats"] / unit
    return found


def own_module(settings: Settings) -> tuple[str, Any] | None:
    """(name, factory) of experts of the user's own, None for built-in ones."""
    if settings.family != "module":
        return None
    return settings.module, code.imported("expert.module", settings.module)


def _rows(run: Path, settings: Settings) -> np.ndarray | None:
    return memories.open_rows(run) if settings.memory else None


def evaluate_control(run: Path, config: DictConfig, settings: Settings, control: str) -> dict[str, float | None]:
    """Held-out loss of a control under the same kind of pool, and the seconds its experts took."""
    training = load_training(run, config, control)
    if not training.directory.exists():
        return {}
    markers = markers_or_complain(run, training.directory, training.plan)
    model = build_model(run, training, markers, placeholder(settings))
    corpus = load_corpus(run / "source")
    gathered = evaluation.gather(model, corpus, (CALIBRATION, HELDOUT), untrained=False, memory=_rows(run, settings))
    calibration, heldout = gathered[CALIBRATION], gathered[HELDOUT]
    mixing = mix.fit(settings.head, settings.pool, calibration.trained, calibration.targets, settings.top_k)
    loss = float(mix.losses(mixing, heldout.trained, heldout.targets).mean())
    seconds = sum(sum(marker["experts"]["seconds"]) for marker in markers.values())
    return {"loss": loss / LOG2 if isinstance(corpus, TextCorpus) else loss, "cpu_seconds": seconds}


def baselines(run: Path, settings: Settings) -> dict[str, float]:
    """Bits per byte of the count-based models on the bytes that are scored; empty for arrays."""
    corpus = load_corpus(run / "source")
    if not isinstance(corpus, TextCorpus):
        return {}
    scored = corpus.positions(HELDOUT)
    if settings.family == "lstm":
        scored = windows.scored_positions(settings, corpus)
    found = ngram_baselines(corpus.data, corpus.positions(TRAIN), scored)
    return {name: float(bits.mean()) for name, bits in found.items()}


def has_control(run: Path, control: str) -> bool:
    """Whether a control was trained in this run."""
    return (directory_of(run, control) / "groups").is_dir()
