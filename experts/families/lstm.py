"""Recurrent experts over windows of bytes: the SOMA body, trained without backpropagation through time.

Legend as in `kernels.lstm_forward.contract`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.errors import UserError
from ...kernels.lstm_forward import reference
from ...kernels.lstm_forward.contract import NUM_BYTES, LstmShape
from ...kernels.mlp_resident.contract import LAYER_HEAD
from ...kernels.philox import reference as philox
from ..config import EstimatorConfig, OptimizerConfig, TrainConfig
from .general import GeneralSpec, general_spec


@dataclass(frozen=True)
class LstmConfig:
    """A recurrent expert.

    Attributes:
        width: d.
        num_blocks: residual blocks of an LSTM and an MLP each.
        head_width: w of the embedding where it differs from d (adds projections), or None.
        train_embedding: whether the tied embedding goes on learning in every expert; otherwise it is frozen and
            shared.
        loss_coupling: `independent`, or `summed` (a control).
    """

    width: int = 32
    num_blocks: int = 2
    head_width: int | None = None
    train_embedding: bool = False
    loss_coupling: str = "independent"

    @property
    def shape(self) -> LstmShape:
        """Sizes; UserError names the field that is out of range."""
        try:
            return LstmShape(self.width, self.num_blocks, self.head_width, self.train_embedding)
        except UserError as error:
            raise UserError(f"expert.{error}") from None


@dataclass(frozen=True)
class WindowInputs:
    """A text, cut into windows.

    Attributes:
        text: uint8 [N].
        length: bytes of a window; inputs are named by their first byte.
        embedding: float32 [256, w], shared and frozen, or None where every expert brings its own.
    """

    text: np.ndarray
    length: int
    embedding: np.ndarray | None


@dataclass(frozen=True)
class LstmBody:
    """See `general.Body`."""

    shape: LstmShape

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """See `general.Body`."""
        return self.shape.roles

    def dense(self) -> np.ndarray:
        """The gains."""
        return self.shape.gain_mask()

    def initial(self, seed: int, expert: int) -> np.ndarray:
        """Matrices uniform with variance 1 / (3 rows), the LSTM's usual range of 1 / sqrt(d); gains 1."""
        draw = philox.pack_draw(philox.PURPOSE_INIT)
        flat = philox.uniform_floats(seed, draw, 0, expert, self.shape.num_parameters)
        for role, view in self.shape.views(flat).items():
            if "gain" in role:
                view[...] = 1
            elif role == "embedding":
                view *= np.float32(np.sqrt(3) * EMBEDDING_SCALE / np.sqrt(view.shape[1]))
            else:
                view /= np.float32(np.sqrt(view.shape[0]))
        return flat

    def losses(self, candidates, inputs: WindowInputs, positions, offset, draw) -> np.ndarray:
        """See `general.Body`; a window's loss is the mean over its bytes."""
        from ...kernels.lstm_forward.numba import window_losses

        return window_losses(self.shape, candidates, inputs.embedding, inputs.text, positions, inputs.length)


# deviation of an untrained embedding's entries times sqrt(w)
EMBEDDING_SCALE = 0.5


def initial_embedding(width: int, seed: int) -> np.ndarray:
    """float32 [256, w] before the seed run."""
    draw = philox.pack_draw(philox.PURPOSE_INIT, LAYER_HEAD)
    flat = philox.normals(seed, draw, 0, philox.WHOLE_RUN, NUM_BYTES * width)
    return (flat * np.float32(EMBEDDING_SCALE / np.sqrt(width))).reshape(NUM_BYTES, width)


def lstm_spec(
    config: LstmConfig,
    estimator: EstimatorConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    seed_expert: np.ndarray | None = None,
) -> GeneralSpec:
    """The spec of a run; UserError where the parts do not fit together."""
    body = LstmBody(config.shape)
    return general_spec(body, "lstm", estimator, optimizer, train, config.loss_coupling, None, seed_expert, "numba")


