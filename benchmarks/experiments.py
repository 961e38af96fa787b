"""What works, at a fraction of tenk's size: each experiment prints one table.

    python -P benchmarks/experiments.py NAME [--fraction .125] [--experts 160] [--areas 4] [--split-seeds 0 1 2]

    estimators   held-out loss of every estimator at equal multiply-adds; rates tuned on calibration
    ratio        ZO against backprop as experts get smaller and more, same partition
    inputs       inputs an expert: where ZO meets backprop and where both overfit
    width        hidden units at fixed P
    integer      int8 and ternary weights with sign activations, against float and straight-through backprop
    controls     what is left without routing, without training, with one area
    sharding     weight-space SPSA, total evaluations fixed, one expert to many

Every table names what a step is told: one number a batch, one an example, or one an output decision. Results at
different levels are not of one kind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig, level
from colonnade.experts.costs import multiply_adds

# python -P leaves the script's own folder out
sys.path.insert(0, str(Path(__file__).parent))
from lab import Found, Lab, machine

ADAM = OptimizerConfig("adam", learning_rate=0.01, clip_norm=0.0, weight_decay=0.0)
BACKPROP = EstimatorConfig("backprop", 1, "signs", head="delta", difference="central")
ESTIMATORS = {
    "backprop": BACKPROP,
    "activation, 16 one-sided": EstimatorConfig(),
    "activation, 8 central": EstimatorConfig(num_perturbations=8, difference="central"),
    "activation, 4 one-sided": EstimatorConfig(num_perturbations=4),
    "activation, 16 random signs": EstimatorConfig(directions="signs"),
    "activation, 32 (full basis)": EstimatorConfig(num_perturbations=32, perturbation_size=0.01),
    "activation, exact head": EstimatorConfig(head="delta"),
    "delta (head alone)": EstimatorConfig("delta", 1, "signs", head="delta", difference="central"),
    "spsa in the body, pairs at the head": EstimatorConfig("spsa", 4, "signs", 0.02, difference="central"),
    "spsa, signs": EstimatorConfig("spsa", 10, "signs", 0.01, difference="central", head="same"),
    "spsa, sparse": EstimatorConfig("spsa", 10, "sparse", 0.01, difference="central", head="same"),
    "spsa, Gaussian (MeZO)": EstimatorConfig("spsa", 1, "gaussian", 0.01, difference="central", head="same"),
    "fzoo": EstimatorConfig("fzoo", 16, "signs", 0.01, fitness="std", head="same"),
    "lowrank (EGGROLL)": EstimatorConfig(
        "lowrank", 16, "lowrank", 0.01, difference="central", fitness="normalised", head="same"
    ),
    "agzo": EstimatorConfig("agzo", 10, "subspace", 0.01, difference="central", head="same", rank=4),
}


def line(name: str, *cells: object) -> None:
    print(f"{name:<38}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def rates(estimator: EstimatorConfig) -> tuple[OptimizerConfig, ...]:
    """Optimisers tried: weight-space estimates are followed by Adam, near-exact ones by clipped SGD."""
    if estimator.head == "same":
        return tuple(
            OptimizerConfig("adam", learning_rate=rate, clip_norm=0.0, weight_decay=0.0)
            for rate in (0.001, 0.003, 0.01)
        )
    return tuple(OptimizerConfig(learning_rate=rate) for rate in (1.25, 2.5, 5.0))


def tuned(lab: Lab, estimator: EstimatorConfig, steps: int, expert: ExpertConfig | None = None) -> tuple[float, Found]:
    """(rate chosen on calibration, what it gave)."""
    found = [
        (own.learning_rate, lab.train(lab.spec(expert, estimator, own, TrainConfig(steps=steps))))
        for own in rates(estimator)
    ]
    return min(found, key=lambda entry: entry[1].calibration)


def estimators(options: argparse.Namespace) -> None:
    lab = Lab(options.fraction, options.experts, options.areas)
    budget = options.steps * multiply_adds(lab.spec(estimator=EstimatorConfig()))
    untrained = lab.train(lab.spec(train=TrainConfig(steps=1)), untrained=True)
    line("estimator", "steps", "Mmadd/step", "rate", "cal", "held out", "CPU s")
    line("untrained (counts)", 0, "", "", f"{untrained.calibration:.3f}", f"{untrained.heldout:.3f}", "")
    for name, estimator in ESTIMATORS.items():
        cost = multiply_adds(lab.spec(estimator=estimator))
        steps = max(budget // cost, 1)
        rate, found = tuned(lab, estimator, steps)
        line(name, steps, f"{cost / 1e6:.2f}", rate, f"{found.calibration:.3f}", f"{found.heldout:.3f}",
             f"{found.cpu_seconds:.0f}")  # fmt: skip
        print(f"    told {level(estimator, ExpertConfig())}")


def ratio(options: argparse.Namespace) -> None:
    line("experts in all", "inputs each", "ZO", "backprop", "ratio", "spread")
    for experts in (8, 40, 160, 640):
        pairs = []
        for seed in options.split_seeds:
            lab = Lab(options.fraction, experts, options.areas, split_seed=seed)
            _, zo = tuned(lab, EstimatorConfig(), options.steps)
            _, bp = tuned(lab, BACKPROP, options.steps)
            pairs.append((zo.heldout, bp.heldout))
        ratios = [a / b for a, b in pairs]
        mean = np.mean(pairs, axis=0)
        line(f"{experts * options.areas}", lab.corpus.count(0) // experts, f"{mean[0]:.4f}", f"{mean[1]:.4f}",
             f"{np.mean(ratios):.4f}", f"{np.std(ratios):.4f}")  # fmt: skip


def inputs(options: argparse.Namespace) -> None:
    line("inputs an expert", "steps", "ZO", "backprop", "ratio")
    for experts in (4096, 1024, 256, 64, 16):
        lab = Lab(options.fraction, experts, 1)
        _, zo = tuned(lab, EstimatorConfig(), options.steps)
        _, bp = tuned(lab, BACKPROP, options.steps)
        line(f"{lab.corpus.count(0) // experts:,}", options.steps, f"{zo.heldout:.4f}", f"{bp.heldout:.4f}",
             f"{zo.heldout / bp.heldout:.4f}")  # fmt: skip


def width(options: argparse.Namespace) -> None:
    lab = Lab(options.fraction, options.experts, options.areas)
    line("hidden units, P = 16", "rate", "ZO", "backprop", "ratio")
    for hidden in (8, 16, 32, 64, 128):
        expert = ExpertConfig(hidden=hidden)
        rate, zo = tuned(lab, EstimatorConfig(), options.steps, expert)
        _, bp = tuned(lab, BACKPROP, options.steps, expert)
        line(hidden, rate, f"{zo.heldout:.4f}", f"{bp.heldout:.4f}", f"{zo.heldout / bp.heldout:.4f}")


def integer(options: argparse.Namespace) -> None:
    lab = Lab(options.fraction, options.experts, options.areas)
    train = TrainConfig(steps=options.steps)
    untrained = lab.train(lab.spec(train=TrainConfig(steps=1)), untrained=True).heldout
    goal = lab.train(lab.spec(train=train)).heldout
    line("experts", "held out", "of the way", "failed")
    line("untrained (counts)", f"{untrained:.3f}", "0 %")
    line("float mlp, activation ZO", f"{goal:.3f}", "100 %")
    wide = EstimatorConfig(perturbation_size=1.0)
    for weights in ("int8", "ternary"):
        expert = ExpertConfig(family="integer", weights=weights)
        for name, estimator in (("activation ZO", wide), ("straight-through backprop", BACKPROP)):
            found = [
                lab.train(lab.spec(expert, estimator, OptimizerConfig(learning_rate=rate, weight_decay=0.0), train))
                for rate in (0.3, 1.0, 2.5)
            ]
            best = min(found, key=lambda own: own.calibration)
            share = (untrained - best.heldout) / (untrained - goal)
            line(f"{weights}, {name}", f"{best.heldout:.3f}", f"{share:.0%}", best.failed)


def controls(options: argparse.Namespace) -> None:
    train = TrainConfig(steps=options.steps)
    lab = Lab(options.fraction, options.experts, options.areas)
    line("case", "held out", "CPU s")

    def row(name: str, own: Lab, untrained: bool = False, expert: ExpertConfig | None = None, steps=None) -> None:
        found = own.train(own.spec(expert, train=TrainConfig(steps=steps) if steps else train), untrained)
        line(name, f"{found.heldout:.3f}", f"{found.cpu_seconds:.0f}")

    row("all areas, activation ZO", lab)
    row("untrained (counts)", lab, untrained=True, steps=1)
    row("hidden layer frozen", lab, expert=ExpertConfig(train_body=False))
    row("random routing", Lab(options.fraction, options.experts, options.areas, strategy="random"))
    row("one area", Lab(options.fraction, options.experts, 1))
    row("one expert for everything, all steps", Lab(options.fraction, 1, 1), steps=options.steps * options.experts)
    row(
        "one expert, 16 times as wide",
        Lab(options.fraction, 1, 1),
        expert=ExpertConfig(hidden=512),
        steps=20 * options.steps,
    )


def sharding(options: argparse.Namespace) -> None:
    total = options.steps * options.experts
    estimator = EstimatorConfig("spsa", 10, "signs", 0.01, difference="central", head="same")
    line("experts (one area)", "steps each", "rate", "cal", "held out", "CPU s")
    for experts in (1, 4, 16, 64, 256, 1024):
        lab = Lab(options.fraction, experts, 1)
        rate, found = tuned(lab, estimator, max(total // experts, 1))
        line(experts, max(total // experts, 1), rate, f"{found.calibration:.3f}", f"{found.heldout:.3f}",
             f"{found.cpu_seconds:.0f}")  # fmt: skip


EXPERIMENTS = {own.__name__: own for own in (estimators, ratio, inputs, width, integer, controls, sharding)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(EXPERIMENTS))
    parser.add_argument("--fraction", type=float, default=0.125)
    parser.add_argument("--experts", type=int, default=160, help="in each area")
    parser.add_argument("--areas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--split-seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    print(f"# {options.name}: fraction {options.fraction}, {options.areas} areas, {options.steps} steps, "
          f"splits {options.split_seeds}; {machine()}")  # fmt: skip
    EXPERIMENTS[options.name](options)


if __name__ == "__main__":
    main()
