"""A worker: trains the groups that the launcher names on its stdin, and says on its stdout how it goes.

Lines are JSON. In: {"group": 7}. Out: {"event": "ready"}, {"event": "progress", "group": 7, "experts": 3},
{"event": "done", "group": 7, ...} or {"event": "error", "group": 7, "user": true, "message": "..."}.
A worker opens no socket, no tracking store and no process group, and ends when its launcher does.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from ..kernels.errors import UserError
from .slices import pin

_REPORT_SECONDS = 0.5
_launcher = sys.stdout


def memory_mb() -> tuple[float, float]:
    """(anonymous memory now, peak of resident memory) of this process in MB; zeros where the system does not say."""
    anonymous = peak = 0.0
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    anonymous = int(line.split()[1]) / 1024
                elif line.startswith("VmHWM:"):
                    peak = int(line.split()[1]) / 1024
    except FileNotFoundError:
        pass
    return anonymous, peak


def _say(event: str, **facts: object) -> None:
    _launcher.write(json.dumps({"event": event, **facts}) + "\n")
    _launcher.flush()


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="colonnade-worker")
    parser.add_argument("run", type=Path)
    parser.add_argument("--control", default=None)
    parser.add_argument("--cores", default="")
    parser.add_argument("--code", action="append", default=[])
    options = parser.parse_args()
    # what a library prints goes to the log, not between the lines for the launcher
    global _launcher
    _launcher = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # the launcher decides what an interruption means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.cores:
        pin(tuple(int(core) for core in options.cores.split(",")))
    orders: queue.Queue[int] = queue.Queue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()

    from ..experts.commit import train_and_commit
    from ..experts.training import warm_up
    from . import code, rundir
    from .training import load

    code.allow(options.code)
    facts = rundir.load_facts(options.run)
    training = load(options.run, rundir.stored_config(facts), options.control)
    bank = training.create_bank()
    warm_up(training.spec, training.inputs)
    _say("ready")
    peak_anonymous = 0.0
    while True:
        number = orders.get()
        group = training.plan.groups[number]
        began = time.perf_counter()
        spoken = began

        def report(experts: int, number: int = number) -> None:
            nonlocal spoken, peak_anonymous
            peak_anonymous = max(peak_anonymous, memory_mb()[0])
            if time.perf_counter() - spoken > _REPORT_SECONDS:
                spoken = time.perf_counter()
                _say("progress", group=number, experts=experts)

        try:
            indices, offsets, ids = training.group_inputs(group)
            marker = train_and_commit(
                training.directory,
                bank,
                number,
                group.area,
                training.specs[group.area],
                training.inputs,
                indices,
                offsets,
                ids,
                training.checkpoint_every,
                report,
            )
        except Exception as error:
            traceback.print_exc()
            mistake = isinstance(error, UserError | OSError)
            _say("error", group=number, user=mistake, message=" ".join(str(error).split()))
            continue
        peak_anonymous = max(peak_anonymous, memory_mb()[0])
        _say(
            "done",
            group=number,
            failed=len(marker["failed"]),
            seconds=time.perf_counter() - began,
            peak_anonymous_mb=peak_anonymous,
            peak_resident_mb=memory_mb()[1],
        )


def _listen(orders: queue.Queue[int]) -> None:
    for line in sys.stdin:
        orders.put(int(json.loads(line)["group"]))
    # the launcher is gone: so are we, even in the middle of a loop
    os._exit(0)


if __name__ == "__main__":
    main()
