"""What training asks of a family of experts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ...kernels.mlp_resident.contract import GroupState
from ..config import TrainConfig

# corpus as a family's loop takes it
Inputs = Any


class TrainSpec(Protocol):
    """All that decides an expert's result besides its id and its inputs.

    Legend: G experts of a group, T floats of an expert's packed weights.
    """

    @property
    def train(self) -> TrainConfig:
        """Steps, batch, seed."""
        ...

    @property
    def optimizer(self) -> int:
        """Code of the optimiser: decides which moments are kept."""
        ...

    @property
    def backend(self) -> str:
        """Of the loop."""
        ...

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one expert's stored weights by role."""
        ...

    @property
    def num_parameters(self) -> int:
        """Of one expert."""
        ...

    @property
    def evaluations_per_step(self) -> int:
        """Forward passes of a batch in one step."""
        ...

    def initial(
        self, inputs: Inputs, indices: np.ndarray, offsets: np.ndarray, expert_ids: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(packed float32 [G, T], roles that are not trained, each [G, ...]) before the first step."""
        ...

    @property
    def patience(self) -> int:
        """Looks without improvement after which rate and perturbation are halved; 0 for never."""
        ...

    @property
    def coupled(self) -> bool:
        """Whether experts see one another's losses (a control): then `run_together` runs a whole group."""
        ...

    def run(
        self,
        inputs: Inputs,
        own: np.ndarray,
        expert_ids: np.ndarray,
        state: GroupState,
        first: int,
        last: int,
        fixed: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Steps [first, last) of one expert on its inputs `own`; `state` (G = 1) is changed in place."""
        ...

    def run_together(
        self,
        inputs: Inputs,
        own: list[np.ndarray],
        expert_ids: np.ndarray,
        state: GroupState,
        first: int,
        last: int,
        fixed: dict[str, np.ndarray] | None = None,
    ) -> None:
        """As `run`, for experts side by side."""
        ...

    def loss(
        self, inputs: Inputs, positions: np.ndarray, packed: np.ndarray, offset: np.ndarray | None = None
    ) -> float:
        """Mean loss (nats) of weights packed [T] on inputs; `offset` is what is fixed for the expert, if anything."""
        ...

    def diagnose(
        self, inputs: Inputs, own: np.ndarray, expert: int, packed: np.ndarray, step: int
    ) -> dict[str, float | int | None] | None:
        """How good the estimate is at weights packed [T]; None where the family cannot say. See `diagnostics`."""
        ...

    def unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Trained weights by role of packed [G, T]."""
        ...