def delta_rule(
    shape: LstmShape, weights: np.ndarray, embedding: np.ndarray, text: np.ndarray, starts: np.ndarray, length: int
) -> tuple[np.ndarray, float]:
    """Gradient of the mean loss in the decoder, (p - onehot)^T y averaged over bytes, float32 [256, w]; and the loss.

    The decoder path alone: what the embedding does to the input is left out (SOMA's seed run). Windows are run by the
    reference, whose last layer it needs.
    """
    y = np.empty((len(starts), length, shape.embedding_width), np.float32)
    hidden_outputs(shape, weights, embedding, text, starts, length, y)
    wanted = text[starts[:, None] + np.arange(length)].reshape(-1)
    rows = y.reshape(-1, y.shape[2])
    log_p = reference.log_softmax(rows @ embedding.T)
    p = np.exp(log_p)
    loss = float(-log_p[np.arange(len(rows)), wanted].mean())
    p[np.arange(len(rows)), wanted] -= 1
    return (p.T @ rows / len(rows)).astype(np.float32), loss


def hidden_outputs(shape, weights, embedding, text, starts, length, out) -> None:
    """out [B, length, w]: what the decoder sees before each byte."""
    starts = np.asarray(starts, np.int64)

    w = shape.views(weights)
    h, c = np.zeros((2, shape.num_blocks, len(starts), shape.width), np.float32)
    for t in range(length):
        x = embedding[text[starts + t - 1]] if t else np.zeros((len(starts), shape.embedding_width), np.float32)
        if shape.has_projections:
            x = x @ w["project_in"]
        for block in range(shape.num_blocks):
            own = {role: w[f"block{block}.{role}"] for role in ("wx", "wh", "gain1", "up", "down", "gain2")}
            u = reference.normalise(x, own["gain1"])
            h[block], c[block] = reference.lstm_step(u, h[block], c[block], own["wx"], own["wh"])
            x = x + h[block]
            x = x + reference.gelu(reference.normalise(x, own["gain2"]) @ own["up"]) @ own["down"]
        y = reference.normalise(x, w["gain"])
        out[:, t] = y @ w["project_out"] if shape.has_projections else y


def train_seed_body(
    spec: GeneralSpec,
    text: np.ndarray,
    length: int,
    starts: np.ndarray,
    seed_id: int,
    head_rate: float,
    head_every: int = 1,
) -> tuple[np.ndarray, np.ndarray, float]:
    """SOMA's seed run: the body by the spec's estimator, the tied embedding by the delta rule on the decoder path.

    Args:
        spec: of the seed; its experts' embedding is shared.
        text: uint8 [N].
        length: bytes of a window.
        starts: int64 [n], training windows.
        seed_id: names its draws.
        head_rate: learning rate of the embedding's Adam.
        head_every: steps between its updates.

    Returns:
        (weights float32 [T], embedding float32 [256, w], loss in nats a byte of the last tenth of the steps).

    Raises:
        UserError: the seed's losses are not finite.
    """
    from ...kernels.mlp_resident.contract import STATUS_OK, GroupState

    body = spec.body
    assert isinstance(body, LstmBody)
    shape = body.shape
    embedding = initial_embedding(shape.embedding_width, spec.train.seed)
    state = GroupState.fresh(body.initial(spec.train.seed, seed_id)[None].astype(np.float32), spec.optimizer)
    ids = np.array([seed_id])
    draw = philox.pack_draw(philox.PURPOSE_BATCH)
    first, second = np.zeros_like(embedding), np.zeros_like(embedding)
    steps, last = spec.train.steps, []
    for step in range(steps):
        spec.run(WindowInputs(text, length, embedding), starts, ids, state, step, step + 1)
        if state.status[0] != STATUS_OK:
            raise UserError(f"seed_expert: its losses are not finite (step {step}); lower optimizer.learning_rate")
        if step % head_every and step < steps - 1:
            continue
        chosen = philox.uniform_ints(spec.train.seed, draw, step, seed_id, spec.train.batch, len(starts))
        gradient, loss = delta_rule(shape, state.packed[0], embedding, text, starts[chosen], length)
        count = step // head_every + 1
        first += 0.1 * (gradient - first)
        second += 0.001 * (gradient**2 - second)
        scale = np.sqrt(second / (1 - 0.999**count)) + 1e-8
        embedding = (embedding - head_rate * (first / (1 - 0.9**count)) / scale).astype(np.float32)
        if step >= steps - max(steps // 10, 1):
            last.append(loss)
    return state.packed[0].copy(), embedding, float(np.mean(last))
