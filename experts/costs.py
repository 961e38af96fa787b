"""Multiply-adds of one step, so that estimators compare at equal cost.

Legend: B batch, F features, H hidden, K rows of the head that an example touches (depth of a tree, or V), P probes,
T parameters, r rank.
"""

from __future__ import annotations

from ..kernels.mlp_resident import contract as codes
from .families.mlp import MlpSpec


def multiply_adds(spec: MlpSpec) -> int:
    """Multiply-adds of a step of one expert: forwards, directions applied, gradient assembled; draws not counted."""
    shape, recipe = spec.shape, spec.recipe
    batch = recipe.batch
    rows = shape.tree_depth or shape.num_rows
    body = shape.num_features * shape.hidden if recipe.use_body else 0
    head = rows * shape.hidden if recipe.use_body else 0
    mixing = rows * shape.num_memory
    forward = batch * (body + head + mixing)
    head_gradient = batch * (head + mixing)
    ends = 2 if recipe.difference == codes.CENTRAL else 1
    probes = recipe.num_perturbations
    if recipe.site == codes.CALCULUS:
        backward = batch * (head + body) if recipe.train_body else 0
        return forward + head_gradient + backward
    if recipe.site == codes.ACTIVATIONS:
        if not spec.probes_body:
            return forward + head_gradient
        return forward + head_gradient + batch * (ends * probes * head + probes * shape.hidden + body)
    own_head = head_gradient if recipe.head_rule != codes.HEAD_SAME else 0
    size = shape.num_parameters if recipe.head_rule == codes.HEAD_SAME else shape.num_body_parameters
    if recipe.directions == codes.LOWRANK:
        rank = recipe.rank
        # x A once a probe, then a rank-r correction at each end; the update is an outer product
        correction = batch * rank * (shape.hidden + rows + shape.hidden)
        shared = batch * rank * shape.num_features
        return forward + probes * (shared + ends * (correction + batch * (head + mixing)) + rank * size) + own_head
    return forward + probes * (ends * (forward + size) + size) + own_head
