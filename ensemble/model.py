"""The ensemble as one model: loaded from a run directory, it scores, predicts and continues texts.

Legend: n inputs, A areas, K depth of the tree, V outputs, R head rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ..experts.bank import Bank
from ..experts.config import ExpertConfig
from ..experts.families.module import ModuleBody, ModuleShape, torch_loss
from ..experts.families.starts import count_biases
from ..kernels.errors import UserError
from ..kernels.files import write_json_atomic
from ..kernels.mlp_resident.contract import (
    HEAD_REGRESSION,
    HEAD_SOFTMAX,
    HEADS,
    MEMORY_FEATURES,
    RELU,
    SIGN,
    Inputs,
    MlpShape,
    seen_inputs,
    tree_rows,
)
from ..kernels.ngram_memory.numba import DEPTH
from ..kernels.philox import reference as philox
from ..router.memory.memory import Memory, load_memory
from ..router.relay import ArrayRelay, Relay, TextRelay, load_relay
from ..router.router import Router
from ..router.sources.corpus import PAD
from .layout import Layout, WeightReader
from .metrics import LOG2, path_signs, tree_nats
from .mixing import Mixing, losses
from .pools import SOFTMAX_POOLS, fill_missing, weighted_sum
from .scoring import Opinions, score

SCHEMA = 1
# inputs scored at once: opinions of all areas and rows are held in memory
_CHUNK_PATH = 1 << 18
_CHUNK_ROWS = 1 << 12


@dataclass(frozen=True)
class EnsembleModel:
    """Relay, router, experts and mixing weights.

    Attributes:
        relay: features.
        router: who answers.
        layout: where the experts lie.
        bank: their weights.
        mixing: how their answers become one.
        frequencies: float64 [V], class frequencies of the training split: the answer where no expert has one.
        memory: tables of the training split, where the experts take their features.
    """

    relay: Relay
    router: Router
    layout: Layout
    bank: WeightReader
    mixing: Mixing
    frequencies: np.ndarray
    memory: Memory | None = None

    @property
    def is_text(self) -> bool:
        """Whether inputs are bytes of a text rather than rows of a matrix."""
        return isinstance(self.relay, TextRelay)

    def fallback_rows(self) -> np.ndarray:
        """float32 [R]: head logits under which the class frequencies are predicted."""
        return prior_logits(self.layout.shape, self.frequencies)

    def inputs(self, data: np.ndarray, memory: np.ndarray | None = None) -> Inputs:
        """Kernel inputs around text bytes (with rows of memory features, if there are some) or raw rows."""
        if isinstance(self.relay, TextRelay):
            found = Inputs(text=data, embedding=self.relay.embedding, context=self.relay.context, memory=memory)
        else:
            found = Inputs(x=self.relay.transform(data), y=np.zeros(len(data), np.int32))
        return found if isinstance(self.layout.shape, ModuleShape) else seen_inputs(self.layout.shape, found)

    def opinions(
        self, inputs: Inputs, positions: np.ndarray, targets: np.ndarray | None, untrained: bool = False
    ) -> Opinions:
        """Opinions of all areas with what is missing put in; see `scoring.score`."""
        data = inputs.text if inputs.text is not None else inputs.x
        assert data is not None
        assigned = self.router.assign(data, positions)
        row_memory = None
        if self.memory is not None:
            assert inputs.text is not None
            if targets is None:
                row_memory = node_features(self.memory, inputs.text, positions)
            elif inputs.memory is None:
                inputs = replace(inputs, memory=_sparse_rows(self.memory, inputs.text, positions, targets))
        found = score(self.layout, self.bank, inputs, positions, assigned, targets, untrained, row_memory)
        fallback = self.fallback_rows()
        if targets is not None and self.mixing.head == "tree":
            fallback = fallback[tree_rows(targets, self.layout.shape.tree_depth)]
        for values in (found.trained, found.untrained):
            if values is not None:
                fill_missing(values, found.present, fallback)
        return found

    def text_bits(self, text: bytes) -> np.ndarray:
        """Bits of every byte of a text from those before it, float64 [n]."""
        data = self._padded(text)
        inputs = self.inputs(data)
        bits = np.empty(len(text))
        for start in range(0, len(text), _CHUNK_PATH):
            positions = np.arange(start, min(start + _CHUNK_PATH, len(text))) + PAD
            targets = data[positions]
            found = self.opinions(inputs, positions, targets)
            bits[start : start + len(positions)] = losses(self.mixing, found.trained, targets) / LOG2
        return bits

    def next_log_proba(self, text: bytes) -> np.ndarray:
        """Log-probabilities (nats) of the byte that follows a text, float64 [256]."""
        data = self._padded(text + b"\0")
        return self._log_proba(self.inputs(data), np.array([len(text) + PAD]))[0]

    def predict_log_proba(self, x: np.ndarray) -> np.ndarray:
        """Log-probabilities (nats) of the classes of raw rows x [n, F0]: float64 [n, V]."""
        if self.is_text:
            raise UserError("the run was trained on text: score it with input=FILE or continue it with prompt=...")
        x = np.asarray(x)
        result = np.empty((len(x), self.layout.shape.num_outputs))
        for start in range(0, len(x), _CHUNK_ROWS):
            inputs = self.inputs(x[start : start + _CHUNK_ROWS])
            assert inputs.x is not None
            result[start : start + _CHUNK_ROWS] = self._log_proba(inputs, np.arange(len(inputs.x)))
        return result

    def predict_values(self, x: np.ndarray) -> np.ndarray:
        """Predicted numbers of raw rows x [n, F0], in the targets' units: float64 [n]; regression only."""
        if self.mixing.head != "regression" or not isinstance(self.relay, ArrayRelay):
            raise UserError("the run predicts classes or bytes, not numbers")
        inputs = self.inputs(np.asarray(x))
        assert inputs.x is not None
        found = self.opinions(inputs, np.arange(len(inputs.x)), None)
        mixed = weighted_sum(found.trained, self.mixing.weights)[:, 0].astype(np.float64)
        return mixed * self.relay.target_scale + self.relay.target_mean

    def sample(self, prompt: bytes, count: int, seed: int, temperature: float = 1.0) -> bytes:
        """Continue a text by `count` bytes.

        Args:
            prompt: what stands before; may be empty.
            count: bytes to add.
            seed: the same seed continues the same way.
            temperature: divides the log-probabilities; 1 samples what the model believes.
        """
        if not temperature > 0:
            raise UserError(f"temperature={temperature}: must be above 0")
        words = philox.words(seed, philox.pack_draw(philox.PURPOSE_SAMPLE), 0, philox.WHOLE_RUN, count)
        text = bytearray(prompt)
        for word in words:
            scaled = self.next_log_proba(bytes(text[-(2 * PAD) :])) / temperature
            cumulative = np.cumsum(np.exp(scaled - scaled.max()))
            point = (int(word) + 0.5) / 2**32 * cumulative[-1]
            text.append(int(np.searchsorted(cumulative, point)))
        return bytes(text[len(prompt) :])

    def _padded(self, text: bytes) -> np.ndarray:
        if not self.is_text:
            raise UserError("the run was trained on arrays: predict from an .npz file with an array x")
        return np.concatenate([np.zeros(PAD, np.uint8), np.frombuffer(text, np.uint8)])

    def _log_proba(self, inputs: Inputs, positions: np.ndarray) -> np.ndarray:
        found = self.opinions(inputs, positions, None)
        if self.mixing.head == "regression":
            raise UserError("the run predicts numbers: it has no classes to be sure of; use predict")
        if self.mixing.head != "tree":
            return SOFTMAX_POOLS[self.mixing.pool].log_proba(found.trained, self.mixing.weights).astype(np.float64)
        depth = self.layout.shape.tree_depth
        level = np.floor(np.log2(np.arange(1, self.layout.shape.num_rows + 1))).astype(int)
        mixed = weighted_sum(found.trained, self.mixing.weights[:, level])
        leaves = np.arange(1 << depth)
        rows, signs = tree_rows(leaves, depth), path_signs(leaves, depth)
        return np.stack([-tree_nats(mixed[i][rows], signs) for i in range(len(mixed))])


