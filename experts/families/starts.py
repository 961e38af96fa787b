"""Where a one-hidden-layer expert starts: random body, silent head, biases that are its own counts."""

from __future__ import annotations

import numpy as np

from ...kernels.mlp_resident.contract import HEAD_TREE, LAYER_BODY, MlpShape
from ...kernels.philox import reference as philox


def initial_body(shape: MlpShape, seed: int, expert: int) -> np.ndarray:
    """W1 of an expert, float32 [F, H], uniform with variance 2 / F (He, Zhang, Ren, Sun 2015, eq. 10)."""
    draw = philox.pack_draw(philox.PURPOSE_INIT, LAYER_BODY)
    values = philox.uniform_floats(seed, draw, 0, expert, shape.num_features * shape.hidden)
    return (values * np.float32(np.sqrt(6 / shape.num_features))).reshape(shape.num_features, shape.hidden)


def count_biases(shape: MlpShape, counts: np.ndarray, frequencies: np.ndarray, strength: float) -> np.ndarray:
    """Head biases under which an expert predicts its own smoothed counts, float32 [G, R].

    Args:
        shape: sizes of an expert.
        counts: [G, V] targets seen by each expert.
        frequencies: float64 [V] of the whole training split, positive, summing to 1.
        strength: pseudo-counts s: a class (or branch) with frequency p and n of N counts gets (n + s p) / (N + s).

    Returns:
        Log-odds of branch 1 at every tree node, or log-probabilities of the classes.
    """
    if shape.head != HEAD_TREE:
        total = counts.sum(1, keepdims=True)
        return np.log((counts + strength * frequencies) / (total + strength)).astype(np.float32)
    own, whole = node_masses(counts.astype(np.float64)), node_masses(frequencies[None])
    right = own[1] + strength * whole[1] / (whole[0] + whole[1])
    left = own[0] + strength * whole[0] / (whole[0] + whole[1])
    return np.log(right / left).astype(np.float32)


def mean_biases(targets: list[np.ndarray], mean: np.ndarray, strength: float) -> np.ndarray:
    """Biases of a regression head: each expert's mean target, shrunk towards the mean of all, float32 [G, V].

    Args:
        targets: of each expert, [n, V]; n may be 0.
        mean: float64 [V] of the training split.
        strength: pseudo-examples at that mean.
    """
    rows = [(own.sum(0, dtype=np.float64) + strength * mean) / (len(own) + strength) for own in targets]
    return np.stack(rows).astype(np.float32)


def node_masses(leaves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mass below branch 0 and branch 1 of every node in heap order, two float64 [G, V - 1], from leaves [G, V]."""
    groups, num_leaves = leaves.shape
    heap = np.empty((groups, 2 * num_leaves))
    heap[:, num_leaves:] = leaves
    level = num_leaves
    while level > 1:
        level //= 2
        heap[:, level : 2 * level] = heap[:, 2 * level : 4 * level : 2] + heap[:, 2 * level + 1 : 4 * level : 2]
    nodes = np.arange(1, num_leaves)
    return heap[:, 2 * nodes], heap[:, 2 * nodes + 1]


def class_frequencies(targets: np.ndarray, num_outputs: int) -> np.ndarray:
    """Frequencies of the training targets with half a count added to each class, float64 [V]."""
    counts = np.bincount(targets, minlength=num_outputs) + 0.5
    return counts / counts.sum()
