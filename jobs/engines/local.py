"""The local engine: a bounded pool of worker processes on this machine, each pinned to its slice.

A worker that dies is replaced and its group tried again, up to `retries` times. Ctrl-C ends the workers and keeps
what is committed; a second one kills them at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...kernels.errors import UserError
from .. import code
from ..plan import Group
from ..progress import Progress
from ..slices import ONE_THREAD, Slice

_GRACE_SECONDS = 3.0
_TICK_SECONDS = 0.5
_LOG_TAIL_BYTES = 600


@dataclass
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    group: Group | None = None
    buffer: bytes = b""
    ready: bool = False


@dataclass(frozen=True)
class LaunchResult:
    """What a launch gives besides the committed groups.

    Attributes:
        experts: trained by it.
        failed_groups: group number -> why, for groups given up.
        peak_anonymous_mb: highest anonymous memory of a worker.
        peak_resident_mb: highest resident memory of a worker, mapped files included.
    """

    experts: int
    failed_groups: dict[int, str]
    peak_anonymous_mb: float
    peak_resident_mb: float


@dataclass
class LocalEngine:
    """Runs groups on workers.

    Attributes:
        run: run directory.
        directory: training directory: logs go to logs/ in it.
        control: None, or the control that is trained.
        slices: one worker each.
        retries: of a group whose worker died.
    """

    run: Path
    directory: Path
    control: str | None
    slices: list[Slice]
    retries: int
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _false_starts: int = 0

    def launch(self, groups: list[Group], progress: Progress) -> LaunchResult:
        """Train the groups; returns when all are committed or given up.

        Raises:
            UserError: a worker met a mistake that no other worker would escape (a full disk, a damaged file), or no
                worker can be started at all.
        """
        pending = deque(sorted(groups, key=lambda group: -group.busy_experts))
        tries: dict[int, int] = {}
        failed: dict[int, str] = {}
        peaks = [0.0, 0.0]
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        try:
            for number in range(min(len(self.slices), len(pending))):
                self._start(number, pending, progress)
            while any(worker.group for worker in self._workers.values()) or pending:
                for key, _ in self._selector.select(_TICK_SECONDS):
                    worker: _Worker = key.data
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        self._bury(worker, pending, tries, failed, progress)
                        continue
                    *lines, worker.buffer = (worker.buffer + chunk).split(b"\n")
                    for line in lines:
                        self._hear(worker, json.loads(line), pending, progress, peaks)
                progress.update()
        finally:
            self._stop()
        return LaunchResult(progress.done, failed, *peaks)

    def _start(self, number: int, pending: deque[Group], progress: Progress) -> None:
        environment = {**os.environ, **ONE_THREAD, "PYTHONUNBUFFERED": "1"}
        cores = ",".join(str(core) for core in self.slices[number].cores)
        command = [sys.executable, "-P", "-m", "colonnade.jobs.worker", str(self.run), "--cores", cores]
        if self.control:
            command += ["--control", self.control]
        for name in code.allowed():
            command += ["--code", name]
        log = open(self.directory / "logs" / f"worker-{number}.log", "ab")  # noqa: SIM115 - lives with the worker
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            # a Ctrl-C at the terminal is for the launcher, which then ends its workers
            start_new_session=True,
        )
        worker = _Worker(number, process, log)
        self._workers[number] = worker
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self._assign(worker, pending, progress)

    def _assign(self, worker: _Worker, pending: deque[Group], progress: Progress) -> None:
        worker.group = pending.popleft() if pending else None
        if worker.group is not None:
            progress.running[worker.group.group] = 0
            assert worker.process.stdin is not None
            # a worker that has just died is noticed by its closed stdout
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.write(json.dumps({"group": worker.group.group}).encode() + b"\n")
                worker.process.stdin.flush()

    def _hear(
        self, worker: _Worker, news: dict[str, Any], pending: deque[Group], progress: Progress, peaks: list[float]
    ) -> None:
        group = worker.group
        if news["event"] == "ready":
            worker.ready = True
            self._false_starts = 0
        elif news["event"] == "progress":
            assert group is not None
            # cold experts go by at once and are no work
            progress.running[news["group"]] = min(news["experts"], group.busy_experts)
        elif news["event"] == "done":
            assert group is not None
            progress.running.pop(news["group"], None)
            progress.done += group.busy_experts
            progress.failed += news["failed"]
            peaks[0] = max(peaks[0], news["peak_anonymous_mb"])
            peaks[1] = max(peaks[1], news["peak_resident_mb"])
            self._assign(worker, pending, progress)
        elif news["event"] == "error":
            if news["user"]:
                raise UserError(f"group {news['group']}: {news['message']}; mend it, then go on with resume=true")
            raise RuntimeError(
                f"worker {worker.number}, group {news['group']}: {news['message']} (see {worker.log.name})"
            )

    def _bury(
        self,
        worker: _Worker,
        pending: deque[Group],
        tries: dict[int, int],
        failed: dict[int, str],
        progress: Progress,
    ) -> None:
        assert worker.process.stdout is not None
        self._selector.unregister(worker.process.stdout)
        code = worker.process.wait()
        group = worker.group
        log = Path(worker.log.name)
        self._close(worker)
        del self._workers[worker.number]
        if not worker.ready:
            self._false_starts += 1
            if self._false_starts > self.retries:
                message = f"a worker ended {_ending(code)} before it was ready, {self._false_starts} times running"
                if code < 0:
                    raise UserError(f"{message}; is there enough memory? see {log}, then go on with resume=true")
                raise RuntimeError(f"{message}: {_tail(log)} (see {log})")
        if group is not None:
            progress.running.pop(group.group, None)
            count = tries[group.group] = tries.get(group.group, 0) + 1
            if count > self.retries:
                failed[group.group] = f"its worker died {count} times, last {_ending(code)}: {_tail(log)}"
            else:
                pending.append(group)
        if pending:
            self._start(worker.number, pending, progress)

    def _close(self, worker: _Worker) -> None:
        for pipe in (worker.process.stdin, worker.process.stdout, worker.log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _stop(self) -> None:
        """End all workers: those at rest by closing their stdin, which is all it takes; the others by a signal."""
        try:
            for worker in self._workers.values():
                if worker.group is not None:
                    worker.process.send_signal(signal.SIGTERM)
                self._close(worker)
            deadline = time.monotonic() + _GRACE_SECONDS
            for worker in self._workers.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self._workers.values():
                if worker.process.poll() is None:
                    worker.process.kill()
                    worker.process.wait()
            self._workers.clear()
            self._selector.close()


def _ending(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _tail(path: Path) -> str:
    try:
        content = path.read_bytes()[-_LOG_TAIL_BYTES:]
    except OSError:
        return "no log"
    return " ".join(content.decode(errors="replace").split()) or "empty log"
