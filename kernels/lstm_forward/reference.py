"""The recurrent expert's forward pass as a specification: one weight vector at a time, NumPy, any float dtype.

Legend and formulas as in `contract`.
"""

from __future__ import annotations

import numpy as np

from .contract import EPSILON, LstmShape, check_windows

State = tuple[np.ndarray, np.ndarray]


def normalise(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Rows [..., d] with mean 0 and variance 1, times gain [d]."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + x.dtype.type(EPSILON)) * gain


def gelu(v: np.ndarray) -> np.ndarray:
    """v times the normal distribution function of v."""
    # a fifth of a second, which workers on other families need not wait
    from scipy.special import erf

    half, root = v.dtype.type(0.5), v.dtype.type(np.sqrt(0.5))
    return half * v * (1 + erf(v * root))


def lstm_step(u: np.ndarray, h: np.ndarray, c: np.ndarray, wx: np.ndarray, wh: np.ndarray) -> State:
    """The next (h, c), each [B, d], after the input u [B, d]."""
    from scipy.special import expit

    i, f, g, o = np.split(u @ wx + h @ wh, 4, axis=-1)
    c = expit(f) * c + expit(i) * np.tanh(g)
    return expit(o) * np.tanh(c), c


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Log-probabilities along the last axis."""
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def window_log_proba(
    shape: LstmShape,
    weights_flat: np.ndarray,
    embedding: np.ndarray | None,
    text: np.ndarray,
    starts: np.ndarray,
    length: int,
    state: State | None = None,
) -> tuple[np.ndarray, State]:
    """Log p (nats) of each byte of the windows, [B, length], given those before it, and the state after the last.

    Without a state a window begins from nothing: zero state, and the zero vector in place of a previous byte. With the
    state of an earlier call it continues: its first input is the embedding of text[start - 1], so that the two parts
    give what the whole would.

    Args:
        shape: sizes of the expert.
        weights_flat: float [T]; its dtype is that of the computation and of what is returned.
        embedding: float [256, w]; None or ignored where the expert brings its own.
        text: uint8 [N].
        starts: int [B], first byte of each window.
        length: bytes of a window.
        state: what an earlier call returned for the same B windows, or None: (h, c), each [L, B, d].

    Raises:
        UserError: see `check_windows`.
    """
    check_windows(shape, embedding, text, starts, length, state is not None)
    dtype = weights_flat.dtype
    w = shape.views(weights_flat)
    table = w["embedding"] if shape.train_embedding else np.asarray(embedding, dtype)
    starts = np.asarray(starts, np.int64)
    if state is None:
        h, c = np.zeros((2, shape.num_blocks, len(starts), shape.width), dtype)
    else:
        h, c = (part.astype(dtype) for part in state)
    log_proba = np.zeros((len(starts), length), dtype)
    for t in range(length):
        if t == 0 and state is None:
            x = np.zeros((len(starts), shape.embedding_width), dtype)
        else:
            x = table[text[starts + t - 1]]
        if shape.has_projections:
            x = x @ w["project_in"]
        for block in range(shape.num_blocks):
            own = {role: w[f"block{block}.{role}"] for role in ("wx", "wh", "gain1", "up", "down", "gain2")}
            h[block], c[block] = lstm_step(normalise(x, own["gain1"]), h[block], c[block], own["wx"], own["wh"])
            x = x + h[block]
            x = x + gelu(normalise(x, own["gain2"]) @ own["up"]) @ own["down"]
        y = normalise(x, w["gain"])
        if shape.has_projections:
            y = y @ w["project_out"]
        log_proba[:, t] = log_softmax(y @ table.T)[np.arange(len(starts)), text[starts + t]]
    return log_proba, (h, c)


def window_losses(
    shape: LstmShape,
    candidates: np.ndarray,
    embedding: np.ndarray | None,
    text: np.ndarray,
    starts: np.ndarray,
    length: int,
) -> np.ndarray:
    """Loss (nats a byte) of every window under every candidate, [K, B].

    Args:
        shape: sizes of the expert.
        candidates: float [K, T]; the dtype is that of the computation and of what is returned.
        embedding: float [256, w]; None or ignored where candidates bring their own.
        text: uint8 [N].
        starts: int [B], first byte of each window.
        length: bytes of a window.

    Raises:
        UserError: see `check_windows`.
    """
    losses = np.zeros((len(candidates), len(starts)), candidates.dtype)
    for k, weights in enumerate(candidates):
        log_proba, _ = window_log_proba(shape, weights, embedding, text, starts, length)
        losses[k] = -log_proba.mean(1)
    return losses
