"""From the composed config to the dataclasses of the other packages, each value checked, each error one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from omegaconf import DictConfig, ListConfig

from ..ensemble.pools import check_pool
from ..experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from ..experts.families.general import make_rule
from ..experts.families.lstm import LstmConfig, lstm_spec
from ..experts.families.mlp import build_spec
from ..kernels.errors import UserError
from ..router.memory.memory import LEAVE_OUT
from ..router.router import RouterConfig
from ..router.sources import SourceConfig
from ..router.sources.corpus import PAD
from ..router.strategies import AreaConfig
from . import code
from .fields import checked, in_range, number, text
from .markers import CONTROLS

BACKENDS = ("auto", "numba", "reference")
TRACKERS = ("mlflow", "none")
ENGINES = ("local",)
_AREA_FIELDS = ("name", "strategy", "lags", "word", "slack", "seed")


@dataclass(frozen=True)
class Settings:
    """A run's settings.

    Attributes:
        config: the config they came from.
        source: which data.
        estimator: how gradients are estimated.
        optimizer: how they are followed.
        train: steps, batch, seed.
        backend: of the resident loop.
        group_size: experts in a full group.
        controls: trained beside the experts.
        pool: how opinions are combined.
        top_k: areas used, None for all.
        workers: processes, None for one a core.
        retries: of a group whose worker died.
        head: of the experts.
    """

    config: DictConfig
    source: SourceConfig
    estimator: EstimatorConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    backend: str
    group_size: int
    controls: tuple[str, ...]
    pool: str
    top_k: int | None
    workers: int | None
    retries: int
    head: str

    @property
    def relay_context(self) -> int:
        """Bytes looked back on."""
        return number(self.config, "relay.context", int)

    @property
    def relay_dim(self) -> int:
        """Dimensions of a byte."""
        return number(self.config, "relay.dim", int)

    @property
    def family(self) -> str:
        """What an expert is."""
        return str(self.config.expert.family)

    @property
    def module(self) -> str:
        """`package:factory` of experts of the user's own."""
        return str(self.config.expert.get("module"))

    def lstm(self) -> LstmConfig:
        """Recurrent experts."""
        return LstmConfig(
            width=number(self.config, "expert.width", int),
            num_blocks=number(self.config, "expert.num_blocks", int),
            head_width=number(self.config, "expert.head_width", int, optional=True),
            train_embedding=number(self.config, "expert.train_embedding", bool),
            loss_coupling=str(self.config.expert.loss_coupling),
        )

    def windows(self) -> WindowSettings:
        """How windows are cut and routed."""
        experts = _share_out(self.config, 1)[0]
        length = in_range(self.config, "router.length", 2, 1 << 20)
        prefix = in_range(self.config, "router.prefix", 1, 1 << 20)
        if prefix >= length:
            raise UserError(
                f"router.prefix={prefix}: must be below router.length={length}, or nothing is left to score"
            )
        slack = number(self.config, "router.slack", float)
        if not 1 <= slack < float("inf"):
            raise UserError(f"router.slack={slack}: must be a finite number, 1 or more")
        dim = in_range(self.config, "router.dim", 1, 1 << 16)
        return WindowSettings(length, prefix, dim, slack, experts, in_range(self.config, "router.top_k", 1, 1 << 20))

    @property
    def head_rate(self) -> float:
        """Learning rate of the seed's tied embedding."""
        return number(self.config, "seed_expert.head_rate", float)

    @property
    def memory(self) -> bool:
        """Whether the relay remembers."""
        return number(self.config, "relay.memory", bool)

    @property
    def leave_out(self) -> str:
        """What training leaves out of the memory's counts."""
        value = str(self.config.relay.leave_out)
        if value not in LEAVE_OUT:
            raise UserError(f"relay.leave_out={value}: unknown; known: {', '.join(LEAVE_OUT)}")
        return value

    @property
    def memory_bytes(self) -> int:
        """Largest size of stored memory features."""
        return in_range(self.config, "relay.memory_bytes", 0, 1 << 50)

    @property
    def seed_steps(self) -> int:
        """Steps of the seed expert, 0 for none."""
        return in_range(self.config, "seed_expert.steps", 0, (1 << 32) - 1)

    @property
    def seed_rate(self) -> float:
        """Learning rate of the seed expert."""
        value = number(self.config, "seed_expert.learning_rate", float)
        if not 0 < value < float("inf"):
            raise UserError(f"seed_expert.learning_rate={value}: must be a finite number above 0")
        return value

    @property
    def mixer_areas(self) -> tuple[str, ...]:
        """Areas whose experts mix memory alone."""
        value = self.config.expert.mixer_areas
        names = [area.name for area in self.router().areas]
        chosen = [str(name) for name in value] if isinstance(value, ListConfig) else [str(value)]
        for name in chosen:
            if name not in names:
                raise UserError(f"expert.mixer_areas={name}: no such area; areas: {', '.join(names)}")
        if chosen and not self.memory:
            raise UserError("expert.mixer_areas: goes with relay.memory=true")
        return tuple(chosen)

    @property
    def relay_pca(self) -> int | None:
        """Principal components of arrays."""
        return number(self.config, "relay.pca", int, optional=True)

    def expert(self, num_outputs: int, train_body: bool = True, use_body: bool = True) -> ExpertConfig:
        """Experts for this many outputs."""
        loss = str(self.config.loss)
        return ExpertConfig(
            head=self.head,
            hidden=number(self.config, "expert.hidden", int),
            num_outputs=num_outputs,
            train_body=train_body and number(self.config, "expert.train_body", bool),
            prior_strength=number(self.config, "expert.prior_strength", float),
            family=str(self.config.expert.family),
            weights=str(self.config.expert.weights),
            use_body=use_body and number(self.config, "expert.use_body", bool),
            memory=self.memory,
            loss=loss,
            loss_function=code.deferred("loss", loss) if code.is_code(loss) else None,
        )

    def router(self) -> RouterConfig:
        """Areas with their numbers of experts."""
        return router_config(self.config)


