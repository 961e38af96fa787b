"""From the composed config to the dataclasses of the other packages, each value checked, each error one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from ..ensemble.pools import check_pool
from ..experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from ..kernels.errors import UserError
from ..router.router import RouterConfig
from ..router.sources import SourceConfig
from ..router.strategies import AreaConfig

CONTROLS = ("frozen_body", "backprop")
BACKENDS = ("auto", "numba", "reference")
_AREA_FIELDS = ("name", "strategy", "lags", "word", "slack", "seed")


def number(config: DictConfig, field: str, kind: type, optional: bool = False) -> Any:
    """The value of a dotted field as an int, float or bool; UserError where it is none."""
    value = OmegaConf.select(config, field)
    if value is None and optional:
        return None
    wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
    good = isinstance(value, bool) if kind is bool else isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and isinstance(value, float):
        good = value.is_integer()
    if not good:
        raise UserError(f"{field}={value}: must be {wanted}")
    return kind(value)


def text(config: DictConfig, field: str) -> str | None:
    """The value of a dotted field as text, None where it is null or empty."""
    value = OmegaConf.select(config, field)
    return None if value is None or value == "" else str(value)


@dataclass(frozen=True)
class Settings:
    """A run's settings.

    Attributes:
        source: which data.
        relay: context, dim and pca of the features.
        config: the config they came from.
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
    def relay_pca(self) -> int | None:
        """Principal components of arrays."""
        return number(self.config, "relay.pca", int, optional=True)

    def expert(self, num_outputs: int, train_body: bool = True) -> ExpertConfig:
        """Experts for this many outputs."""
        family = self.config.expert.family
        if family != "mlp":
            raise UserError(f"expert.family={family}: unknown; known: mlp")
        return ExpertConfig(
            head=self.head,
            hidden=number(self.config, "expert.hidden", int),
            num_outputs=num_outputs,
            train_body=train_body and number(self.config, "expert.train_body", bool),
            prior_strength=number(self.config, "expert.prior_strength", float),
        )

    def router(self) -> RouterConfig:
        """Areas with their numbers of experts."""
        return router_config(self.config)


def read(config: DictConfig) -> Settings:
    """Check the whole config before anything is done."""
    estimator = EstimatorConfig(
        name=str(config.estimator.name),
        num_perturbations=number(config, "estimator.num_perturbations", int),
        directions=str(config.estimator.directions),
        perturbation_size=number(config, "estimator.perturbation_size", float),
        head_perturbation_size=number(config, "estimator.head_perturbation_size", float),
    )
    optimizer = OptimizerConfig(
        name=str(config.optimizer.name),
        schedule=str(config.optimizer.schedule),
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
        steps=number(config, "train.steps", int),
        batch=number(config, "train.batch", int),
        seed=number(config, "seed", int),
        checkpoint_every=number(config, "train.checkpoint_every", int),
    )
    backend = str(config.backend)
    if backend not in BACKENDS:
        raise UserError(f"backend={backend}: unknown; known: {', '.join(BACKENDS)}")
    group_size = number(config, "plan.group_size", int)
    if not 1 <= group_size <= 65536:
        raise UserError(f"plan.group_size={group_size}: must be between 1 and 65536")
    workers = number(config, "engine.workers", int, optional=True)
    if workers is not None and not 1 <= workers <= 1024:
        raise UserError(f"engine.workers={workers}: must be between 1 and 1024, or null for one a core")
    retries = number(config, "engine.retries", int)
    if retries < 0:
        raise UserError(f"engine.retries={retries}: must be 0 or more")
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
        backend="numba" if backend == "auto" else backend,
        group_size=group_size,
        controls=_controls(config),
        pool=str(config.ensemble.pool),
        top_k=number(config, "ensemble.k", int, optional=True),
        workers=workers,
        retries=retries,
        head=head,
    )
    settings.router()
    settings.expert(256 if head == "tree" else 2)
    check_pool(settings.pool, head)
    return settings


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
    if not isinstance(areas, ListConfig) or not len(areas):
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
    slack = number(config, "router.slack", float)
    return RouterConfig(
        tuple(
            AreaConfig(
                name=str(area.get("name", f"area{place}")),
                strategy=str(area.get("strategy", "hash")),
                experts=shares[place],
                lags=tuple(int(lag) for lag in area.get("lags", [])),
                word=int(area.get("word", 0)),
                slack=float(area.get("slack", slack)),
                seed=int(area.get("seed", 0)),
            )
            for place, area in enumerate(entries)
        )
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
    if total < areas:
        raise UserError(f"router.experts={total}: fewer than the {areas} areas; give each area at least one")
    return [total // areas + (place < total % areas) for place in range(areas)]
