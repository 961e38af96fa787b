"""A reward that nothing can differentiate: the digits, where reading a as b costs |a - b|, known only as a number.

    python -P benchmarks/reward.py [--split-seeds 0 1 2 3 4]

Experts over balanced clusters of scikit-learn's digits. Zeroth-order experts are told the cost of their own answer
(argmax), one number an example or one a batch; first-order ones are trained on cross entropy, and then answer with the
likeliest digit or, knowing the cost table that the others never see, with the one of least expected cost.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from colonnade.ensemble.api import fit_ensemble
from colonnade.ensemble.inputs import training_frequencies
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig, level
from colonnade.experts.families.mlp import build_spec
from colonnade.router.relay import fit_array_relay
from colonnade.router.router import RouterConfig
from colonnade.router.sources import CALIBRATION, HELDOUT, digits
from colonnade.router.strategies import AreaConfig

sys.path.insert(0, str(Path(__file__).parent))
from experiments import BACKPROP, ZO, adam
from table import Table, machine

COSTS = np.abs(np.arange(10)[:, None] - np.arange(10)).astype(np.float32)
SGD = tuple(OptimizerConfig(learning_rate=rate) for rate in (0.1, 0.2, 0.5))
ADAM = tuple(adam(rate) for rate in (0.003, 0.01, 0.03))


def cost(outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """|answer - digit|; no number where an output is none."""
    found = COSTS[outputs.argmax(1), targets]
    return np.where(np.isfinite(outputs).all(1), found, np.nan)


BLIND = ExpertConfig(head="softmax", num_outputs=10, loss="reward:cost", loss_function=cost)
LIKELIHOOD = ExpertConfig(head="softmax", num_outputs=10)
WIDE = EstimatorConfig(num_perturbations=32, perturbation_size=1.0, head_perturbation_size=1.0)
CASES = {
    "untrained (counts)": (LIKELIHOOD, ZO, SGD[:1], 1),
    "cross entropy, backprop": (LIKELIHOOD, BACKPROP, SGD, 300),
    "cross entropy, activation ZO": (LIKELIHOOD, ZO, SGD, 300),
    "the cost itself, activation ZO": (BLIND, WIDE, SGD, 300),
    "the cost itself, SPSA": (
        BLIND,
        EstimatorConfig("spsa", 16, "signs", 0.1, difference="central", head="same"),
        ADAM,
        300,
    ),
}


def add(table: Table, seed: int) -> None:
    corpus = digits.read(seed)
    relay = fit_array_relay(corpus, None)
    areas = RouterConfig(tuple(AreaConfig(f"area{a}", "kmeans", 4, seed=a) for a in range(8)))
    sides = {split: np.flatnonzero(corpus.split == split) for split in (CALIBRATION, HELDOUT)}
    for name, (expert, estimator, rates, steps) in CASES.items():
        fitted = []
        for optimizer in rates:
            spec = build_spec(
                expert,
                estimator,
                optimizer,
                TrainConfig(steps=steps),
                relay.num_features,
                training_frequencies(corpus),
            )
            model = fit_ensemble(corpus, relay, areas, spec, "log", "softmax")[0]
            found = {split: model.predict_log_proba(corpus.x[own]) for split, own in sides.items()}
            tuned = COSTS[found[CALIBRATION].argmax(1), corpus.y[sides[CALIBRATION]]].mean()
            fitted.append((tuned, len(fitted), found[HELDOUT]))
        log_proba, targets = min(fitted)[2], corpus.y[sides[HELDOUT]]
        told = "nothing" if steps == 1 else level(estimator, expert)
        table.add(name, told, cost=float(COSTS[log_proba.argmax(1), targets].mean()),
                  accuracy=float((log_proba.argmax(1) == targets).mean()))  # fmt: skip
        if expert.loss_function is None and steps > 1:
            knowing = (np.exp(log_proba) @ COSTS).argmin(1)
            paid, right = float(COSTS[knowing, targets].mean()), float((knowing == targets).mean())
            table.add(f"{name}, least expected cost", told + " and the costs", cost=paid, accuracy=right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split-seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    print(f"# digits, |answer - digit| held out, splits {options.split_seeds}; {machine()}")
    table = Table("trained on", {"cost": 3, "accuracy": 3})
    for seed in options.split_seeds:
        add(table, seed)
    print(table)


if __name__ == "__main__":
    main()