@dataclass(frozen=True)
class WindowSettings:
    """How windows are cut and routed.

    Attributes:
        length: bytes of a window.
        prefix: of them, those that it is routed by.
        dim: of the SVD.
        slack: capacity of an expert as a multiple of the mean load.
        experts: N.
        top_k: experts averaged.
    """

    length: int
    prefix: int
    dim: int
    slack: float
    experts: int
    top_k: int


FAMILIES = ("mlp", "integer", "lstm", "module")


def _stride(config: DictConfig) -> int:
    """Every how many-th expert is looked at."""
    areas = config.router.get("areas", [None])
    count = areas if isinstance(areas, int) else len(areas)
    return max(sum(_share_out(config, count)) // in_range(config, "diagnostics.experts", 1, 1 << 20), 1)


def _steps(config: DictConfig) -> int:
    total = in_range(config, "train.total_steps", 1, 1 << 40, optional=True)
    if total is None:
        return number(config, "train.steps", int)
    areas = config.router.get("areas", [None])
    count = areas if isinstance(areas, int) else len(areas)
    return max(total // sum(_share_out(config, count)), 1)


def read(config: DictConfig) -> Settings:
    """Check the whole config before anything is done."""
    family, unit = str(config.expert.family), str(config.router.unit)
    if family not in FAMILIES:
        raise UserError(f"expert.family={family}: unknown; known: {', '.join(FAMILIES)}")
    if (family == "lstm") != (unit == "window"):
        wanted = "router=windows" if family == "lstm" else "router=hash, kmeans or random"
        raise UserError(f"expert.family={family} with router.unit={unit}: do not go together; use {wanted}")
    estimator = EstimatorConfig(
        name=str(config.estimator.name),
        num_perturbations=number(config, "estimator.num_perturbations", int),
        directions=str(config.estimator.directions),
        perturbation_size=number(config, "estimator.perturbation_size", float),
        head_perturbation_size=number(config, "estimator.head_perturbation_size", float),
        difference=str(config.estimator.difference),
        fitness=str(config.estimator.fitness),
        head=str(config.estimator.head),
        density=number(config, "estimator.density", float),
        rescale=number(config, "estimator.rescale", bool),
        rank=number(config, "estimator.rank", int),
    )
    optimizer = OptimizerConfig(
        name=str(config.optimizer.name),
        schedule=str(config.optimizer.schedule),
        anchored=number(config, "optimizer.anchored", bool),
        coupled=number(config, "optimizer.coupled", bool),
        patience=number(config, "optimizer.patience", int),
        **{
            field: number(config, f"optimizer.{field}", float)
            for field in (
                "learning_rate",
                "final_fraction",
                "beta1",
                "beta2",
                "epsilon",
                "clip_norm",
                "weight_decay",
            )
        },
    )
    train = TrainConfig(
        steps=_steps(config),
        batch=number(config, "train.batch", int),
        seed=number(config, "seed", int),
        checkpoint_every=number(config, "train.checkpoint_every", int),
        hold_back=number(config, "train.hold_back", float),
        looks=number(config, "train.looks", int),
        diagnose_every=in_range(config, "diagnostics.every", 0, (1 << 32) - 1),
        diagnose_stride=_stride(config),
    )
    backend = str(config.backend)
    for field, value, known in (
        ("backend", backend, BACKENDS),
        ("tracking.name", str(config.tracking.name), TRACKERS),
        ("engine.name", str(config.engine.name), ENGINES),
    ):
        if value not in known:
            raise UserError(f"{field}={value}: unknown; known: {', '.join(known)}")
    in_range(config, "relay.context", 1, PAD)
    in_range(config, "relay.dim", 1, 256)
    in_range(config, "relay.pca", 1, 1 << 20, optional=True)
    number(config, "baselines", bool)
    head = str(config.expert.head)
    settings = Settings(
        config=config,
        source=SourceConfig(
            name=str(config.source.name),
            path=text(config, "source.path"),
            split_seed=number(config, "source.split_seed", int),
            fraction=number(config, "source.fraction", float),
        ),
        estimator=estimator,
        optimizer=optimizer,
        train=train,
        backend=backend,
        group_size=in_range(config, "plan.group_size", 1, 65536),
        controls=_controls(config),
        pool=str(config.ensemble.pool),
        top_k=in_range(config, "ensemble.k", 1, 1 << 20, optional=True),
        workers=in_range(config, "engine.workers", 1, 1024, optional=True),
        retries=in_range(config, "engine.retries", 0, 1000),
        head=head,
    )
    if family == "lstm":
        _check_windows(settings)
        return settings
    settings.router()
    if family == "module":
        _check_module(settings)
    expert = settings.expert(256 if head == "tree" else 2)
    check_pool(settings.pool, head)
    _check_whole(settings, expert)
    return settings


def _check_whole(settings: Settings, expert: ExpertConfig) -> None:
    """What is wrong with the parts together is found before anything is read or written."""
    arrays = settings.source.name not in ("stdlib", "text")
    if settings.memory and arrays:
        raise UserError(f"relay.memory=true: remembers texts, source={settings.source.name} has none")
    if "mixers" in settings.controls and not settings.memory:
        raise UserError("controls=mixers: mixes memory and goes with relay.memory=true")
    if "backprop" in settings.controls and expert.loss != "likelihood":
        raise UserError(f"controls=backprop: needs the derivative of the loss, loss={expert.loss} has none")
    for name in ("leave_out", "memory_bytes", "seed_steps", "seed_rate", "mixer_areas"):
        getattr(settings, name)
    if settings.family == "module":
        return
    # sizes that the data decide stand in by the settings' own; the real ones are checked again
    features = settings.relay_context * settings.relay_dim if not arrays else settings.relay_pca or 1 << 20
    anchor = np.zeros(0, np.float32) if settings.seed_steps else None
    build_spec(
        expert, settings.estimator, settings.optimizer, settings.train, features, np.ones(1), settings.backend, anchor
    )


class _NoBody:
    """Stands in for a module that is not imported yet."""

    roles: ClassVar[dict] = {}

    def dense(self) -> None:
        """Nothing is always held."""


def _check_module(settings: Settings) -> None:
    if settings.source.name in ("stdlib", "text"):
        raise UserError("expert.family=module: takes rows of numbers; use source=arrays or digits")
    if not code.is_code(settings.module):
        raise UserError(f"expert.module={settings.module}: must be package:factory")
    if settings.head == "tree":
        raise UserError("expert.head=tree: expert.family=module gives all outputs at once; use softmax or regression")
    if settings.controls:
        raise UserError(f"controls={','.join(settings.controls)}: not for expert.family=module; use controls=[]")
    if settings.seed_steps:
        raise UserError("seed_expert.steps: not for expert.family=module; use 0")
    make_rule("module", settings.estimator, _NoBody())  # type: ignore[arg-type]


def _check_windows(settings: Settings) -> None:
    if settings.source.name not in ("stdlib", "text"):
        raise UserError(f"expert.family=lstm: reads windows of a text, source={settings.source.name} has none")
    if settings.controls:
        raise UserError(f"controls={','.join(settings.controls)}: not for expert.family=lstm; use controls=[]")
    if settings.pool != "mean_proba":
        raise UserError(f"ensemble.pool={settings.pool}: windows are averaged; use ensemble=mean_proba")
    own, coupled = settings.windows(), settings.lstm().loss_coupling == "summed"
    if coupled and settings.group_size < own.experts:
        raise UserError(
            f"plan.group_size={settings.group_size}: expert.loss_coupling=summed trains all {own.experts} experts as "
            "one group; set it to at least that"
        )
    anchor = np.zeros(0, np.float32) if settings.seed_steps else None
    lstm_spec(settings.lstm(), settings.estimator, settings.optimizer, settings.train, anchor)


def _controls(config: DictConfig) -> tuple[str, ...]:
    value = config.controls
    names = [str(name) for name in value] if isinstance(value, ListConfig) else [] if value is None else [str(value)]
    for name in names:
        if name not in CONTROLS:
            raise UserError(f"controls={name}: unknown; known: {', '.join(CONTROLS)}")
    return tuple(dict.fromkeys(names))


def router_config(config: DictConfig) -> RouterConfig:
    """Areas of the config, with the experts shared out."""
    areas = config.router.areas
    if isinstance(areas, int) and not isinstance(areas, bool):
        known = config.router.known_areas
        if not 1 <= areas <= len(known):
            raise UserError(f"router.areas={areas}: this router knows {len(known)}; give fewer, or a list of areas")
        areas = known[:areas]
    if not isinstance(areas, ListConfig | list) or not len(areas):
        raise UserError(f"router.areas={areas}: must be a list of areas, or how many of the router's own to use")
    entries = []
    for place, area in enumerate(areas):
        if not isinstance(area, DictConfig):
            raise UserError(f"router.areas[{place}]={area}: must be like {{name: a, strategy: hash, lags: [1]}}")
        unknown = [str(key) for key in area if key not in _AREA_FIELDS]
        if unknown:
            raise UserError(f"router.areas[{place}].{unknown[0]}: no such field; known: {', '.join(_AREA_FIELDS)}")
        entries.append(area)
    shares = _share_out(config, len(entries))
    number(config, "router.slack", float)
    names = [str(area.get("name", f"area{place}")) for place, area in enumerate(entries)]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise UserError(f"router.areas[{place}].name={name}: another area has this name; choose a different one")
    return RouterConfig(
        tuple(_area(config, place, names[place], area, shares[place]) for place, area in enumerate(entries))
    )


def _area(config: DictConfig, place: int, name: str, area: DictConfig, experts: int) -> AreaConfig:
    lags = area.get("lags", [])
    if not isinstance(lags, ListConfig | list) or any(
        not isinstance(lag, int) or isinstance(lag, bool) for lag in lags
    ):
        raise UserError(f"router.areas[{place}].lags={lags}: must be a list of whole numbers, as in [1,2]")

    def own(field: str, kind: type, default: Any) -> Any:
        return checked(f"router.areas[{place}].{field}", area[field], kind) if field in area else default

    return AreaConfig(
        name=name,
        strategy=str(area.get("strategy", "hash")),
        experts=experts,
        lags=tuple(lags),
        word=own("word", int, 0),
        slack=own("slack", float, number(config, "router.slack", float)),
        seed=own("seed", int, 0),
    )


def _share_out(config: DictConfig, areas: int) -> list[int]:
    total = number(config, "router.experts", int, optional=True)
    each = number(config, "router.experts_per_area", int, optional=True)
    if total is None and each is None:
        each = number(config, "router.default_experts_per_area", int, optional=True)
    if total is None and each is None:
        raise UserError("router.experts: not given; say router.experts=TOTAL or router.experts_per_area=N")
    if each is not None:
        if each < 1:
            raise UserError(f"router.experts_per_area={each}: must be at least 1")
        if total is not None and total != each * areas:
            raise UserError(
                f"router.experts={total} and router.experts_per_area={each}: contradict each other with {areas} "
                "areas; give one of them and set the other to null"
            )
        return [each] * areas
    assert total is not None
    if total < areas:
        raise UserError(f"router.experts={total}: fewer than the {areas} areas; give each area at least one")
    return [total // areas + (place < total % areas) for place in range(areas)]
