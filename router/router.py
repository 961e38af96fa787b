"""The router: areas side by side, each a partition of the inputs over its own experts.

Expert ids are global: area a's experts are consecutive, in the order of the areas.

Legend: A areas, E experts in all, n inputs.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from ..kernels.errors import UserError
from .artifact import load_state, save_state
from .relay import ArrayRelay, Relay
from .sources.corpus import TRAIN, Corpus, TextCorpus
from .strategies import STRATEGIES, Area, AreaConfig

# areas are fitted side by side; an area's result depends on nothing but itself
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class RouterConfig:
    """The areas, in order."""

    areas: tuple[AreaConfig, ...]

    def __post_init__(self) -> None:
        if not self.areas:
            raise UserError("router.areas: empty; a router needs at least one area")
        for area in self.areas:
            if area.strategy not in STRATEGIES:
                raise UserError(
                    f"router area {area.name}: strategy={area.strategy} is unknown; known: "
                    f"{', '.join(sorted(STRATEGIES))}"
                )


def routed_data(corpus: Corpus, relay: Relay) -> np.ndarray:
    """What areas look at: the bytes of a text, or the features of a matrix."""
    if isinstance(corpus, TextCorpus):
        return corpus.data
    assert isinstance(relay, ArrayRelay)
    return relay.transform(corpus.x)


@dataclass(frozen=True)
class Router:
    """Fitted areas."""

    areas: tuple[Area, ...]

    @classmethod
    def fit(cls, config: RouterConfig, corpus: Corpus, relay: Relay) -> tuple[Router, np.ndarray]:
        """The router, and the global experts of the training inputs, int32 [n, A], which keep to capacity."""
        data = routed_data(corpus, relay)
        positions = corpus.positions(TRAIN)
        with ThreadPoolExecutor(_THREADS) as pool:
            fitted = list(pool.map(lambda own: STRATEGIES[own.strategy].fit(own, data, positions, relay), config.areas))
        router = cls(tuple(area for area, _ in fitted))
        assigned = np.empty((len(positions), len(fitted)), np.int32)
        for number, (_, column) in enumerate(fitted):
            assigned[:, number] = column + np.int32(router.first_expert[number])
        return router, assigned

    @property
    def first_expert(self) -> np.ndarray:
        """int64 [A + 1]: where each area's experts begin."""
        return np.concatenate([[0], np.cumsum([area.config.experts for area in self.areas])])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.first_expert[-1])

    def assign(self, data: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Global experts of inputs, int32 [n, A]; `data` as `routed_data` gives it."""
        assigned = np.empty((len(positions), len(self.areas)), np.int32)
        for number, area in enumerate(self.areas):
            assigned[:, number] = area.assign(data, positions) + np.int32(self.first_expert[number])
        return assigned

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write to a folder, which is made."""
        arrays = {
            f"{number}.{name}": array for number, area in enumerate(self.areas) for name, array in area.arrays().items()
        }
        areas = [{**asdict(area.config), "overflow": area.overflow} for area in self.areas]
        save_state(directory, "router", arrays, {"areas": areas})

    @classmethod
    def load(cls, directory: str | os.PathLike[str], relay: Relay) -> Router:
        """Read what `save` wrote; UserError where it is missing or damaged."""
        try:
            arrays, manifest = load_state(directory, "router")
            areas = []
            for number, entry in enumerate(manifest["areas"]):
                overflow = int(entry.pop("overflow"))
                config = AreaConfig(**{**entry, "lags": tuple(entry["lags"])})
                own = {
                    name.split(".", 1)[1]: array
                    for name, array in arrays.items()
                    if name.split(".", 1)[0] == str(number)
                }
                areas.append(STRATEGIES[config.strategy].restore(config, own, overflow, relay))
            return cls(tuple(areas))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{directory}: no readable router ({error}); start a new run") from None
