"""Learning rates of activation ZO and of backprop tuned on calibration: the comparison is fair only then.

    python -P benchmarks/learning_rates.py [--rates 1.25 2.5 5] [--experts-per-area 160] [--fraction 0.125]

Trains the tenk areas at a fraction of the text and of the experts (the same inputs an expert) with each estimator at
each rate, and prints calibration and held-out bits/byte. The rate chosen on calibration is marked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from colonnade.ensemble import evaluation, mixing
from colonnade.ensemble.model import load
from colonnade.router.sources import CALIBRATION, HELDOUT, load_corpus


def bits(estimator: str, rate: float, options: argparse.Namespace, directory: str) -> tuple[float, float]:
    run = Path(directory) / f"{estimator}-{rate}"
    command = [
        sys.executable, "-P", "-m", "colonnade.jobs.cli", "train", f"estimator={estimator}", f"run={run}",
        f"optimizer.learning_rate={rate}", f"router.experts_per_area={options.experts_per_area}", "controls=[]",
        f"source.fraction={options.fraction}", "baselines=false", "tracking=none", "output=json",
        f"source.split_seed={options.split_seed}",
    ]  # fmt: skip
    summary = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    model = load(run)
    found = evaluation.gather(model, load_corpus(run / "source"), (CALIBRATION, HELDOUT), untrained=False)[CALIBRATION]
    nats = mixing.losses(model.mixing, found.trained, found.targets).mean()
    return float(nats) / 0.6931471805599453, summary["heldout"]["bits_per_byte"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", type=float, nargs="+", default=[1.25, 2.5, 5.0])
    parser.add_argument("--experts-per-area", type=int, default=160)
    parser.add_argument("--fraction", type=float, default=0.125)
    parser.add_argument("--split-seed", type=int, default=0)
    options = parser.parse_args()
    best = {}
    print(f"{'estimator':<12}{'rate':>6}{'calibration':>13}{'held out':>10}")
    with tempfile.TemporaryDirectory() as directory:
        for estimator in ("activation", "backprop"):
            rows = [(*bits(estimator, rate, options, directory), rate) for rate in options.rates]
            best[estimator] = min(rows)
            for row in rows:
                mark = "  <- chosen on calibration" if row == best[estimator] else ""
                print(f"{estimator:<12}{row[2]:>6g}{row[0]:>13.4f}{row[1]:>10.4f}{mark}")
    print(f"held-out ratio ZO / backprop {best['activation'][1] / best['backprop'][1]:.4f}")


if __name__ == "__main__":
    main()
