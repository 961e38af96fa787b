"""What works, at a fraction of tenk's size: each experiment prints one table and, if asked, saves a figure.

    python -P benchmarks/experiments.py NAME [--fraction .125] [--experts 160] [--areas 4] [--steps 300]
        [--split-seeds 0 1 2] [--path TEXTS] [--figure FILE.png]

    estimators   held-out loss of every estimator at equal multiply-adds; rates tuned on calibration
    seconds      activation ZO against backprop at equal CPU-seconds; rates tuned on calibration
    ratio        ZO against backprop as experts get smaller and more
    inputs       inputs an expert: where ZO meets backprop and where both overfit
    width        hidden units at fixed P
    integer      int8 and ternary weights with sign activations, against float and straight-through backprop
    controls     what is left without routing, without training, with one area, with one expert
    sharding     weight-space SPSA, hidden units in all, steps and so arithmetic fixed: one expert to thousands
    shares       weight-space SPSA, the expert's size and the evaluations in all fixed: one expert to thousands
    routing      hash, k-means and random areas by method, at equal CPU-seconds, settings fixed beforehand

Values are means over the split seeds, with the sample standard deviation. Every table that compares estimators names
what a step is told: one number a batch, one an example, or one an output decision. Results at different levels are
not of one kind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig, level
from colonnade.experts.costs import multiply_adds
from colonnade.router.sources import TRAIN

# python -P leaves the script's own folder out
sys.path.insert(0, str(Path(__file__).parent))
from lab import Found, Lab
from table import Table, machine

ZO = EstimatorConfig()
BACKPROP = EstimatorConfig("backprop", 1, "signs", head="delta", difference="central")
SPSA = EstimatorConfig("spsa", 10, "signs", 0.01, difference="central", head="same")
ESTIMATORS = {
    "backprop": BACKPROP,
    "activation, 16 one-sided": ZO,
    "activation, 8 central": EstimatorConfig(num_perturbations=8, difference="central"),
    "activation, 4 one-sided": EstimatorConfig(num_perturbations=4),
    "activation, 16 random signs": EstimatorConfig(directions="signs"),
    "activation, 32 (full basis)": EstimatorConfig(num_perturbations=32, perturbation_size=0.01),
    "activation, exact head": EstimatorConfig(head="delta"),
    "delta (head alone)": EstimatorConfig("delta", 1, "signs", head="delta", difference="central"),
    "spsa in the body, pairs at the head": EstimatorConfig("spsa", 4, "signs", 0.02, difference="central"),
    "spsa, signs": SPSA,
    "spsa, sparse": EstimatorConfig("spsa", 10, "sparse", 0.01, difference="central", head="same"),
    "spsa, Gaussian (MeZO)": EstimatorConfig("spsa", 1, "gaussian", 0.01, difference="central", head="same"),
    "fzoo": EstimatorConfig("fzoo", 16, "signs", 0.01, fitness="std", head="same"),
    "lowrank (EGGROLL)": EstimatorConfig(
        "lowrank", 16, "lowrank", 0.01, difference="central", fitness="normalised", head="same"
    ),
    "agzo": EstimatorConfig("agzo", 10, "subspace", 0.01, difference="central", head="same", rank=4),
}


def adam(rate: float) -> OptimizerConfig:
    return OptimizerConfig("adam", learning_rate=rate, clip_norm=0.0, weight_decay=0.0)


def optimizers(estimator: EstimatorConfig) -> tuple[OptimizerConfig, ...]:
    """Those tried: weight-space estimates are followed by Adam, near-exact ones by clipped SGD."""
    if estimator.head == "same":
        return tuple(adam(rate) for rate in (0.001, 0.003, 0.01, 0.03))
    return tuple(OptimizerConfig(learning_rate=rate) for rate in (2.5, 5.0, 10.0))


def tuned(lab: Lab, estimator: EstimatorConfig, steps: int, expert: ExpertConfig | None = None) -> tuple[float, Found]:
    """(rate chosen on calibration, what it gave)."""
    found = [
        (own.learning_rate, lab.train(lab.spec(expert, estimator, own, TrainConfig(steps=steps))))
        for own in optimizers(estimator)
    ]
    return min(found, key=lambda entry: entry[1].calibration)


class Bench:
    """What the command line says, and a lab for every case."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @property
    def steps(self) -> int:
        return self.options.steps

    def lab(self, seed: int, experts: int | None = None, areas: int | None = None, strategy: str = "hash") -> Lab:
        own = self.options
        return Lab(own.fraction, experts or own.experts, areas or own.areas, strategy, seed, own.path)


