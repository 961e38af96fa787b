"""Where the experts of an ensemble lie: areas, rows of the bank, and which experts can be used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..experts.families.module import ModuleShape
from ..kernels.mlp_resident.contract import MlpShape


class WeightReader(Protocol):
    """What an ensemble asks of a bank."""

    def read_experts(self, group: int, places: np.ndarray) -> dict[str, np.ndarray]:
        """Weights by role of the experts at `places` of a group."""
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

    shape: MlpShape | ModuleShape
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

    def area_weights(
        self, bank: WeightReader, area: int, wanted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(packed float32 [W, T], b0 float32 [W, R], rows int64 [E_a]) of the W wanted experts of an area.

        Args:
            bank: the trained weights.
            area: its number.
            wanted: bool [E_a]; `rows` is where each of them stands in the others, -1 for the rest.
        """
        count = int(wanted.sum())
        packed = np.zeros((count, self.shape.packed_size), np.float32)
        biases = np.zeros((count, self.shape.num_rows), np.float32)
        rows = np.full(len(wanted), -1, np.int64)
        rows[wanted] = np.arange(count)
        first = filled = 0
        for group, size in self.groups(area):
            places = np.flatnonzero(wanted[first : first + size])
            if len(places):
                weights = bank.read_experts(group, places)
                part = slice(filled, filled + len(places))
                biases[part] = weights.pop("b0")
                packed[part] = self.shape.pack(weights)
                filled += len(places)
            first += size
        return packed, biases, rows
