"""A state carried over windows: recall of a byte seen long ago, by SPSA against truncated backpropagation.

    python -P benchmarks/recall.py [--lags 4 16 64 256 1024] [--minutes 2] [--seeds 0 1 2]

A sequence is one of four bytes, `lag` random letters, a question mark, and the first byte again; the loss is that of
the last byte, 2 bits by chance. One recurrent expert of 8K parameters (width 16, one block, embedding of its own)
learns lag after lag, the next one from the weights of the one before, each for at most `--minutes` of CPU or until .1
bits.

SPSA runs windows of 256 bytes and carries the state: its memory does not grow with the lag. Backpropagation through
time is cut after as many bytes as fit in the same memory as SPSA's candidates, and carries its state as well; also
shown is backpropagation through everything, whose memory grows with the lag.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from colonnade.experts.config import EstimatorConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.general import general_spec
from colonnade.experts.families.lstm import LstmBody
from colonnade.kernels.lstm_forward.contract import LstmShape
from colonnade.kernels.lstm_forward.numba import window_log_proba
from colonnade.kernels.mlp_resident.contract import GroupState
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from table import Table, machine

SHAPE = LstmShape(16, 1, train_embedding=True)
PAYLOADS, LETTERS, ASK = b"0123", b"abcdefgh", ord("?")
WINDOW, BATCH, PAIRS = 256, 32, 8
CHUNK, ENOUGH = 10, 0.1


@dataclass(frozen=True)
class Recall:
    """Sequences, one after another, and the bytes of each."""

    text: np.ndarray
    length: int


def draw(lag: int, count: int, rng: np.random.Generator) -> Recall:
    text = rng.choice(np.frombuffer(LETTERS, np.uint8), (count, lag + 3))
    text[:, 0] = text[:, -1] = rng.choice(np.frombuffer(PAYLOADS, np.uint8), count)
    text[:, -2] = ASK
    return Recall(text.reshape(-1), lag + 3)


@dataclass(frozen=True)
class RecallBody(LstmBody):
    """Loss of the last byte, with the state carried from window to window."""

    def losses(self, candidates, inputs: Recall, positions, offset, draw) -> np.ndarray:
        found = np.empty((len(candidates), len(positions)), np.float32)
        for k, weights in enumerate(candidates):
            state, at = None, 0
            while at < inputs.length:
                size = min(WINDOW, inputs.length - at)
                log_p, state = window_log_proba(self.shape, weights, None, inputs.text, positions + at, size, state)
                at += size
            found[k] = -log_p[:, -1]
        return found


def zeroth_order(weights: np.ndarray, lag: int, seconds: float, seed: int, rate: float) -> tuple[np.ndarray, int]:
    """(weights, steps) after at most `seconds` of CPU."""
    body, rng = RecallBody(SHAPE), np.random.default_rng(seed)
    most = 1_000_000
    spec = general_spec(
        body,
        "lstm",
        EstimatorConfig("spsa", PAIRS, "signs", 0.01, difference="central", head="same"),
        OptimizerConfig("adam", learning_rate=rate, schedule="constant", clip_norm=0.0, weight_decay=0.0),
        TrainConfig(steps=most, batch=BATCH, seed=seed),
    )
    state = GroupState.fresh(weights[None].copy(), spec.optimizer)
    began, step = time.process_time(), 0
    while time.process_time() - began < seconds and step < most:
        inputs = draw(lag, CHUNK * BATCH, rng)
        own = np.arange(CHUNK * BATCH) * inputs.length
        spec.run(inputs, own, np.array([0]), state, step, step + CHUNK)
        step += CHUNK
        if step % (10 * CHUNK) == 0 and bits(state.packed[0], lag, 256) < ENOUGH:
            break
    return state.packed[0].copy(), step


def bits(weights: np.ndarray, lag: int, count: int = 1024) -> float:
    """Mean loss of the last byte on fresh sequences."""
    inputs = draw(lag, count, np.random.default_rng(999))
    starts = np.arange(count) * inputs.length
    return float(RecallBody(SHAPE).losses(weights[None], inputs, starts, None, None).mean() / np.log(2))


def forward(parameters: dict[str, torch.Tensor], symbols: torch.Tensor, previous, state):
    """(last logits [B, 256], state) of symbols [B, n], the embedding of `previous` going in first."""
    h, c = state
    for t in range(symbols.shape[1]):
        x = torch.zeros(len(symbols), SHAPE.width) if previous is None else parameters["embedding"][previous]
        u = functional.layer_norm(x, (SHAPE.width,)) * parameters["block0.gain1"]
        i, f, g, o = (u @ parameters["block0.wx"] + h @ parameters["block0.wh"]).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        x = x + h
        u = functional.layer_norm(x, (SHAPE.width,)) * parameters["block0.gain2"]
        x = x + functional.gelu(u @ parameters["block0.up"]) @ parameters["block0.down"]
        previous = symbols[:, t]
    y = functional.layer_norm(x, (SHAPE.width,)) * parameters["gain"]
    return y @ parameters["embedding"].T, (h, c)


def first_order(weights: np.ndarray, lag: int, seconds: float, seed: int, rate: float, cut: int | None):
    """(weights, steps); the gradient reaches back `cut` bytes, or to the beginning."""
    rng, flat = np.random.default_rng(seed), torch.from_numpy(weights.copy()).requires_grad_(True)
    optimizer = torch.optim.Adam([flat], rate, betas=(0.9, 0.99))
    began, step = time.process_time(), 0
    while time.process_time() - began < seconds:
        inputs = draw(lag, BATCH, rng)
        text = torch.from_numpy(inputs.text.reshape(BATCH, -1).astype(np.int64))
        views, first = {}, 0
        for role, shape in SHAPE.roles.items():
            size = int(np.prod(shape))
            views[role] = flat[first : first + size].reshape(shape)
            first += size
        state, at, previous = (torch.zeros(BATCH, SHAPE.width),) * 2, 0, None
        if cut is not None and inputs.length > cut:
            at = inputs.length - cut
            with torch.no_grad():
                state = forward(views, text[:, :at], None, state)[1]
            previous = text[:, at - 1]
        logits, _ = forward(views, text[:, at:], previous, state)
        optimizer.zero_grad()
        functional.cross_entropy(logits, text[:, -1]).backward()
        optimizer.step()
        step += 1
        if step % 100 == 0 and bits(flat.detach().numpy(), lag, 256) < ENOUGH:
            break
    return flat.detach().numpy().copy(), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--minutes", type=float, default=2.0, help="CPU time of a lag")
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    # numbers kept for one byte of one sequence by backpropagation: activations of the gates, states, the MLP
    kept = 16 * SHAPE.width
    cut = max(2 * PAIRS * SHAPE.num_parameters // (kept * BATCH), 1)
    print(f"# recall, {SHAPE.num_parameters:,} parameters, at most {options.minutes} CPU-minutes a lag; {machine()}")
    table = Table("method, lag", {"bits": 3, "steps": 0})
    methods = {
        "SPSA, state carried": lambda *job: zeroth_order(*job, options.rate),
        f"backprop cut at {cut}": lambda *job: first_order(*job, options.rate, cut),
        "backprop, all of it": lambda *job: first_order(*job, options.rate, None),
    }
    for seed in options.seeds:
        for name, train in methods.items():
            weights = LstmBody(SHAPE).initial(seed, 0)
            for lag in options.lags:
                weights, steps = train(weights, lag, 60 * options.minutes, seed)
                table.add(f"{name}, {lag}", bits=bits(weights, lag), steps=steps)
    print(table)


if __name__ == "__main__":
    main()
