"""What an area of the router is: one partition of the inputs over its own experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...kernels.errors import UserError
from ..relay import Relay
from ..sources.corpus import PAD


@dataclass(frozen=True)
class AreaConfig:
    """One area.

    Attributes:
        name: for tables.
        strategy: a registered strategy.
        experts: how many the area has.
        lags: context positions that a `hash` looks at first; 1 is the previous byte.
        word: `hash` also looks at 1 the current word so far, 2 that and the word before; 0 neither.
        slack: capacity of an expert as a multiple of the mean load.
        seed: of the strategies that draw.
    """

    name: str
    strategy: str
    experts: int
    lags: tuple[int, ...] = ()
    word: int = 0
    slack: float = 1.25
    seed: int = 0

    def __post_init__(self) -> None:
        field = f"router area {self.name}"
        if not 1 <= self.experts < 1 << 31:
            raise UserError(f"{field}: experts={self.experts} must be at least 1")
        if any(not 1 <= lag <= PAD for lag in self.lags) or len(set(self.lags)) != len(self.lags):
            raise UserError(f"{field}: lags={list(self.lags)} must be different numbers between 1 and {PAD}")
        if self.word not in (0, 1, 2):
            raise UserError(f"{field}: word={self.word} must be 0, 1 (current word) or 2 (and the word before)")
        if not 1 <= self.slack < float("inf"):
            raise UserError(f"{field}: slack={self.slack} must be a finite number, 1 or more")


class Area(Protocol):
    """A fitted area."""

    config: AreaConfig
    overflow: int

    def assign(self, data: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Experts of the area, int32 [n] in 0 .. experts - 1.

        Args:
            data: text uint8 [N], or features float32 [N, F].
            positions: int [n], places in `data`.
        """
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """The fitted state."""
        ...


class Strategy(Protocol):
    """A way to fit areas."""

    def fit(self, config: AreaConfig, data: np.ndarray, positions: np.ndarray, relay: Relay) -> tuple[Area, np.ndarray]:
        """A fitted area, and the experts of the training `positions`, int32 [n], where capacity holds."""
        ...

    def restore(self, config: AreaConfig, arrays: dict[str, np.ndarray], overflow: int, relay: Relay) -> Area:
        """The area that `Area.arrays` came from."""
        ...
