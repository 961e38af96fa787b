"""Where the experts of an ensemble lie: areas, rows of the bank, and which experts can be used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..kernels.mlp_resident.contract import MlpShape


class WeightReader(Protocol):
    """What an ensemble asks of a bank."""

    def read_group(self, group: int, count: int) -> dict[str, np.ndarray]:
        """Weights by role of the first `count` experts of a group."""
        ...


@dataclass(frozen=True)
class Layout:
    """Experts of all areas and their places.

    Attributes:
        shape: sizes of one expert.
        first_expert: int64 [A + 1], global id where each area begins.
        group_size: experts in a full group; every area begins a new group.
        unusable: global ids of experts that are cold or failed.
    """

    shape: MlpShape
    first_expert: np.ndarray
    group_size: int
    unusable: frozenset[int]

    @property
    def num_areas(self) -> int:
        """A."""
        return len(self.first_expert) - 1

    def groups(self, area: int) -> Iterable[tuple[int, int]]:
        """(group number, experts in it) of an area."""
        group = int(sum(-(-int(n) // self.group_size) for n in np.diff(self.first_expert)[:area]))
        left = int(self.first_expert[area + 1] - self.first_expert[area])
        while left > 0:
            yield group, min(left, self.group_size)
            left -= self.group_size
            group += 1

    def usable(self) -> np.ndarray:
        """bool [E]."""
        usable = np.ones(int(self.first_expert[-1]), bool)
        usable[list(self.unusable)] = False
        return usable

    def area_weights(self, bank: WeightReader, area: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(packed float32 [E_a, T], b0 float32 [E_a, R]) of an area; groups without a wanted expert stay zero.

        Args:
            bank: the trained weights.
            area: its number.
            wanted: bool [E_a].
        """
        experts = len(wanted)
        packed = np.zeros((experts, self.shape.packed_size), np.float32)
        biases = np.zeros((experts, self.shape.num_rows), np.float32)
        first = 0
        for group, count in self.groups(area):
            if wanted[first : first + count].any():
                weights = bank.read_group(group, count)
                biases[first : first + count] = weights.pop("b0")
                packed[first : first + count] = self.shape.pack(weights)
            first += count
        return packed, biases
