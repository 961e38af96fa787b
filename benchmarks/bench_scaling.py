"""Cost of an expert-step with 1,024 and with 10,240 experts, runs alternating.

    python -P benchmarks/bench_scaling.py [--repeats 2] [--steps 100] [--directory DIR]

Each run is `colonnade train` with the tenk preset's areas; the cost is the workers' own seconds in the loop divided
by the expert-steps they did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile


def cost(experts: int, steps: int, directory: str, repeat: int) -> float:
    command = [
        sys.executable, "-P", "-m", "colonnade.jobs.cli", "train", f"router.experts={experts}", f"train.steps={steps}",
        "controls=[]", "baselines=false", "tracking=none", "output=json", f"run={directory}/{experts}-{repeat}",
    ]  # fmt: skip
    summary = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return summary["train"]["cpu_seconds"] / summary["train"]["expert_steps"] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    costs: dict[int, list[float]] = {1_024: [], 10_240: []}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for repeat in range(options.repeats):
            for experts in costs:
                costs[experts].append(cost(experts, options.steps, directory, repeat))
    few, many = (statistics.median(values) for values in costs.values())
    for experts, values in costs.items():
        shown = ", ".join(f"{value:.1f}" for value in values)
        print(f"{experts:>7,} experts: {statistics.median(values):.1f} us an expert-step ({shown})")
    print(f"ratio {many / few:.3f}")


if __name__ == "__main__":
    main()
