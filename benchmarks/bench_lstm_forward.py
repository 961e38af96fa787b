"""Losses of many recurrent experts on the same windows: the Numba kernel against batched PyTorch, alternating.

    python -P benchmarks/bench_lstm_forward.py [--repeats 7] [--threads 1] [--json out.json]

Sixteen candidates of width 32 (two blocks), sixteen windows of 256 bytes, float32. The kernel runs in one thread;
PyTorch gets `--threads`. PyTorch goes layer by layer over whole windows, so that only the products with the state are
taken byte by byte (torch.bmm over candidates).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import numpy as np
import torch
from colonnade.kernels.lstm_forward import numba
from colonnade.kernels.lstm_forward.contract import LstmShape
from torch.nn import functional

WIDTH, CANDIDATES, WINDOWS, LENGTH = 32, 16, 16, 256
TOKENS = CANDIDATES * WINDOWS * LENGTH


def problem(shape):
    rng = np.random.default_rng(0)
    candidates = np.zeros((CANDIDATES, shape.num_parameters), np.float32)
    for role, view in shape.views(candidates).items():
        view[...] = 1 if "gain" in role else rng.standard_normal(view.shape) / np.sqrt(view.shape[-2])
    embedding = (0.3 * rng.standard_normal((256, WIDTH))).astype(np.float32)
    text = rng.integers(0, 256, 1_000_000).astype(np.uint8)
    return candidates, embedding, text, rng.integers(0, len(text) - LENGTH, WINDOWS)


def normalise(x, gain):
    return functional.layer_norm(x, (WIDTH,)) * gain[:, None, None]


def times(x, matrix):
    """x [K, B, length, rows] times matrix [K, rows, columns]."""
    return torch.bmm(x.flatten(1, 2), matrix).unflatten(1, x.shape[1:3])


def lstm(u, wx, wh):
    gates = times(u, wx).transpose(1, 2).contiguous()
    h = c = torch.zeros(u.shape[0], u.shape[1], WIDTH)
    outputs = []
    for t in range(gates.shape[1]):
        i, f, g, o = torch.baddbmm(gates[:, t], h, wh).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, 2)


def batched_losses(shape, weights, embedding, windows):
    """Losses [K, B] of torch weights by role, each [K, ...], on windows int64 [B, length]."""
    x = functional.pad(embedding[windows[:, :-1]], (0, 0, 1, 0)).expand(CANDIDATES, -1, -1, -1)
    for block in range(shape.num_blocks):
        own = {role: weights[f"block{block}.{role}"] for role in ("wx", "wh", "gain1", "up", "down", "gain2")}
        x = x + lstm(normalise(x, own["gain1"]), own["wx"], own["wh"])
        x = x + times(functional.gelu(times(normalise(x, own["gain2"]), own["up"])), own["down"])
    logits = normalise(x, weights["gain"]) @ embedding.T
    targets = windows.expand(CANDIDATES, -1, -1).flatten()
    return functional.cross_entropy(logits.flatten(0, 2), targets, reduction="none").reshape(
        CANDIDATES, WINDOWS, LENGTH
    ).mean(-1)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = LstmShape(WIDTH)
    candidates, embedding, text, starts = problem(shape)
    weights = {role: torch.tensor(view) for role, view in shape.views(candidates).items()}
    table = torch.tensor(embedding)
    windows = torch.tensor(text[starts[:, None] + np.arange(LENGTH)].astype(np.int64))
    loops = {
        "batched PyTorch": lambda: batched_losses(shape, weights, table, windows).numpy(),
        "numba": lambda: numba.window_losses(shape, candidates, embedding, text, starts, LENGTH),
    }
    seconds = {name: [] for name in loops}
    with torch.no_grad():
        results = [run() for run in loops.values()]
        np.testing.assert_allclose(results[0], results[1], rtol=1e-4)
        for _ in range(options.repeats):
            for name, run in loops.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
    machine = platform.processor() or platform.machine()
    print(
        f"{machine}, numba 1 thread, torch {torch.__version__} {options.threads} thread(s), {time.strftime('%Y-%m-%d')}"
    )
    print(f"width {WIDTH}, {CANDIDATES} candidates, {WINDOWS} windows of {LENGTH} bytes")
    base = statistics.median(seconds["batched PyTorch"])
    print(f"{'loop':<18}{'ms a call':>10}{'lowest':>9}{'highest':>9}{'us a token-candidate':>22}{'ratio':>8}")
    for name, values in seconds.items():
        median = statistics.median(values)
        low, high = 1e3 * min(values), 1e3 * max(values)
        print(f"{name:<18}{1e3 * median:>10.1f}{low:>9.1f}{high:>9.1f}{1e6 * median / TOKENS:>22.3f}", end="")
        print(f"{base / median:>8.1f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(seconds, file)


if __name__ == "__main__":
    main()