def node_features(memory: Memory, text: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Memory features of every tree node: int8 [n, R, M]."""
    leaves = np.arange(1 << DEPTH)
    rows = tree_rows(leaves, DEPTH)
    found = np.empty((len(positions), len(leaves) - 1, MEMORY_FEATURES), np.int8)
    for i, position in enumerate(positions):
        along = memory.rows(text, np.full(len(leaves), position), leaves)
        # every leaf below a node says the same of it
        found[i, rows] = along
    return found


def _sparse_rows(memory: Memory, text: np.ndarray, positions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Features int8 [N, K, M] of which only those at `positions` are filled; the rest takes no memory."""
    rows = np.zeros((len(text), DEPTH, MEMORY_FEATURES), np.int8)
    rows[positions] = memory.rows(text, positions, targets)
    return rows


def prior_logits(shape: MlpShape | ModuleShape, frequencies: np.ndarray) -> np.ndarray:
    """float32 [R]: head logits under which class frequencies [V] are predicted; zeros for regression."""
    if shape.head == HEAD_REGRESSION:
        return np.zeros(shape.num_rows, np.float32)
    if isinstance(shape, ModuleShape):
        shape = MlpShape(1, 1, shape.num_outputs, HEAD_SOFTMAX)
    return count_biases(shape, np.zeros((1, shape.num_outputs)), frequencies, 1.0)[0]


def write_manifest(
    run: str | os.PathLike[str], layout: Layout, mixing: Mixing, frequencies: np.ndarray, digests: dict[str, str]
) -> None:
    """`ensemble/manifest.json` of a run: all that `EnsembleModel.load` needs besides relay, router and bank.

    Args:
        run: run directory.
        layout: the experts' places.
        mixing: fitted weights.
        frequencies: float64 [V].
        digests: of relay and router, which must be those that the experts were trained with.
    """
    directory = Path(run) / "ensemble"
    directory.mkdir(exist_ok=True)
    shape = layout.shape
    expert: dict = {"num_features": shape.num_features, "num_outputs": shape.num_outputs, "head": mixing.head}
    if isinstance(shape, ModuleShape):
        expert |= {"family": "module", "module": shape.body.name}
    else:
        family = "mlp" if shape.activation == RELU else "integer"
        expert |= {"family": family, "hidden": shape.hidden, "num_memory": shape.num_memory}
    manifest = {
        "schema": SCHEMA,
        "version": version("colonnade"),
        "digests": digests,
        "expert": expert,
        "first_expert": layout.first_expert.tolist(),
        "group_size": layout.group_size,
        "unusable": sorted(layout.unusable),
        "mixing": mixing.to_json(),
        "frequencies": frequencies.tolist(),
    }
    write_json_atomic(directory / "manifest.json", manifest)


def input_digests(run: str | os.PathLike[str]) -> dict[str, str]:
    """Digests that the relay and the router of a run state of themselves."""
    run = Path(run)
    found = {}
    for name in ("relay", "router", "memory"):
        path = run / name / f"{name}.json"
        if name == "memory" and not path.exists():
            continue
        try:
            found[name] = json.loads(path.read_text())["digest"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: cannot be read ({error}); run colonnade partition run={run}") from None
    return found


def _shape_of(expert: dict, module: tuple[str, Callable] | None) -> MlpShape | ModuleShape:
    if expert["family"] != "module":
        return MlpShape(
            expert["num_features"],
            expert["hidden"],
            expert["num_outputs"],
            HEADS[expert["head"]],
            expert["num_memory"],
            SIGN if expert["family"] == "integer" else RELU,
        )
    name = expert["module"]
    if module is None or module[0] != name:
        raise UserError(
            f"expert.module={name}: the run names code of your own; repeat expert.module={name} on the command line "
            "to run it"
        )
    loss = torch_loss(ExpertConfig(head=expert["head"], num_outputs=expert["num_outputs"]))
    return ModuleBody(module[1], name, expert["num_features"], expert["num_outputs"], loss).shape(expert["head"])


def load(run: str | os.PathLike[str], module: tuple[str, Callable] | None = None) -> EnsembleModel:
    """The ensemble of a run; UserError says what is missing or does not fit.

    `module` is (name, factory) of experts of the user's own, which nothing in a run directory can name by itself.
    """
    run = Path(run)
    path = run / "ensemble" / "manifest.json"
    if not run.is_dir():
        raise UserError(f"run={run}: no such folder; name a run directory")
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run colonnade aggregate run={run} first") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); run colonnade aggregate run={run}") from None
    if manifest.get("schema") != SCHEMA:
        raise UserError(f"{path}: schema {manifest.get('schema')}, this version reads {SCHEMA}")
    try:
        expert = manifest["expert"]
        shape = _shape_of(expert, module)
        first_expert = np.array(manifest["first_expert"], np.int64)
        layout = Layout(shape, first_expert, int(manifest["group_size"]), frozenset(manifest["unusable"]))
        mixing = Mixing.from_json(manifest["mixing"])
        frequencies = np.array(manifest["frequencies"], np.float64)
        digests = manifest["digests"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: field {error} is missing or wrong; run colonnade aggregate run={run}") from None
    for name, digest in input_digests(run).items():
        if digest != digests.get(name):
            raise UserError(f"{run / name}: is not what the experts were trained with; restore it or start a new run")
    relay = load_relay(run / "relay")
    if relay.num_features != shape.num_features:
        raise UserError(f"{run / 'relay'}: {relay.num_features} features, the experts take {shape.num_features}")
    memory = load_memory(run / "memory")
    if shape.num_memory and memory is None:
        raise UserError(f"{run / 'memory'}: missing; the experts were trained with it: copy the run directory whole")
    router = Router.load(run / "router", relay)
    return EnsembleModel(relay, router, layout, Bank(run), mixing, frequencies, memory)
