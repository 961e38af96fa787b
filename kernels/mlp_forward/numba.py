"""Forward passes for inference: each input under the one expert it was routed to.

Every input's sums run in an order of their own, so an answer does not depend on the batch it is asked in. Inputs
sorted by expert are fastest: neighbours with one expert share its weights eight at a time.

Legend: E experts, n inputs, F features, H hidden, R head rows, K depth of the tree, T packed parameters.
"""

from __future__ import annotations

import numpy as np

from ..compile import jit
from ..mlp_resident.contract import HEAD_TREE, MAX_TREE_DEPTH, Inputs, MlpShape
from ..mlp_resident.layers import (
    LANES,
    activate_rows,
    add_memory_logits,
    body_forward,
    data_of,
    dims_of,
    gather,
    logits,
    read_only,
    row_starts,
    target_rows,
)

_TILE = 8


@jit
def _forward(data, dims, positions, experts, targets, packed, along_path, out):
    head_rows = MAX_TREE_DEPTH if along_path else dims.padded_rows
    wanted = dims.depth if along_path else dims.num_rows
    x = np.zeros(_TILE * dims.features + LANES, np.float32)
    h = np.zeros(_TILE * dims.hidden, np.float32)
    z = np.zeros(head_rows + LANES, np.float32)
    starts = np.zeros(head_rows + LANES, np.float32)
    path_signs = np.zeros(LANES, np.float32)
    rows = np.zeros(head_rows, np.int64)
    text, embedding, matrix, table = data.text, data.embedding, data.matrix, data.memory
    if along_path:
        rows[:] = dims.padded_rows - 1
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
                gather(positions[i], i - start, dims.num_features, dims.features, data.is_text, text, embedding,
                       data.width, data.context, matrix, x)  # fmt: skip
            body_forward(theta, x, h, _TILE, dims.features, dims.hidden, dims.b1)
            activate_rows(h, h, _TILE * dims.hidden, dims.activation)
            for i in range(start, stop):
                if along_path:
                    target_rows(targets[i], dims.depth, dims.head, rows, path_signs)
                row_starts(theta, rows, dims.b2, starts)
                # without a path, memory is added by the caller: every row has its own
                if along_path and dims.memory > 0:
                    add_memory_logits(theta, dims.u, table, positions[i], dims.depth, starts)
                logits(theta, rows, head_rows, dims.hidden, dims.w2, starts, h, (i - start) * dims.hidden, z)
                for r in range(wanted):
                    out[i, r] = z[r]
        start = stop


def _call(shape: MlpShape, inputs: Inputs, positions, experts, targets, packed, along_path: bool, columns: int):
    out = np.zeros((len(positions), columns), np.float32)
    _forward(
        data_of(inputs),
        dims_of(shape),
        read_only(np.ascontiguousarray(positions, np.int64)),
        read_only(np.ascontiguousarray(experts, np.int64)),
        read_only(np.ascontiguousarray(targets, np.int64)),
        read_only(packed),
        along_path,
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
