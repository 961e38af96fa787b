"""Experts that are any `torch.nn.Module`, evaluated for all candidates at once by `torch.func`.

Legend: K candidates, T parameters, B examples, F features, V outputs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ...kernels.errors import UserError
from ...kernels.mlp_resident.contract import HEAD_SOFTMAX, HEADS, Inputs, MlpShape
from ...kernels.philox import reference as philox
from ..config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from .general import GeneralSpec, general_spec
from .starts import count_biases, mean_biases

_PROBED_EXAMPLES = 3
# functional_call swaps a module's parameters while it runs, and torch's default generator belongs to the process
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class ModuleShape:
    """Sizes of one expert, as the ensemble reads them.

    Attributes:
        num_features: F.
        num_outputs: V.
        parameters: shapes of the module's parameters by name, in its order.
        body: runs it.
        head: softmax or regression.
    """

    num_features: int
    num_outputs: int
    parameters: dict[str, tuple[int, ...]]
    body: ModuleBody
    head: int = HEAD_SOFTMAX

    tree_depth = 0
    num_memory = 0

    @property
    def num_rows(self) -> int:
        """V."""
        return self.num_outputs

    @property
    def packed_size(self) -> int:
        """T."""
        return sum(int(np.prod(shape)) for shape in self.parameters.values())

    def pack(self, weights: dict[str, np.ndarray]) -> np.ndarray:
        """Packed float32 [G, T] of weights by role, each with a leading axis G."""
        return np.concatenate([weights[key].reshape(len(weights[key]), -1) for key in self.parameters], axis=1)

    def row_logits(self, x: np.ndarray, experts: np.ndarray, packed: np.ndarray, biases: np.ndarray) -> np.ndarray:
        """Outputs float32 [n, V] of rows x [n, F], each under packed[experts]; -1 leaves zeros."""
        out = np.zeros((len(x), self.num_outputs), np.float32)
        for expert in np.unique(experts[experts >= 0]):
            own = experts == expert
            out[own] = self.body.predict(packed[expert], x[own], biases[expert])
        return out


class ModuleBody:
    """See `general.Body`. Outputs are the module's plus what is fixed for the expert: its count biases.

    Args:
        factory: (num_features, num_outputs) -> module that maps float32 [B, F] to [B, V].
        name: of the factory, for messages.
        num_features: F.
        num_outputs: V.
        loss: (outputs tensor [B, V], targets tensor) -> tensor [B].

    Raises:
        UserError: no module, an output without an example axis, buffers that a forward pass would change, randomness
            that cannot be shared by the ends of a pair, or no parameters.
    """

    def __init__(
        self, factory: Callable[[int, int], Any], name: str, num_features: int, num_outputs: int, loss: Callable
    ) -> None:
        import torch

        self.name, self.loss = name, loss
        self.num_features, self.num_outputs = num_features, num_outputs
        self.factory = factory
        field = f"expert.module={name}"
        try:
            module = factory(num_features, num_outputs)
        except Exception as error:
            raise UserError(f"{field}: fails for {num_features} features and {num_outputs} outputs ({error})") from None
        if not isinstance(module, torch.nn.Module):
            raise UserError(f"{field}: gives {type(module).__name__}, expected a torch.nn.Module")
        self.module = module
        self.shapes = {key: tuple(value.shape) for key, value in module.named_parameters()}
        if not self.shapes:
            raise UserError(f"{field}: has no parameters; there is nothing to train")
        self._check(field)
        self._still = copy.deepcopy(module).train(False)

    def _check(self, field: str) -> None:
        import torch

        buffers = {key: value.clone() for key, value in self.module.named_buffers()}
        x = np.linspace(-1, 1, _PROBED_EXAMPLES * self.num_features, dtype=np.float32)
        x = torch.tensor(x.reshape(_PROBED_EXAMPLES, self.num_features))
        try:
            with torch.no_grad():
                found = self.module(x)
        except Exception as error:
            raise UserError(f"{field}: fails on [{_PROBED_EXAMPLES}, {self.num_features}] features ({error})") from None
        expected = (_PROBED_EXAMPLES, self.num_outputs)
        got = tuple(getattr(found, "shape", ()))
        if got != expected:
            raise UserError(
                f"{field}: gives shape {got} for {_PROBED_EXAMPLES} examples, expected {expected}: an axis of "
                "examples, then one of outputs"
            )
        for key, value in self.module.named_buffers():
            if not torch.equal(value, buffers[key]):
                raise UserError(
                    f"{field}: changes its buffer {key} in a forward pass (batch norm?); both ends of a pair must see "
                    "the same: use a norm without running statistics, or put the module in evaluation mode"
                )
        draw = (0, 0, 0)
        candidates = self.initial(0, 0)[None].repeat(2, axis=0)
        try:
            ends = [self._outputs(candidates, x, draw).numpy() for _ in range(2)]
        except Exception as error:
            raise UserError(f"{field}: cannot be batched by torch.func ({error})") from None
        if not np.array_equal(ends[0], ends[1]) or not np.array_equal(ends[0][0], ends[0][1]):
            raise UserError(
                f"{field}: draws from a generator of its own in train mode, so the ends of a pair would see different "
                "draws; use torch's default generator, or put the module in evaluation mode"
            )

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """See `general.Body`; a scalar is stored as one number."""
        return {key: shape or (1,) for key, shape in self.shapes.items()}

    def shape(self, head: str) -> ModuleShape:
        """Sizes as the ensemble reads them."""
        return ModuleShape(self.num_features, self.num_outputs, self.roles, self, HEADS[head])

    def dense(self) -> None:
        """Nothing is always held."""

    def initial(self, seed: int, expert: int) -> np.ndarray:
        """The module's own initialisation, under a generator seeded by (seed, expert)."""
        import torch

        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(_torch_seed(seed, philox.PURPOSE_INIT, 0, expert))
            module = self.factory(self.num_features, self.num_outputs)
        parts = [value.detach().reshape(-1).float().numpy() for value in module.parameters()]
        return np.concatenate(parts).astype(np.float32)

    def _outputs(self, candidates: np.ndarray, x, draw: tuple[int, int, int]):
        """Outputs [K, B, V]; what the module draws is the same for every candidate."""
        import torch
        from torch.func import functional_call, vmap

        flat = torch.from_numpy(np.ascontiguousarray(candidates, np.float32))
        stacked, first = {}, 0
        for key, shape in self.shapes.items():
            count = int(np.prod(shape))
            stacked[key] = flat[:, first : first + count].reshape(len(flat), *shape)
            first += count

        def one(parameters):
            return functional_call(self.module, parameters, (x,))

        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_torch_seed(draw[0], philox.PURPOSE_DROPOUT, draw[1], draw[2]))
            return vmap(one, randomness="same")(stacked)

    def losses(self, candidates, inputs: Inputs, positions, offset, draw) -> np.ndarray:
        """See `general.Body`."""
        import torch

        assert inputs.x is not None
        assert inputs.y is not None
        x, targets = torch.from_numpy(inputs.x[positions]), torch.from_numpy(inputs.y[positions])
        outputs = self._outputs(candidates, x, draw)
        if len(offset):
            outputs = outputs + torch.from_numpy(offset)
        targets = targets.long() if targets.ndim == 1 else targets
        return np.stack([self.loss(own, targets).numpy() for own in outputs])

    def predict(self, weights: np.ndarray, x: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Outputs float32 [n, V] of one expert, without dropout, an example at a time so that batches do not matter.

        Args:
            weights: float32 [T].
            x: float32 [n, F].
            offset: float32 [V].
        """
        import torch
        from torch.func import functional_call

        flat, parameters, first = torch.from_numpy(weights), {}, 0
        for key, shape in self.shapes.items():
            count = int(np.prod(shape))
            parameters[key] = flat[first : first + count].reshape(shape)
            first += count
        with _ONE_AT_A_TIME, torch.no_grad():
            rows = [functional_call(self._still, parameters, (torch.from_numpy(row[None]),))[0] for row in x]
        found = torch.stack(rows).numpy() if rows else np.zeros((0, self.num_outputs), np.float32)
        return found + offset


def _torch_seed(seed: int, purpose: int, step: int, expert: int) -> int:
    low, high = philox.words(seed, philox.pack_draw(purpose), step, expert, 2)
    return int(low) | int(high) << 32


@dataclass(frozen=True)
class CountBiases:
    """b0 of a group's experts: what they predict before training.

    Attributes:
        head: `softmax` or `regression`.
        num_outputs: V.
        frequencies: float64 [V].
        strength: pseudo-counts.
    """

    head: str
    num_outputs: int
    frequencies: np.ndarray
    strength: float

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """b0."""
        return {"b0": (self.num_outputs,)}

    def __call__(self, inputs: Inputs, indices: np.ndarray, offsets: np.ndarray) -> dict[str, np.ndarray]:
        """Of every expert of a group, float32 [G, V]."""
        assert inputs.y is not None
        own = [inputs.y[indices[a:b].astype(np.int64)] for a, b in pairwise(offsets)]
        if self.head == "regression":
            return {"b0": mean_biases(own, self.frequencies, self.strength)}
        counts = np.stack([np.bincount(targets, minlength=self.num_outputs) for targets in own])
        shape = MlpShape(1, 1, self.num_outputs, HEAD_SOFTMAX)
        return {"b0": count_biases(shape, counts, self.frequencies, self.strength)}


def torch_loss(expert: ExpertConfig) -> Callable:
    """The loss of an expert over tensors: (outputs [B, V], targets) -> [B]."""
    import torch

    if expert.loss_function is not None:
        black_box = expert.loss_function

        def own(outputs, targets):
            return torch.from_numpy(np.asarray(black_box(outputs.numpy(), targets.numpy()), np.float32))

        return own
    if expert.head == "regression":
        return lambda outputs, targets: ((outputs - targets) ** 2).sum(1)
    if expert.loss == "zero_one":

        def wrong(outputs, targets):
            rivals = outputs.scatter(1, targets[:, None], -torch.inf).amax(1)
            return (outputs.gather(1, targets[:, None])[:, 0] <= rivals).float()

        return wrong
    return lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def module_spec(
    factory: Callable[[int, int], Any],
    name: str,
    expert: ExpertConfig,
    estimator: EstimatorConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    num_features: int,
    frequencies: np.ndarray,
) -> GeneralSpec:
    """The spec of a run; UserError where the parts do not fit together."""
    if expert.head == "tree":
        raise UserError("expert.head=tree: expert.family=module gives all outputs at once; use softmax or regression")
    body = ModuleBody(factory, name, num_features, expert.num_outputs, torch_loss(expert))
    fixed = CountBiases(expert.head, expert.num_outputs, frequencies, expert.prior_strength)
    return general_spec(body, "module", estimator, optimizer, train, "independent", fixed, None, "torch")
