"""Many small experts against one larger model, both told one number a batch: weight-space SPSA, 10 pairs.

    python -P benchmarks/claim.py [--fraction .0625] [--experts 640] [--steps 1000] [--split-seeds 0 1 2]

One area of experts (contexts of two bytes), and a monolith that gets the number of the expert the router would ask as
a learned embedding, and that expert's count biases at its outputs: it knows what the router knows. Both spend the same
multiply-adds; learning rates are tuned on calibration. |L+ - L-| is the mean over pairs, in nats, at the first and the
last tenth of the steps.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from colonnade.experts.config import ExpertConfig, TrainConfig, level
from colonnade.experts.costs import multiply_adds
from colonnade.router.sources import CALIBRATION, HELDOUT, TRAIN

sys.path.insert(0, str(Path(__file__).parent))
from experiments import BACKPROP, SPSA, adam
from lab import Lab
from table import Table, machine

RATES = (0.001, 0.003, 0.01, 0.03)
STRENGTH = 2.0


@dataclass(frozen=True)
class Side:
    """What the monolith sees of a split: features, the router's answer, targets."""

    x: torch.Tensor
    expert: torch.Tensor
    y: torch.Tensor


class Monolith:
    """x and an embedding of the expert's number -> H rectified units -> 256 logits on top of the expert's counts."""

    def __init__(self, lab: Lab, experts: int, hidden: int, dim: int = 16) -> None:
        corpus, features = lab.corpus, lab.relay.num_features
        positions = {split: corpus.positions(split) for split in (TRAIN, CALIBRATION, HELDOUT)}
        self.text = torch.from_numpy(np.asarray(corpus.data))
        self.table = torch.from_numpy(np.asarray(lab.inputs.embedding, np.float32))
        self.context = lab.inputs.context
        self.positions = {split: torch.from_numpy(own.astype(np.int64)) for split, own in positions.items()}
        self.owners = {
            split: torch.from_numpy(lab.router.areas[0].assign(corpus.data, own).astype(np.int64))
            for split, own in positions.items()
        }
        counts = np.zeros((experts, 256))
        np.add.at(counts, (self.owners[TRAIN].numpy(), corpus.data[positions[TRAIN]]), 1)
        counts += STRENGTH * lab.frequencies
        self.prior = torch.from_numpy(np.log(counts / counts.sum(1, keepdims=True)).astype(np.float32))
        self.sizes = [(features + dim, hidden), (1, hidden), (hidden, 256), (1, 256), (experts, dim)]
        self.cost = hidden * (features + dim + 256)

    def side(self, split: int, places: torch.Tensor) -> Side:
        at = self.positions[split][places]
        before = self.text[at[:, None] - 1 - torch.arange(self.context)].long()
        return Side(self.table[before].reshape(len(at), -1), self.owners[split][places], self.text[at].long())

    def initial(self) -> torch.Tensor:
        rng = torch.Generator().manual_seed(0)
        parts = []
        for place, (rows, columns) in enumerate(self.sizes):
            scale = {0: (2 / rows) ** 0.5, 4: 1.0}.get(place, 0.0)
            parts.append(scale * torch.randn(rows * columns, generator=rng))
        return torch.cat(parts)

    def losses(self, weights: torch.Tensor, side: Side) -> torch.Tensor:
        """[K, B] of weights [K, T]."""
        parts, first = [], 0
        for rows, columns in self.sizes:
            parts.append(weights[:, first : first + rows * columns].reshape(-1, rows, columns))
            first += rows * columns
        w1, b1, w2, b2, table = parts
        x = torch.cat([side.x.expand(len(weights), -1, -1), table[:, side.expert]], 2)
        logits = torch.relu(x @ w1 + b1) @ w2 + b2 + self.prior[side.expert]
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, 256), side.y.repeat(len(weights)), reduction="none"
        ).reshape(len(weights), -1)

    def bits(self, weights: torch.Tensor, split: int) -> float:
        total, count = 0.0, len(self.positions[split])
        for places in torch.arange(count).split(4096):
            total += float(self.losses(weights[None], self.side(split, places)).double().sum())
        return total / count / np.log(2)

    def train(self, zeroth_order: bool, rate: float, steps: int, batch: int, pairs: int = 10, reach: float = 0.01):
        """(weights, mean |L+ - L-| at the start and at the end, where there are pairs)."""
        weights, rng = self.initial().requires_grad_(not zeroth_order), torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam([weights], rate, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
        differences = []
        for _ in range(steps):
            places = torch.randint(len(self.positions[TRAIN]), (batch,), generator=rng)
            side = self.side(TRAIN, places)
            if zeroth_order:
                z = torch.randint(0, 2, (pairs, len(weights)), generator=rng, dtype=torch.int8).float() * 2 - 1
                ends = self.losses(torch.cat([weights + reach * z, weights - reach * z]), side).mean(1)
                slopes = (ends[:pairs] - ends[pairs:]) / (2 * reach)
                differences.append(float((ends[:pairs] - ends[pairs:]).abs().mean()))
                weights.grad = slopes @ z / pairs
            else:
                optimizer.zero_grad()
                self.losses(weights[None], side).mean().backward()
            optimizer.step()
            schedule.step()
        tenth = max(steps // 10, 1)
        ends = (np.mean(differences[:tenth]), np.mean(differences[-tenth:])) if differences else (None, None)
        return weights.detach(), *ends


def compare(table: Table, options: argparse.Namespace, seed: int) -> None:
    lab = Lab(options.fraction, options.experts, 1, split_seed=seed, lags=(1, 2))
    untrained = lab.train(lab.spec(train=TrainConfig(steps=1)), untrained=True)
    table.add("untrained (counts)", "nothing", held_out=untrained.heldout)
    frozen = lab.train(lab.spec(ExpertConfig(train_body=False), train=TrainConfig(steps=300)))
    table.add("experts, hidden layer frozen", "one number an output decision", held_out=frozen.heldout)

    def spsa(rate: float, steps: int = options.steps):
        return lab.spec(None, SPSA, adam(rate), TrainConfig(steps=steps, diagnose_every=max(steps // 10, 1),
                                                            diagnose_stride=max(options.experts // 8, 1)))  # fmt: skip

    rate, found = min(((rate, lab.train(spsa(rate))) for rate in RATES), key=lambda own: own[1].calibration)
    steps = sorted({row["step"] for row in found.diagnostics})
    first, last = (
        float(np.mean([row["difference"] for row in found.diagnostics if row["step"] == step]))
        for step in (steps[0], steps[-1])
    )
    table.add("experts, SPSA", level(SPSA, ExpertConfig()), held_out=found.heldout, difference_first=first,
              difference_last=last, rate=rate)  # fmt: skip
    monolith = Monolith(lab, options.experts, options.hidden)
    budget = options.experts * options.steps * multiply_adds(spsa(RATES[0]))
    for name, estimator in (("SPSA", SPSA), ("backprop", BACKPROP)):
        forwards = 2 * estimator.num_perturbations if estimator is SPSA else 3
        steps = max(budget // (forwards * options.batch * monolith.cost), 1)
        # backprop has learnt what it can long before
        steps = min(steps, options.most_steps)
        trained = [(rate, *monolith.train(estimator is SPSA, rate, steps, options.batch)) for rate in RATES]
        best = min(trained, key=lambda own: monolith.bits(own[1], CALIBRATION))
        values = {"difference_first": best[2], "difference_last": best[3]} if estimator is SPSA else {}
        table.add(f"monolith of {sum(r * c for r, c in monolith.sizes):,}, {name}", level(estimator, ExpertConfig()),
                  held_out=monolith.bits(best[1], HELDOUT), rate=best[0], steps=steps, **values)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=0.0625)
    parser.add_argument("--experts", type=int, default=640)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=512, help="units of the monolith")
    parser.add_argument("--batch", type=int, default=256, help="of the monolith")
    parser.add_argument("--most-steps", type=int, default=20000, help="of the monolith")
    parser.add_argument("--split-seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    print(f"# claim: fraction {options.fraction}, {options.experts} experts, {options.steps} steps; {machine()}")
    table = Table("model", {"held_out": 4, "difference_first": 4, "difference_last": 4, "rate": 3, "steps": 0})
    for seed in options.split_seeds:
        compare(table, options, seed)
    print(table)


if __name__ == "__main__":
    main()
