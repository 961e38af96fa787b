"""Low-rank probes: the factored forward of the resident loop against forming Z, on the same draws.

    python -P benchmarks/bench_lowrank.py [--features 280] [--rank 1] [--repeats 7]

Prints microseconds a probe (both ends, batch 64), medians of alternating repeats, their ratio, and the largest
difference of the losses.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from colonnade.kernels.compile import jit
from colonnade.kernels.mlp_resident import contract as codes
from colonnade.kernels.mlp_resident import numba as loop
from colonnade.kernels.mlp_resident.layers import data_of, dims_of, read_only

_batch_loss, _factored_losses = loop._batch_loss, loop._factored_losses
_spread_factors = loop._spread_factors
_draw_factors, _expand_factors, _draw_batch, _work = (
    loop._draw_factors, loop._expand_factors, loop._draw_batch, loop._work)  # fmt: skip


@jit
def probes(theta, data, dims, rule, indices, losses, formed):
    work = _work(dims, rule)
    zero, one = np.uint32(0), np.uint32(1)
    _draw_batch(data, dims, rule, work, indices, 0, indices.size, zero, zero, one, zero)
    _batch_loss(theta, dims, data, rule, work)
    x, z, trial, factors, product = work.x, work.z, work.trial, work.factored.factors, work.factored.product
    work.delta[:] = work.h
    # one draw for all: drawing costs both the same
    _draw_factors(dims, rule, work, 0, zero, zero, one, zero)
    for j in range(rule.probes):
        if formed:
            _expand_factors(dims, rule, work, z)
            for side in range(2):
                reach = np.float32(rule.size if side == 0 else -rule.size)
                for i in range(dims.size):
                    trial[i] = theta[i] + reach * z[i]
                losses[j, side] = _batch_loss(trial, dims, data, rule, work)
        else:
            _spread_factors(dims, rule.rank, rule.batch, x, factors, product, work.factored.columns)
            losses[j, 0], losses[j, 1] = _factored_losses(theta, dims, data, rule, work, 2)


def batched(options: argparse.Namespace, parameters: int) -> None:
    """The hidden layer of all candidates in batched PyTorch calls, 64 probes at one end."""
    import torch

    torch.manual_seed(0)
    count, hidden = 64, 32
    x, w = torch.randn(64, options.features), torch.randn(options.features, hidden)
    a, b = torch.randn(count, options.features, options.rank), torch.randn(count, hidden, options.rank)
    scale = 0.01 / options.rank**0.5

    def factored():
        return (x @ w)[None] + scale * torch.matmul(torch.matmul(x, a), b.mT)

    def formed():
        return torch.matmul(x, w + scale * torch.matmul(a, b.mT))

    seconds: dict[str, list[float]] = {"factored": [], "formed": []}
    for repeat in range(2 * options.repeats + 1):
        for name, forward in (("factored", factored), ("formed", formed)):
            began = time.perf_counter()
            forward()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    fast, slow = (float(np.median(own)) / count * 1e6 for own in seconds.values())
    apart = float((factored() - formed()).abs().max() / formed().abs().max())
    print(f"hidden layer alone, batched PyTorch: factored {fast:.1f} us a probe, forming Z {slow:.1f} us, "
          f"{slow / fast:.1f} x, relative difference {apart:.1e}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--features", type=int, default=310)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = codes.MlpShape(options.features, 32, 1, codes.HEAD_REGRESSION)
    inputs = codes.Inputs(
        x=rng.standard_normal((1000, options.features)).astype(np.float32),
        y=rng.standard_normal((1000, 1)).astype(np.float32),
    )
    weights = {role: (0.1 * rng.standard_normal((1, *size))).astype(np.float32) for role, size in shape.roles.items()}
    theta = shape.pack(weights)[0]
    count = 64
    rule = loop._Rule(codes.WEIGHTS, codes.LOWRANK, count, 0.01, 0.05, codes.CENTRAL, codes.PLAIN, codes.HEAD_SAME,
                      1.0, True, options.rank, codes.SGD, 0.9, 0.99, 1e-6, 0.0, 0.0, True, True, 64, 0)  # fmt: skip
    indices = read_only(np.arange(1000, dtype=np.uint32))
    found = {formed: np.zeros((count, 2)) for formed in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(options.repeats + 1):
        for formed, losses in found.items():
            began = time.perf_counter()
            probes(theta, data_of(inputs), dims_of(shape), rule, indices, losses, formed)
            if repeat:
                seconds[formed].append(time.perf_counter() - began)
    medians = {formed: float(np.median(own)) / count * 1e6 for formed, own in seconds.items()}
    print(f"{shape.num_parameters:,} parameters, rank {options.rank}, batch 64")
    ratio = medians[True] / medians[False]
    print(f"factored {medians[False]:.1f} us a probe, forming Z {medians[True]:.1f} us, {ratio:.1f} x")
    batched(options, shape.num_parameters)
    print(f"largest difference of the losses {np.abs(found[True] - found[False]).max():.1e}")


if __name__ == "__main__":
    main()
