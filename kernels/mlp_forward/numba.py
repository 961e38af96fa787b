"""Forward passes for inference: each input under the one expert it was routed to.

Every input's sums run in an order of their own, so an answer does not depend on the batch it is asked in. Inputs
sorted by expert are fastest: neighbours with one expert share its weights eight at a time.

Legend: E experts, n inputs, F features, H hidden, R head rows, K depth of the tree, T packed parameters.
"""

from __future__ import annotations

import numpy as np

from .. import simd
from ..compile import jit
from ..mlp_resident.contract import HEAD_TREE, MAX_TREE_DEPTH, Inputs, MlpShape
from ..mlp_resident.numba import _body_forward, _gather, _logits, _relu_rows, _target_rows

_LANES = simd.LANES
_TILE = 8


@jit
def _forward(text, embedding, width, context, matrix, is_text, positions, experts, targets, packed, num_features,
             features, hidden, num_rows, padded_rows, depth, is_tree, along_path, parameter_offsets, out):  # fmt: skip
    b1, w2, b2 = parameter_offsets
    head_rows = MAX_TREE_DEPTH if along_path else padded_rows
    wanted = depth if along_path else num_rows
    x = np.zeros(_TILE * features + _LANES, np.float32)
    h = np.zeros(_TILE * hidden, np.float32)
    z = np.zeros(head_rows + _LANES, np.float32)
    biases = np.zeros(_LANES, np.float32)
    path_signs = np.zeros(_LANES, np.float32)
    rows = np.zeros(head_rows, np.int64)
    if along_path:
        rows[:] = padded_rows - 1
    else:
        for r in range(head_rows):
            rows[r] = r
    start = 0
    while start < positions.size:
        expert = experts[start]
        stop = start + 1
        while stop < positions.size and stop - start < _TILE and experts[stop] == expert:
            stop += 1
        if expert >= 0:
            theta = packed[expert]
            for i in range(start, stop):
                _gather(x, positions[i], i - start, num_features, features, is_text, text, embedding, width, context,
                        matrix)  # fmt: skip
            _body_forward(theta, x, h, _TILE, features, hidden, b1)
            _relu_rows(h, h, _TILE * hidden)
            for i in range(start, stop):
                if along_path:
                    _target_rows(targets[i], depth, is_tree, rows, path_signs)
                _logits(theta, rows, head_rows, hidden, w2, b2, h, (i - start) * hidden, biases, z)
                for r in range(wanted):
                    out[i, r] = z[r]
        start = stop


def _call(shape: MlpShape, inputs: Inputs, positions, experts, targets, packed, along_path: bool, columns: int):
    no_floats = np.zeros((1, 1), np.float32)
    out = np.zeros((len(positions), columns), np.float32)
    if inputs.text is None:
        text, embedding, width = np.zeros(1, np.uint8), no_floats.ravel(), 0
        matrix = inputs.x
    else:
        assert inputs.embedding is not None
        text, width, matrix = inputs.text, inputs.embedding.shape[1], no_floats
        embedding = np.concatenate([inputs.embedding.ravel(), np.zeros(_LANES, np.float32)])
    _forward(
        text,
        embedding,
        width,
        inputs.context,
        matrix,
        inputs.text is not None,
        np.ascontiguousarray(positions, np.int64),
        np.ascontiguousarray(experts, np.int64),
        np.ascontiguousarray(targets, np.int64),
        packed,
        shape.num_features,
        shape.padded_features,
        shape.padded_hidden,
        shape.num_rows,
        shape.padded_rows,
        shape.tree_depth,
        shape.head == HEAD_TREE,
        along_path,
        (shape.offset_b1, shape.offset_w2, shape.offset_b2),
        out,
    )
    return out


def path_logits(
    shape: MlpShape,
    inputs: Inputs,
    positions: np.ndarray,
    experts: np.ndarray,
    targets: np.ndarray,
    packed: np.ndarray,
) -> np.ndarray:
    """Tree logits along the path of each target: float32 [n, K].

    Args:
        shape: sizes of an expert, tree head.
        inputs: text or matrix.
        positions: int [n], places in the text or rows of the matrix.
        experts: int [n], rows of `packed`; -1 leaves zeros.
        targets: int [n].
        packed: float32 [E, T], see `MlpShape.pack`.
    """
    assert shape.head == HEAD_TREE
    return _call(shape, inputs, positions, experts, targets, packed, True, shape.tree_depth)


def row_logits(
    shape: MlpShape, inputs: Inputs, positions: np.ndarray, experts: np.ndarray, packed: np.ndarray
) -> np.ndarray:
    """Logits of every head row: float32 [n, R]; arguments as `path_logits`."""
    targets = np.zeros(len(positions), np.int64)
    return _call(shape, inputs, positions, experts, targets, packed, False, shape.num_rows)
