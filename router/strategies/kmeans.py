"""Balanced k-means on the relay's features.

Lloyd's iterations on a sample (started at a random sample of distinct points), then every training input goes to
its nearest centroid with room: the inputs that lie nearest to their centroid choose first, one whose expert is full
takes the next nearest. At inference an input goes to its nearest centroid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.compile import jit
from ...kernels.errors import UserError
from ...kernels.nearest.numba import nearest
from ...kernels.philox import reference as philox
from ..relay import Relay, TextRelay
from .base import AreaConfig

_SAMPLE_PER_EXPERT = 64
_ITERATIONS = 8
_CANDIDATES = 8
_CHUNK = 1 << 16


@dataclass(frozen=True)
class KmeansArea:
    """A fitted area.

    Attributes:
        config: as asked for.
        overflow: training inputs whose nearest expert was full.
        centroids: float32 [E, F].
        relay: turns positions of a text into features; matrices come as features already.
    """

    config: AreaConfig
    overflow: int
    centroids: np.ndarray
    relay: Relay

    def assign(self, data: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """See `Area`."""
        return candidates(self, data, positions, 1)[0][:, 0]

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Area`."""
        return {"centroids": self.centroids}


def _features(relay: Relay, data: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if isinstance(relay, TextRelay):
        return relay.features(data, positions)
    return np.ascontiguousarray(data[positions])


def candidates(area: KmeansArea, data: np.ndarray, positions: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` nearest experts int32 [n, count] and their scores, see `nearest`."""
    ids = np.empty((len(positions), count), np.int32)
    scores = np.empty((len(positions), count), np.float32)
    for start in range(0, len(positions), _CHUNK):
        part = slice(start, start + _CHUNK)
        x = _features(area.relay, data, positions[part])
        ids[part], scores[part] = nearest(x, area.centroids, count)
        scores[part] += (x * x).sum(1, keepdims=True)
    return ids, scores


@jit
def _fill(order, ids, experts, capacity, out):
    """Inputs in `order` take their nearest candidate with room, or else the least loaded expert; counts overflow."""
    loads = np.zeros(experts, np.int64)
    overflow = 0
    for i in order:
        chosen = -1
        for rank in range(ids.shape[1]):
            if loads[ids[i, rank]] < capacity:
                chosen = ids[i, rank]
                break
        if chosen < 0:
            chosen = loads.argmin()
        if chosen != ids[i, 0]:
            overflow += 1
        loads[chosen] += 1
        out[i] = chosen
    return overflow


def fit(config: AreaConfig, data: np.ndarray, positions: np.ndarray, relay: Relay) -> tuple[KmeansArea, np.ndarray]:
    """See `Strategy`.

    Raises:
        UserError: features that are not finite.
    """
    experts = config.experts
    wanted = min(len(positions), experts * _SAMPLE_PER_EXPERT)
    draw = philox.pack_draw(philox.PURPOSE_ROUTER, layer=1)
    keys = philox.words(config.seed, draw, 0, philox.WHOLE_RUN, len(positions))
    sample = positions[np.sort(np.argsort(keys, kind="stable")[:wanted])]
    x = _features(relay, data, sample)
    if not np.isfinite(x).all():
        raise UserError(f"router area {config.name}: strategy=kmeans met features that are not finite; clean them")
    distinct = np.unique(x, axis=0, return_index=True)[1]
    order = np.argsort(philox.words(config.seed, draw, 1, philox.WHOLE_RUN, len(x))[distinct], kind="stable")
    seeds = x[distinct[order[:experts]]]
    if len(seeds) < experts:
        # fewer distinct points than experts: the rest stay cold, far from everything
        far = np.full((experts - len(seeds), x.shape[1]), 1e6, np.float32)
        seeds = np.concatenate([seeds, far])
    centroids = np.ascontiguousarray(seeds, np.float32)
    for _ in range(_ITERATIONS):
        labels = nearest(x, centroids)[0][:, 0]
        counts = np.bincount(labels, minlength=experts)
        sums = np.zeros((experts, x.shape[1]))
        np.add.at(sums, labels, x)
        held = counts > 0
        centroids[held] = (sums[held] / counts[held, None]).astype(np.float32)
    area = KmeansArea(config, 0, centroids, relay)
    ids, scores = candidates(area, data, positions, min(_CANDIDATES, experts))
    assigned = np.empty(len(positions), np.int32)
    capacity = int(np.ceil(config.slack * len(positions) / experts))
    overflow = _fill(np.argsort(scores[:, 0], kind="stable"), ids, experts, capacity, assigned)
    return KmeansArea(config, int(overflow), centroids, relay), assigned


def restore(config: AreaConfig, arrays: dict[str, np.ndarray], overflow: int, relay: Relay) -> KmeansArea:
    """See `Strategy`."""
    return KmeansArea(config, overflow, arrays["centroids"], relay)
