"""Directions in NumPy: what every backend draws, addressed by (seed, expert, step, probe).

Legend as in `contract`.
"""

from __future__ import annotations

import numpy as np

from ..philox import reference as philox
from .contract import (
    BASIS_ROUNDS,
    GAUSSIAN,
    HADAMARD,
    LAYER_ALL,
    LAYER_BASIS,
    LAYER_BODY,
    LAYER_DENSITY,
    LAYER_NORMAL,
    LOWRANK,
    SIGNS,
    SPARSE,
    SUBSPACE,
    MlpShape,
)


def draw_directions(
    seed: int, expert: int, step: int, batch: int, hidden: int, probes: int, directions: int
) -> np.ndarray:
    """v for every example: int8 [B, P, H] of +1 and -1, random signs, or rows of a Hadamard basis under random flips.

    Every example's units are padded to whole 32-bit words of signs.
    """
    padded = -(-hidden // 32) * 32

    def draw(probe: int) -> np.ndarray:
        word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_BODY, probe)
        return philox.signs(seed, word, step, expert, batch * padded).reshape(batch, padded)

    if directions == HADAMARD:
        basis = hadamard_rows(probes, padded)
        # the sign bit of a product is the XOR of the bits; a set bit means +1 in `signs` and -1 in the basis
        drawn = draw(0)[:, None, :] * basis[None]
    else:
        assert directions == SIGNS
        drawn = np.stack([draw(j) for j in range(probes)], axis=1)
    return drawn[:, :, :hidden]


def hadamard_rows(count: int, width: int) -> np.ndarray:
    """Rows of Sylvester's Hadamard matrix, int8 [count, width]: -1 where popcount(row & column) is odd."""
    common = np.arange(count)[:, None] & np.arange(width)[None, :]
    return (1 - 2 * (np.bitwise_count(common) & 1)).astype(np.int8)


def flat_direction(
    directions: int, density: float, seed: int, step: int, expert: int, probe: int, size: int
) -> np.ndarray:
    """z of a vector of `size` weights: SIGNS int8, SPARSE int8 with zeros, or GAUSSIAN float32.

    An entry of a SPARSE direction is held where its own word of a second draw is below density * 2**32.
    """
    if directions == GAUSSIAN:
        return philox.normals(
            seed, philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_NORMAL, probe), step, expert, size
        )
    word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_ALL, probe)
    z = philox.signs(seed, word, step, expert, size)
    if directions == SPARSE:
        word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_DENSITY, probe)
        held = philox.words(seed, word, step, expert, size) < np.uint64(round(density * 2**32))
        z = z * held
    return z


def factor_sizes(shape: MlpShape, rank: int) -> list[tuple[str, tuple[int, int]]]:
    """Factors of a LOWRANK direction in the order they are drawn: ("w1", [F, r]), ("w1", [H, r]), b1, w2, b2, u."""
    hidden, rows = shape.hidden, shape.num_rows
    factors = [
        ("w1", (shape.num_features, rank)),
        ("w1", (hidden, rank)),
        ("b1", (1, hidden)),
        ("w2", (rows, rank)),
        ("w2", (hidden, rank)),
        ("b2", (1, rows)),
    ]
    return factors + ([("u", (shape.tree_depth, shape.num_memory))] if shape.num_memory else [])


def draw_factors(shape: MlpShape, rank: int, seed: int, step: int, expert: int, probe: int) -> list[np.ndarray]:
    """Standard normal factors of a LOWRANK direction, float32, in the order and shapes of `factor_sizes`."""
    sizes = [size for _, size in factor_sizes(shape, rank)]
    counts = [rows * columns for rows, columns in sizes]
    word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_NORMAL, probe)
    flat = philox.normals(seed, word, step, expert, sum(counts))
    ends = np.cumsum(counts)
    return [flat[end - count : end].reshape(size) for end, count, size in zip(ends, counts, sizes, strict=True)]


def lowrank_direction(shape: MlpShape, rank: int, factors: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Z by role: A B^T / sqrt(r) for matrices; vectors, and U, take their normals as they are."""
    scale = np.float32(1 / np.sqrt(rank))
    a1, b1, bias1, a2, b2, bias2, *rest = factors
    z = {"w1": scale * a1 @ b1.T, "b1": bias1[0], "w2": scale * a2 @ b2.T, "b2": bias2[0]}
    return {**z, "u": rest[0]} if rest else z


def input_basis(x: np.ndarray, rank: int, seed: int, step: int, expert: int, layer: int) -> np.ndarray:
    """Orthonormal columns [width, r] that span the leading directions of a layer's inputs x [B, width].

    `BASIS_ROUNDS` rounds of subspace iteration on x^T x from normal draws, with Gram-Schmidt after each; a column
    that vanishes (fewer directions than r) is zero.
    """
    word = philox.pack_draw(philox.PURPOSE_PERTURBATION, LAYER_BASIS, layer)
    basis = philox.normals(seed, word, step, expert, x.shape[1] * rank).reshape(x.shape[1], rank).astype(x.dtype)
    for _ in range(BASIS_ROUNDS):
        basis = _orthonormal(x.T @ (x @ basis))
    return basis


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    done = np.zeros_like(columns)
    for r in range(columns.shape[1]):
        column = columns[:, r]
        before = np.sqrt((column**2).sum())
        # twice is enough (Giraud, Langou, Rozloznik 2005)
        for _ in range(2):
            for q in range(r):
                column = column - (done[:, q] @ column) * done[:, q]
        length = np.sqrt((column**2).sum())
        if length > 1e-4 * before and before > 0:
            done[:, r] = column / length
    return done


def subspace_direction(
    shape: MlpShape,
    rank: int,
    x: np.ndarray,
    active: np.ndarray,
    seed: int,
    step: int,
    expert: int,
    probe: int,
) -> dict[str, np.ndarray]:
    """Z by role inside the leading subspaces of the layers' inputs, drawn like the factors of LOWRANK.

    W1 [F, H] gets A1 R1 with A1 the basis of x, W2 [R, H] gets R2 A2^T with A2 that of the activations; R standard
    normal. Vectors and U take normals.
    """
    factors = draw_factors(shape, rank, seed, step, expert, probe)
    basis1 = input_basis(x, rank, seed, step, expert, 0)
    basis2 = input_basis(active, rank, seed, step, expert, 1)
    z = {"w1": basis1 @ factors[1].T, "b1": factors[2][0], "w2": factors[3] @ basis2.T, "b2": factors[5][0]}
    return {**z, "u": factors[6]} if shape.num_memory else z


def weight_direction(
    shape: MlpShape,
    directions: int,
    density: float,
    rank: int,
    x: np.ndarray,
    active: np.ndarray,
    seed: int,
    step: int,
    expert: int,
    probe: int,
) -> dict[str, np.ndarray]:
    """z by role of any kind of direction; entry i of a flat one belongs to float i of the packed vector."""
    if directions == LOWRANK:
        return lowrank_direction(shape, rank, draw_factors(shape, rank, seed, step, expert, probe))
    if directions == SUBSPACE:
        return subspace_direction(shape, rank, x, active, seed, step, expert, probe)
    assert directions in (SIGNS, SPARSE, GAUSSIAN)
    return shape.views(flat_direction(directions, density, seed, step, expert, probe, shape.packed_size))
