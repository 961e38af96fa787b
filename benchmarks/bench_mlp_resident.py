"""Expert-steps per second: the resident loops against the same maths as batched PyTorch calls, alternating.

    python -P benchmarks/bench_mlp_resident.py [--repeats 5] [--json out.json]

The sizes are those of preset=tenk: 60 features, 32 hidden units, a tree over 256 bytes, batch 64, 8 antithetic pairs,
SGD with clipping. PyTorch trains 128 experts at once with batched products, on the same cores as the resident loop
(one thread an expert, as many threads as cores).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.mlp import build_spec
from colonnade.experts.families.starts import class_frequencies
from colonnade.experts.training import advance_group, start_group
from colonnade.kernels.mlp_resident.contract import Inputs

EXPERTS, SIZE, CONTEXT, DIM, HIDDEN, BATCH, PAIRS = 128, 8_000, 5, 12, 32, 64, 8
STEPS, TORCH_STEPS = 40, 3


def problem():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 256, 11_000_000).astype(np.uint8)
    embedding = rng.standard_normal((256, DIM)).astype(np.float32)
    indices = rng.integers(32, len(text), EXPERTS * SIZE).astype(np.uint32)
    return Inputs(text=text, embedding=embedding, context=CONTEXT), indices


def resident(spec, inputs, indices, threads):
    def run(part):
        offsets = np.arange(len(part) + 1) * SIZE
        own = indices[part[0] * SIZE : (part[-1] + 1) * SIZE]
        progress = start_group(spec, inputs, own, offsets, part)
        began = time.perf_counter()
        advance_group(spec, inputs, own, offsets, part, progress, STEPS)
        return time.perf_counter() - began

    parts = np.array_split(np.arange(EXPERTS), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = max(pool.map(run, parts))
    return EXPERTS * STEPS / seconds


class Batched:
    """Activation perturbation of all experts at once: [E, B, ...] tensors, a batched product for every pair."""

    def __init__(self, inputs, indices):
        torch.manual_seed(0)
        self.text = torch.tensor(inputs.text)
        self.embedding = torch.tensor(inputs.embedding)
        self.indices = torch.tensor(indices.astype(np.int64)).reshape(EXPERTS, SIZE)
        self.w1 = torch.randn(EXPERTS, CONTEXT * DIM, HIDDEN) * 0.1
        self.b1 = torch.zeros(EXPERTS, 1, HIDDEN)
        self.w2 = torch.zeros(EXPERTS, 255, HIDDEN)
        self.b2 = torch.zeros(EXPERTS, 255)

    def logits(self, active, rows, weights):
        flat = rows + 255 * torch.arange(EXPERTS)[:, None, None]
        return torch.einsum("ebkh,ebh->ebk", weights, active) + self.b2.reshape(-1)[flat]

    def step(self, rate=2.5, size=0.1, head=0.05):
        chosen = self.indices.gather(1, torch.randint(SIZE, (EXPERTS, BATCH)))
        before = self.text[chosen[..., None] - 1 - torch.arange(CONTEXT)].long()
        x = self.embedding[before].reshape(EXPERTS, BATCH, -1)
        targets = self.text[chosen].long()
        k = torch.arange(8)
        rows = ((1 << k) | (targets[..., None] >> (8 - k))) - 1
        signs = (2 * ((targets[..., None] >> (7 - k)) & 1) - 1).float()
        flat = rows + 255 * torch.arange(EXPERTS)[:, None, None]
        weights = self.w2.reshape(-1, HIDDEN)[flat]
        h = torch.baddbmm(self.b1, x, self.w1)
        active = torch.relu(h)
        z = self.logits(active, rows, weights)
        softplus = torch.nn.functional.softplus
        d_z = (softplus(-signs * (z + head)) - softplus(-signs * (z - head))) / (2 * head)
        d_h = torch.zeros_like(h)
        for _ in range(PAIRS):
            v = 2.0 * torch.randint(2, h.shape) - 1
            ends = [
                softplus(-signs * self.logits(torch.relu(h + side * size * v), rows, weights)).sum(-1)
                for side in (1, -1)
            ]
            d_h += ((ends[0] - ends[1]) / (2 * size * PAIRS))[..., None] * v
        g1, gb1 = torch.bmm(x.transpose(1, 2), d_h) / BATCH, d_h.mean(1, keepdim=True)
        g2 = torch.zeros(EXPERTS * 255, HIDDEN)
        g2.index_add_(0, flat.reshape(-1), (d_z[..., None] * active[:, :, None] / BATCH).reshape(-1, HIDDEN))
        gb2 = torch.zeros(EXPERTS * 255).index_add_(0, flat.reshape(-1), d_z.reshape(-1) / BATCH)
        gradients = [g1, gb1, g2.reshape(EXPERTS, 255, HIDDEN), gb2.reshape(EXPERTS, 255)]
        norm = torch.stack([(g * g).flatten(1).sum(1) for g in gradients]).sum(0).sqrt()
        scale = rate * torch.clamp(0.5 / norm, max=1)
        for weight, gradient in zip((self.w1, self.b1, self.w2, self.b2), gradients, strict=True):
            weight -= scale.reshape(-1, *[1] * (weight.dim() - 1)) * gradient

    def rate(self):
        began = time.perf_counter()
        for _ in range(TORCH_STEPS):
            self.step()
        return EXPERTS * TORCH_STEPS / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    inputs, indices = problem()
    frequencies = class_frequencies(inputs.text[:100_000], 256)
    specs = {
        name: build_spec(
            ExpertConfig(hidden=HIDDEN, train_body=name != "frozen body"),
            EstimatorConfig(name=estimator, num_perturbations=PAIRS),
            OptimizerConfig(),
            TrainConfig(steps=STEPS, batch=BATCH),
            CONTEXT * DIM,
            frequencies,
        )
        for name, estimator in (("activation", "activation"), ("backprop", "backprop"), ("frozen body", "activation"))
    }
    batched = Batched(inputs, indices)
    with torch.no_grad():
        batched.rate()
        for spec in specs.values():
            resident(spec, inputs, indices, threads)
        rates = {name: [] for name in ("batched PyTorch", *specs)}
        for _ in range(options.repeats):
            rates["batched PyTorch"].append(batched.rate())
            for name, spec in specs.items():
                rates[name].append(resident(spec, inputs, indices, threads))
    base = statistics.median(rates["batched PyTorch"])
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {threads} cores, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print(f"{'loop':<18}{'expert-steps/s':>15}{'lowest':>10}{'highest':>10}{'ratio':>8}")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:<18}{median:>15,.0f}{min(values):>10,.0f}{max(values):>10,.0f}{median / base:>8.1f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rates, file)


if __name__ == "__main__":
    main()