def estimators(bench: Bench, table: Table, seed: int) -> None:
    lab = bench.lab(seed)
    budget = bench.steps * multiply_adds(lab.spec(estimator=ZO))
    untrained = lab.train(lab.spec(train=TrainConfig(steps=1)), untrained=True)
    table.add("untrained (counts)", "nothing", held_out=untrained.heldout)
    for name, estimator in ESTIMATORS.items():
        cost = multiply_adds(lab.spec(estimator=estimator))
        steps = max(budget // cost, 1)
        rate, found = tuned(lab, estimator, steps)
        table.add(name, level(estimator, ExpertConfig()), held_out=found.heldout, Mmadd_a_step=cost / 1e6,
                  steps=steps, rate=rate, CPU_s=found.cpu_seconds)  # fmt: skip


def seconds(bench: Bench, table: Table, seed: int) -> None:
    lab = bench.lab(seed)

    def pace(estimator: EstimatorConfig) -> float:
        return lab.pace(lambda steps: lab.spec(estimator=estimator, train=TrainConfig(steps=steps)))

    # alternating, so that a slow spell of the machine hits both
    paces = [(pace(ZO), pace(BACKPROP)) for _ in range(3)]
    faster = sorted(zo / bp for zo, bp in paces)[1]
    _, zo = tuned(lab, ZO, bench.steps)
    _, bp = tuned(lab, BACKPROP, round(bench.steps * faster))
    table.add("activation, 16 one-sided", level(ZO, ExpertConfig()), held_out=zo.heldout, steps=bench.steps,
              CPU_s=zo.cpu_seconds, ratio=zo.heldout / bp.heldout)  # fmt: skip
    table.add("backprop", level(BACKPROP, ExpertConfig()), held_out=bp.heldout, steps=round(bench.steps * faster),
              CPU_s=bp.cpu_seconds, ratio=1.0)  # fmt: skip


def _against_backprop(
    table: Table, case: object, lab: Lab, steps: int, expert: ExpertConfig | None = None, **values: float
) -> None:
    _, zo = tuned(lab, ZO, steps, expert)
    _, bp = tuned(lab, BACKPROP, steps, expert)
    table.add(case, **values, ZO=zo.heldout, backprop=bp.heldout, ratio=zo.heldout / bp.heldout)


def ratio(bench: Bench, table: Table, seed: int) -> None:
    for experts in (8, 40, 160, 640):
        _against_backprop(table, experts * bench.options.areas, bench.lab(seed, experts), bench.steps)


def inputs(bench: Bench, table: Table, seed: int) -> None:
    for experts in (4096, 1024, 256, 64, 16, 4):
        lab = bench.lab(seed, experts, 1)
        _against_backprop(table, experts, lab, bench.steps, inputs_each=lab.corpus.count(TRAIN) / experts)


def width(bench: Bench, table: Table, seed: int) -> None:
    for hidden in (8, 16, 32, 64, 128):
        _against_backprop(table, hidden, bench.lab(seed), bench.steps, ExpertConfig(hidden=hidden))


def integer(bench: Bench, table: Table, seed: int) -> None:
    lab = bench.lab(seed)
    train = TrainConfig(steps=bench.steps)
    untrained = lab.train(lab.spec(train=TrainConfig(steps=1)), untrained=True).heldout
    goal = lab.train(lab.spec(train=train)).heldout
    table.add("untrained (counts)", held_out=untrained, percent_of_the_way=0)
    table.add("float, activation ZO", held_out=goal, percent_of_the_way=100)
    wide = EstimatorConfig(perturbation_size=1.0)
    for weights in ("int8", "ternary"):
        expert = ExpertConfig(family="integer", weights=weights)
        for name, estimator in (("activation ZO", wide), ("straight-through backprop", BACKPROP)):
            found = [
                lab.train(lab.spec(expert, estimator, OptimizerConfig(learning_rate=rate, weight_decay=0.0), train))
                for rate in (0.3, 1.0, 2.5)
            ]
            best = min(found, key=lambda own: own.calibration).heldout
            table.add(
                f"{weights}, {name}", held_out=best, percent_of_the_way=100 * (untrained - best) / (untrained - goal)
            )


def controls(bench: Bench, table: Table, seed: int) -> None:
    lab = bench.lab(seed)

    def row(name: str, own: Lab, untrained: bool = False, expert: ExpertConfig | None = None, steps=None) -> None:
        train = TrainConfig(steps=steps or bench.steps)
        found = own.train(own.spec(expert, train=train), untrained)
        table.add(name, held_out=found.heldout, CPU_s=found.cpu_seconds)

    row("all areas, activation ZO", lab)
    row("untrained (counts)", lab, untrained=True, steps=1)
    row("hidden layer frozen", lab, expert=ExpertConfig(train_body=False))
    row("random routing", bench.lab(seed, strategy="random"))
    row("one area", bench.lab(seed, areas=1))
    row("one expert, all steps", bench.lab(seed, 1, 1), steps=bench.steps * bench.options.experts)
    row("one expert, 16 times as wide", bench.lab(seed, 1, 1), expert=ExpertConfig(hidden=512), steps=20 * bench.steps)


def sharding(bench: Bench, table: Table, seed: int) -> None:
    for experts in (1, 4, 16, 64, 256, 1024, 4096):
        expert = ExpertConfig(hidden=4096 // experts)
        rate, found = tuned(bench.lab(seed, experts, 1), SPSA, bench.steps, expert)
        table.add(experts, level(SPSA, expert), held_out=found.heldout, hidden_each=expert.hidden, rate=rate,
                  CPU_s=found.cpu_seconds)  # fmt: skip


def shares(bench: Bench, table: Table, seed: int) -> None:
    total = bench.steps * bench.options.experts
    for experts in (1, 4, 16, 64, 256, 1024):
        steps = max(total // experts, 1)
        rate, found = tuned(bench.lab(seed, experts, 1), SPSA, steps)
        table.add(experts, level(SPSA, ExpertConfig()), held_out=found.heldout, steps_each=steps, rate=rate,
                  CPU_s=found.cpu_seconds)  # fmt: skip


def routing(bench: Bench, table: Table, seed: int) -> None:
    def train(steps: int) -> TrainConfig:
        return TrainConfig(steps=steps, hold_back=0.1)

    budget, rows = None, {}

    def at_equal_seconds(lab: Lab, spec) -> Found:
        # a whole training, not a short one: looks at what is held back cost the same however many steps there are
        steps = bench.steps
        for _ in range(2):
            steps = max(round(steps * budget / lab.train(spec(steps)).cpu_seconds), 1)
        return lab.train(spec(steps))

    for strategy in ("hash", "kmeans", "random"):
        lab = bench.lab(seed, strategy=strategy)
        rows[f"{strategy}, counts"] = lab.train(lab.spec(train=TrainConfig(steps=1)), untrained=True)
        methods = {
            "activation": (None, ZO),
            "frozen body": (ExpertConfig(train_body=False), ZO),
            "backprop": (None, BACKPROP),
        }
        for name, (expert, estimator) in methods.items():

            def spec(steps: int, lab=lab, expert=expert, estimator=estimator):
                return lab.spec(expert, estimator, train=train(steps))

            if budget is None:
                rows[f"{strategy}, {name}"] = lab.train(spec(bench.steps))
                budget = rows[f"{strategy}, {name}"].cpu_seconds
            else:
                rows[f"{strategy}, {name}"] = at_equal_seconds(lab, spec)
    single = bench.lab(seed, 1, 1)
    for hidden in (128, 512):

        def dense(steps: int, hidden=hidden):
            return single.spec(ExpertConfig(hidden=hidden), BACKPROP, adam(0.003), train(steps))

        rows[f"one dense MLP, {hidden} hidden"] = at_equal_seconds(single, dense)
    for case, found in rows.items():
        gain = found.heldout - rows["hash, activation"].heldout
        table.add(case, held_out=found.heldout, to_hash_activation=gain, CPU_s=found.cpu_seconds)


AGAINST = {"ZO": 4, "backprop": 4, "ratio": 4}
EXPERIMENTS = {
    "estimators": (estimators, "estimator", {"held_out": 4, "Mmadd_a_step": 2, "steps": 0, "rate": 3, "CPU_s": 0}),
    "seconds": (seconds, "estimator", {"held_out": 4, "ratio": 4, "steps": 0, "CPU_s": 1}),
    "ratio": (ratio, "experts in all", AGAINST),
    "inputs": (inputs, "experts in one area", {"inputs_each": 0, **AGAINST}),
    "width": (width, "hidden units, P = 16", AGAINST),
    "integer": (integer, "experts", {"held_out": 4, "percent_of_the_way": 0}),
    "controls": (controls, "case", {"held_out": 4, "CPU_s": 1}),
    "sharding": (sharding, "experts", {"held_out": 4, "hidden_each": 0, "rate": 3, "CPU_s": 0}),
    "shares": (shares, "experts", {"held_out": 4, "steps_each": 0, "rate": 3, "CPU_s": 0}),
    "routing": (routing, "areas, method", {"held_out": 4, "to_hash_activation": 4, "CPU_s": 1}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(EXPERIMENTS))
    parser.add_argument("--fraction", type=float, default=0.125)
    parser.add_argument("--experts", type=int, default=160, help="in each area")
    parser.add_argument("--areas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--split-seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--path", help="texts instead of the standard library")
    parser.add_argument("--figure", help="where to save a figure")
    options = parser.parse_args()
    run, label, decimals = EXPERIMENTS[options.name]
    table = Table(label, decimals)
    head = (
        f"{options.name}: {options.path or 'standard library'}, fraction {options.fraction}, {options.experts} experts "
        f"an area, {options.areas} areas, {options.steps} steps, splits {options.split_seeds}"
    )
    print(f"# {head}\n# {machine()}", flush=True)
    for seed in options.split_seeds:
        run(Bench(options), table, seed)
    print(table)
    if options.figure:
        columns = tuple(column for column in decimals if column in ("ZO", "backprop", "held_out"))
        table.draw(options.figure, columns, f"{options.name}, {len(options.split_seeds)} split(s)")


if __name__ == "__main__":
    main()
