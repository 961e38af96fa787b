"""How good an estimate is: against the analytic gradient of the same batch, with the theory's value beside it.

Legend: d estimated parameters, P directions, B batch, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..kernels.mlp_resident import contract as codes
from ..kernels.mlp_resident import reference
from ..kernels.mlp_resident.contract import Inputs, MlpShape, Recipe
from ..kernels.philox import reference as philox


def estimated_roles(shape: MlpShape, recipe: Recipe) -> tuple[str, ...]:
    """Roles whose gradient comes from few directions; the others are near exact."""
    body = ("w1", "b1") if recipe.train_body and recipe.use_body else ()
    if recipe.site == codes.WEIGHTS and recipe.head_rule == codes.HEAD_SAME:
        return reference.moving_roles(recipe, shape.roles)
    return body if recipe.site != codes.CALCULUS else ()


def diagnose(
    shape: MlpShape, recipe: Recipe, inputs: Inputs, own: np.ndarray, expert: int, packed: np.ndarray, step: int,
    draws: int = 32,
) -> dict[str, float | int | None] | None:  # fmt: skip
    """Cosine and relative centred variance of the estimate at weights packed [T], on the batch of `step`.

    Args:
        shape: sizes of the expert.
        recipe: how it is trained.
        inputs: the corpus.
        own: the expert's inputs.
        expert: its id.
        packed: float [T].
        step: names the batch.
        draws: independent directions the mean is over; they are named by steps beyond the run's.

    Returns:
        expert, step, cosine (mean over the draws), relative_variance E|g_hat - E g_hat|^2 / |g|^2, theory (of that
        variance for a linear loss, None where none is known), parameters (d), difference (mean |L+ - L-| in nats
        between the ends of a central pair of weight-space probes, else None). None where nothing is estimated, the loss
        is a black box, or the gradient vanishes.
    """
    roles = estimated_roles(shape, recipe)
    if not roles or recipe.loss != codes.LOSS_LIKELIHOOD:
        return None
    word = philox.pack_draw(philox.PURPOSE_BATCH)
    chosen = philox.uniform_ints(recipe.seed, word, step, expert, recipe.batch, len(own))
    batch = reference.gather(inputs, own[chosen].astype(np.int64), np.dtype(np.float64))
    weights = {role: view.astype(np.float64) for role, view in shape.views(packed).items()}

    def flat(gradient: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([gradient[role].reshape(-1) for role in roles])

    exact = flat(reference.estimate_calculus(shape, recipe, weights, batch)[0])
    length = np.linalg.norm(exact)
    if not length > 0:
        return None
    beyond = len(recipe.learning_rates)
    found = np.stack(
        [
            flat(reference.estimate(shape, recipe, weights, batch, (beyond + draw) % (1 << 32), expert)[0])
            for draw in range(draws)
        ]
    )
    lengths = np.linalg.norm(found, axis=1)
    cosine = np.mean([row @ exact / (size * length) if size else 0.0 for row, size in zip(found, lengths, strict=True)])
    spread = ((found - found.mean(0)) ** 2).sum() / (draws - 1)
    return {
        "expert": int(expert),
        "step": int(step),
        "cosine": float(cosine),
        "relative_variance": float(spread / length**2),
        "theory": theory(shape, recipe, weights, batch, len(exact), float(length)),
        "parameters": len(exact),
        "difference": _difference(shape, recipe, weights, batch, roles, step, expert),
    }


def _difference(shape, recipe, weights, batch, roles, step, expert) -> float | None:
    if recipe.site != codes.WEIGHTS or recipe.difference != codes.CENTRAL:
        return None
    _, plus, minus = reference.probe(shape, recipe, weights, batch, roles, step, expert)
    return float(np.abs(plus - minus).mean())


def theory(
    shape: MlpShape, recipe: Recipe, weights: reference.Weights, batch: reference.Batch, size: int, length: float
) -> float | None:
    """Relative variance for a loss that is linear over a probe's reach; None where none is known.

    Weights: (d - 1) / P for signs (Spall 1992), (d - 2 + 1/density) / P for rescaled sparse signs, (d + 1) / P for
    Gaussian directions. Activations: for every example (M - 1) / P of |d_h|^2 with random signs and
    (M - 1) / (H - 1) * (H / P - 1) with rows of a Hadamard basis, M the units that a probe can move; examples add up
    independently.
    """
    probes = recipe.num_perturbations
    if recipe.fitness != codes.PLAIN:
        return None
    if recipe.site == codes.WEIGHTS:
        if recipe.directions == codes.SIGNS:
            return (size - 1) / probes
        if recipe.directions == codes.GAUSSIAN:
            return (size + 1) / probes
        if recipe.directions == codes.SPARSE and recipe.rescale:
            return (size - 2 + 1 / recipe.density) / probes
        return None
    h, _ = reference.hidden_layer(shape, recipe, weights, batch.x)
    movable = reference.can_move(shape, h, recipe.perturbation_size).sum(1)
    alone = replace(recipe, batch=1)
    total = 0.0
    for b in range(len(batch.x)):
        memory = None if batch.memory is None else batch.memory[b : b + 1]
        one = reference.Batch(batch.x[b : b + 1], batch.targets[b : b + 1], memory)
        gradient = reference.estimate_calculus(shape, alone, weights, one)[0]
        squared = (gradient["w1"] ** 2).sum() + (gradient["b1"] ** 2).sum()
        noise = (movable[b] - 1) / probes
        if recipe.directions == codes.HADAMARD:
            basis = 32 * shape.sign_words
            noise = (movable[b] - 1) / max(basis - 1, 1) * max(basis / probes - 1, 0)
        total += max(noise, 0) * squared
    return float(total / len(batch.x) ** 2 / length**2)
