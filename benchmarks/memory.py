"""Peak memory of a whole run: anonymous memory of the launcher and its workers together, sampled ten times a second.

    python -P benchmarks/memory.py [overrides of colonnade train]

Anonymous memory is RssAnon of /proc/PID/status; mapped files are not counted. Linux only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path


def anonymous_mb(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0.0


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable, "-P", "-m", "colonnade.jobs.cli", "train", f"run={directory}/run", "tracking=none",
            *sys.argv[1:],
        ]  # fmt: skip
        process = subprocess.Popen(command)
        launcher = together = 0.0
        while process.poll() is None:
            own = anonymous_mb(process.pid)
            launcher = max(launcher, own)
            together = max(together, own + sum(anonymous_mb(child) for child in children(process.pid)))
            time.sleep(0.1)
    print(f"peak anonymous memory: launcher {launcher:,.0f} MB, launcher and workers together {together:,.0f} MB")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
