"""How far a launch is: a line for people on stderr, a small file for `status` in another shell."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..kernels.files import write_json_atomic

_EVERY_SECONDS = 1.0
PROGRESS = "progress.json"
# a progress file that has not been written for so long is a dead launcher's
STALE_SECONDS = 30.0


@dataclass
class Progress:
    """Counts of a launch that is under way.

    Attributes:
        directory: training directory; progress.json goes there.
        label: what is trained.
        total: experts that hold inputs, in the groups of this launch.
        steps: of each.
        done: experts of finished groups.
        failed: experts that failed.
        running: experts done so far in each group under way.
    """

    directory: Path
    label: str
    total: int
    steps: int
    done: int = 0
    failed: int = 0
    running: dict[int, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _shown: float = 0.0

    def update(self) -> None:
        """Show and store, at most once a second."""
        now = time.monotonic()
        if now - self._shown < _EVERY_SECONDS:
            return
        self._shown = now
        seconds = now - self.began
        experts = self.done + sum(self.running.values())
        rate = experts * self.steps / seconds if seconds > 0 else 0.0
        eta = (self.total - experts) * self.steps / rate if rate else None
        stored = {
            "running": sorted(self.running),
            "experts_done": experts,
            "experts_total": self.total,
            "expert_steps_per_second": rate,
            "eta_seconds": eta,
            "failed": self.failed,
        }
        write_json_atomic(self.directory / PROGRESS, stored)
        if sys.stderr.isatty():
            ahead = "" if eta is None else f"  {_clock(eta)} left"
            failed = f"  {self.failed} failed" if self.failed else ""
            line = f"{self.label}: {experts:,}/{self.total:,} experts  {rate:,.0f} expert-steps/s{ahead}{failed}"
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def close(self) -> None:
        """End the line; what is running is no longer."""
        self.running.clear()
        (self.directory / PROGRESS).unlink(missing_ok=True)
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        seconds = time.monotonic() - self.began
        failed = f", {self.failed} failed" if self.failed else ""
        print(f"{self.label}: {self.done:,} experts trained in {seconds:.1f} s{failed}", file=sys.stderr)


def say(message: str) -> None:
    """A line of news on stderr."""
    print(message, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes}:{rest:02d}"
