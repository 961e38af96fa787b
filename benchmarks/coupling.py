"""Independent against summed losses: variance of each expert's SPSA estimate, float64, fixed batch, dense probes.

    python -P benchmarks/coupling.py [--experts 4] [--draws 4000]

With summed losses every expert's slope carries the noise of all the others. For N experts of d parameters with
gradients of equal length the ratio of variances is (N d - 1) / (d - 1), near N.
"""

from __future__ import annotations

import argparse

import numpy as np
from colonnade.kernels.mlp_resident import contract as codes
from colonnade.kernels.mlp_resident import reference
from colonnade.kernels.mlp_resident.directions import flat_direction


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--draws", type=int, default=4000)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = codes.MlpShape(20, 16, 10, codes.HEAD_SOFTMAX)
    size, reach, total = shape.num_parameters, 1e-5, 0.0
    recipe = codes.Recipe(codes.WEIGHTS, codes.SIGNS, 1, reach, 0.1, codes.SGD, 0, 0, 0, 0, 0, True, 32,
                          np.ones(1, np.float32), 0)  # fmt: skip
    experts, gradients = [], []
    for _ in range(options.experts):
        weights = {role: 0.3 * rng.standard_normal(own) for role, own in shape.roles.items()}
        batch = reference.Batch(rng.standard_normal((32, 20)), rng.integers(0, 10, 32))
        exact = reference.estimate_calculus(shape, recipe, weights, batch)[0]
        experts.append((weights, batch))
        gradients.append(np.concatenate([exact[role].reshape(-1) for role in shape.roles]))
    # equal lengths, as the theory's ratio assumes: losses are scaled by them
    scales = [1 / np.linalg.norm(gradient) for gradient in gradients]
    errors = {"independent": 0.0, "summed": 0.0}
    for draw in range(options.draws):
        slopes, signs = [], []
        for e, (weights, batch) in enumerate(experts):
            z = flat_direction(codes.SIGNS, 1.0, 1, draw, e, 0, size).astype(float)
            ends, first = [], {}
            place = 0
            for role, own in shape.roles.items():
                count = int(np.prod(own))
                first[role] = z[place : place + count].reshape(own)
                place += count
            for side in (reach, -reach):
                moved = {role: weights[role] + side * first[role] for role in weights}
                ends.append(reference.losses(shape, recipe, moved, batch).mean())
            slopes.append((ends[0] - ends[1]) / (2 * reach) * scales[e])
            signs.append(z)
        total = sum(slopes)
        for e, gradient in enumerate(gradients):
            errors["independent"] += ((slopes[e] * signs[e] - scales[e] * gradient) ** 2).sum()
            errors["summed"] += ((total * signs[e] - scales[e] * gradient) ** 2).sum()
    theory = (options.experts * size - 1) / (size - 1)
    print(f"N = {options.experts}, d = {size}, {options.draws} draws")
    ratio = errors["summed"] / errors["independent"]
    print(f"variance of summed over independent losses: {ratio:.3f} (theory {theory:.3f})")
    measured = errors["independent"] / options.draws / options.experts
    print(f"relative variance of one pair: {measured:.2f} (theory d - 1 = {size - 1})")


if __name__ == "__main__":
    main()
