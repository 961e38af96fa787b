"""Opinions of every area on every input, an area at a time, inputs sorted by expert.

Legend: n inputs, A areas, K columns (depth of the tree along the targets' paths, or R rows of the head).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..experts.families.module import ModuleShape
from ..kernels.mlp_forward.numba import path_logits, row_logits
from ..kernels.mlp_resident.contract import HEAD_TREE, MEMORY_UNIT, Inputs, MlpShape, tree_rows
from .layout import Layout, WeightReader

_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Opinions:
    """What the areas say.

    Attributes:
        trained: float32 [n, A, K].
        untrained: float32 [n, A, K] of the count biases alone, or None.
        present: bool [n, A]: False where the expert is cold or failed.
    """

    trained: np.ndarray
    untrained: np.ndarray | None
    present: np.ndarray


def score(
    layout: Layout,
    bank: WeightReader,
    inputs: Inputs,
    positions: np.ndarray,
    assigned: np.ndarray,
    targets: np.ndarray | None,
    untrained: bool = False,
    row_memory: np.ndarray | None = None,
) -> Opinions:
    """Opinions on inputs.

    Args:
        layout: the experts' places.
        bank: their weights.
        inputs: text or matrix.
        positions: int [n], places in it.
        assigned: int32 [n, A], global experts.
        targets: int [n] for the logits along the tree's paths; None for those of all head rows.
        untrained: also give what the count biases alone say.
        row_memory: int8 [n, R, M], memory features of every head row, where there are no targets.
    """
    shape = layout.shape
    path_targets = targets if shape.head == HEAD_TREE else None
    along = path_targets is not None
    columns = shape.tree_depth if along else shape.num_rows
    usable = layout.usable()
    trained = np.zeros((len(positions), layout.num_areas, columns), np.float32)
    before = np.zeros_like(trained) if untrained else None
    present = usable[assigned]
    levels = np.floor(np.log2(np.arange(1, shape.num_rows + 1))).astype(int)
    rows = tree_rows(path_targets, shape.tree_depth) if path_targets is not None else np.arange(shape.num_rows)[None]

    with ThreadPoolExecutor(_THREADS) as pool:
        for area in range(layout.num_areas):
            first, last = layout.first_expert[area], layout.first_expert[area + 1]
            local = np.where(present[:, area], assigned[:, area] - first, -1)
            wanted = np.zeros(last - first, bool)
            wanted[local[local >= 0]] = True
            packed, biases, rows_of = layout.area_weights(bank, area, wanted)
            local = np.where(local >= 0, rows_of[local], -1)
            order = np.argsort(local, kind="stable")

            def run(part: np.ndarray, local=local, packed=packed, biases=biases, area=area) -> None:
                if isinstance(shape, ModuleShape):
                    assert inputs.x is not None
                    out = shape.row_logits(inputs.x[positions[part]], local[part], packed, biases)
                elif path_targets is not None:
                    out = path_logits(shape, inputs, positions[part], local[part], path_targets[part], packed)
                else:
                    out = row_logits(shape, inputs, positions[part], local[part], packed)
                trained[part, area] = out

            list(pool.map(run, np.array_split(order, _THREADS)))
            if row_memory is not None:
                held = local >= 0
                assert isinstance(shape, MlpShape)
                u = shape.views(packed[local[held]])["u"][:, levels]
                trained[held, area] += MEMORY_UNIT * np.einsum("nrm,nrm->nr", row_memory[held], u)
            if before is not None:
                held = local >= 0
                before[held, area] = biases[local[held][:, None], rows[held] if along else rows]
    return Opinions(trained, before, present)
