"""The ensemble as one model: loaded from a run directory, it scores, predicts and continues texts.

Legend: n inputs, A areas, K depth of the tree, V outputs, R head rows.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ..experts.bank import Bank
from ..experts.mlp import count_biases
from ..kernels.errors import UserError
from ..kernels.files import write_json_atomic
from ..kernels.mlp_resident.contract import HEADS, Inputs, MlpShape, tree_rows
from ..kernels.philox import reference as philox
from ..router.relay import Relay, TextRelay, load_relay
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
    """

    relay: Relay
    router: Router
    layout: Layout
    bank: WeightReader
    mixing: Mixing
    frequencies: np.ndarray

    @property
    def is_text(self) -> bool:
        """Whether inputs are bytes of a text rather than rows of a matrix."""
        return isinstance(self.relay, TextRelay)

    def fallback_rows(self) -> np.ndarray:
        """float32 [R]: head logits under which the class frequencies are predicted."""
        return prior_logits(self.layout.shape, self.frequencies)

    def inputs(self, data: np.ndarray) -> Inputs:
        """Kernel inputs around text bytes or raw rows."""
        if isinstance(self.relay, TextRelay):
            return Inputs(text=data, embedding=self.relay.embedding, context=self.relay.context)
        return Inputs(x=self.relay.transform(data), y=np.zeros(len(data), np.int32))

    def opinions(
        self, inputs: Inputs, positions: np.ndarray, targets: np.ndarray | None, untrained: bool = False
    ) -> Opinions:
        """Opinions of all areas with what is missing put in; see `scoring.score`."""
        data = inputs.text if inputs.text is not None else inputs.x
        assert data is not None
        assigned = self.router.assign(data, positions)
        found = score(self.layout, self.bank, inputs, positions, assigned, targets, untrained)
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
        if self.mixing.head != "tree":
            return SOFTMAX_POOLS[self.mixing.pool].log_proba(found.trained, self.mixing.weights).astype(np.float64)
        depth = self.layout.shape.tree_depth
        level = np.floor(np.log2(np.arange(1, self.layout.shape.num_rows + 1))).astype(int)
        mixed = weighted_sum(found.trained, self.mixing.weights[:, level])
        leaves = np.arange(1 << depth)
        rows, signs = tree_rows(leaves, depth), path_signs(leaves, depth)
        return np.stack([-tree_nats(mixed[i][rows], signs) for i in range(len(mixed))])


def prior_logits(shape: MlpShape, frequencies: np.ndarray) -> np.ndarray:
    """float32 [R]: head logits under which class frequencies [V] are predicted."""
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
    manifest = {
        "schema": SCHEMA,
        "version": version("colonnade"),
        "digests": digests,
        "expert": {
            "family": "mlp",
            "num_features": shape.num_features,
            "hidden": shape.hidden,
            "num_outputs": shape.num_outputs,
            "head": mixing.head,
        },
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
    for name in ("relay", "router"):
        path = run / name / f"{name}.json"
        try:
            found[name] = json.loads(path.read_text())["digest"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: cannot be read ({error}); run colonnade partition run={run}") from None
    return found


def load(run: str | os.PathLike[str]) -> EnsembleModel:
    """The ensemble of a run; UserError says what is missing or does not fit."""
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
        shape = MlpShape(expert["num_features"], expert["hidden"], expert["num_outputs"], HEADS[expert["head"]])
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
    return EnsembleModel(relay, Router.load(run / "router", relay), layout, Bank(run), mixing, frequencies)
