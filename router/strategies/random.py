"""Random routing: the control that says what routing is worth. An input's expert depends on its number alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.philox import reference as philox
from ..relay import Relay
from .base import AreaConfig


@dataclass(frozen=True)
class RandomArea:
    """A fitted area without state."""

    config: AreaConfig
    overflow: int = 0

    def assign(self, data: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """See `Area`; the draw of an input is named by its position."""
        positions = np.asarray(positions, np.int64)
        counter = np.empty((len(positions), 4), np.uint32)
        counter[:, 0] = positions & 0xFFFFFFFF
        counter[:, 1] = philox.pack_draw(philox.PURPOSE_ROUTER)
        counter[:, 2] = positions >> 32
        counter[:, 3] = philox.WHOLE_RUN
        words = philox.philox4x32(counter, philox.split_seed(self.config.seed))[:, 0]
        return ((words.astype(np.uint64) * np.uint64(self.config.experts)) >> np.uint64(32)).astype(np.int32)

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Area`."""
        return {}


def fit(config: AreaConfig, data: np.ndarray, positions: np.ndarray, relay: Relay) -> tuple[RandomArea, np.ndarray]:
    """See `Strategy`."""
    area = RandomArea(config)
    return area, area.assign(data, positions)


def restore(config: AreaConfig, arrays: dict[str, np.ndarray], overflow: int, relay: Relay) -> RandomArea:
    """See `Strategy`."""
    return RandomArea(config)
