"""The SOMA recipe, scaled down: N experts against one at equal evaluations, over seeds, and its two controls.

    python -P benchmarks/soma.py [--experts 1 2] [--seeds 0 1 2] [--controls] [OVERRIDE ...]

Every run is `colonnade train preset=soma router.experts=N seed=S`: train.total_steps is shared out over the experts.
With --controls also N = 2 with expert.loss_coupling=summed, and N = 1 with estimator=lowrank (EGGROLL). Prints
held-out bits/byte of the bytes after the prefix.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def train(run: Path, *overrides: str) -> dict:
    """The summary of one run; UserError's line ends the benchmark."""
    command = [sys.executable, "-P", "-m", "colonnade.jobs.cli", "train", "preset=soma", f"run={run}",
               "tracking=none", "output=json", *overrides]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls", action="store_true")
    options, overrides = parser.parse_known_args()
    cases = {f"N = {n}": [f"router.experts={n}"] for n in options.experts}
    if options.controls:
        cases["N = 2, summed losses"] = ["router.experts=2", "expert.loss_coupling=summed", "plan.group_size=2"]
        cases["N = 1, low rank (EGGROLL)"] = [
            "router.experts=1", "estimator=lowrank", "estimator.num_perturbations=8",
            "estimator.perturbation_size=0.003",
        ]  # fmt: skip
    print(f"{'case':<28}{'seed':>5}{'bits/byte':>11}{'seed alone':>12}{'evaluations':>13}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as directory:
        for name, own in cases.items():
            for seed in options.seeds:
                run = Path(directory) / f"{len(list(Path(directory).iterdir()))}"
                found = train(run, f"seed={seed}", *own, *overrides)
                held, spent = found["heldout"], found["train"]
                evaluations = spent["expert_steps"] * found["estimator"]["evaluations_per_step"]
                print(f"{name:<28}{seed:>5}{held['bits_per_byte']:>11.4f}{held['seed']:>12.4f}{evaluations:>13,}"
                      f"{found['seconds_total']:>9.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
