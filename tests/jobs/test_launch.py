"""Launches that go wrong: killed workers and launchers, interruptions, locks, full disks."""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from colonnade.jobs import plan as plans
from colonnade.jobs.engines import local
from colonnade.jobs.markers import finished_markers
from colonnade.jobs.progress import Progress
from colonnade.jobs.slices import Slice
from colonnade.kernels.errors import UserError


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def workers_in(folder: Path) -> list[int]:
    """Worker processes that run in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"colonnade.jobs.worker" in command and Path(f"/proc/{entry.name}/cwd").resolve() == folder:
                found.append(int(entry.name))
    return found


def shards(run: Path) -> dict[str, str]:
    """Digest of every file of the bank."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run / "bank").rglob("*"))
        if path.is_file()
    }


def committed(run: Path) -> dict[str, int]:
    """Finished groups: name of the marker and when it was written."""
    return {
        path.name: path.stat().st_mtime_ns
        for path in (run / "groups").glob("[0-9]*.json")
        if json.loads(path.read_text())["state"] == "done"
    }


@pytest.mark.slow
def test_workers_killed_at_random_moments_change_nothing(undisturbed, long):
    rng = random.Random(0)
    expected = shards(undisturbed.folder / "whole")
    kills = 0
    for attempt in range(10):
        run = undisturbed.folder / f"killed{attempt}"
        process = undisturbed.start("train", *long, f"run={run.name}", "engine.retries=1000")
        while process.poll() is None:
            time.sleep(rng.uniform(0.3, 4.0))
            if victims := workers_in(undisturbed.folder):
                # it may have ended on its own since
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(victims), signal.SIGKILL)
                    kills += 1
        _, err = process.communicate()
        assert process.returncode == 0, err
        assert shards(run) == expected
        assert not list((run / "groups").glob("*.safetensors"))
        if kills >= 12:
            return
    pytest.fail(f"only {kills} kills")


def test_a_killed_launcher_takes_its_workers_along_and_the_run_goes_on(undisturbed, long):
    run = undisturbed.folder / "orphaned"
    process = undisturbed.start("train", *long, "run=orphaned")
    wait_for(lambda: len(committed(run)) >= 2)
    assert workers_in(undisturbed.folder)
    process.kill()
    process.communicate()
    wait_for(lambda: not workers_in(undisturbed.folder))
    kept = committed(run)
    assert 2 <= len(kept) < 6
    result = undisturbed("train", "run=orphaned", "resume=true", "engine.workers=1", "output=json")
    assert result.code == 0, result.err
    assert shards(run) == shards(undisturbed.folder / "whole")
    assert kept.items() <= committed(run).items(), "what is committed is not trained again"
    # the wall time of the launch that was killed is not known
    assert result.json()["train"]["seconds"] is None
    again = undisturbed("evaluate", "run=whole", "output=json").json()["heldout"]
    assert again["bits_per_byte"] == result.json()["heldout"]["bits_per_byte"]


@pytest.mark.parametrize("signals", [1, 2])
def test_an_interruption_keeps_what_is_committed(undisturbed, long, signals):
    name = f"interrupted {signals}"
    run = undisturbed.folder / name
    process = undisturbed.start("train", *long, f"run={name}")
    wait_for(lambda: committed(run))
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert f"colonnade train run='{name}' resume=true" in err.splitlines()[-1]
    wait_for(lambda: not workers_in(undisturbed.folder))
    status = undisturbed("status", f"run={name}", "output=json").json()
    assert status["experts"]["running"] == 0
    assert status["experts"]["done"] + status["experts"]["pending"] == 18
    result = undisturbed("train", f"run={name}", "resume=true")
    assert result.code == 0, result.err
    assert shards(run) == shards(undisturbed.folder / "whole")


def test_status_from_another_shell_while_it_runs(undisturbed, long):
    process = undisturbed.start("train", *long, "run=watched", "train.steps=20000")
    run = undisturbed.folder / "watched"
    try:
        wait_for(lambda: (run / "progress.json").exists())
        wait_for(lambda: json.loads((run / "progress.json").read_text())["experts_done"] > 0)
        status = undisturbed("status", "run=watched", "output=json").json()
        assert status["experts"]["running"] > 0
        assert status["progress"]["experts_total"] == 18
        assert status["progress"]["expert_steps_per_second"] > 0
        assert "running" in {group["state"] for group in status["groups"]}
        second = undisturbed("launch", "run=watched")
        assert second.code == 2
        assert f"in use by process {process.pid}" in second.last
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def test_the_progress_of_a_dead_launcher_is_not_believed(copy):
    progress = copy.folder / "done" / "progress.json"
    (copy.folder / "done" / "groups" / "3.json").unlink()
    progress.write_text(json.dumps({"running": [3], "eta_seconds": 1.0, "expert_steps_per_second": 1.0}))
    assert copy("status", "run=done", "output=json").json()["experts"]["running"] == 4
    os.utime(progress, (time.time() - 100, time.time() - 100))
    status = copy("status", "run=done", "output=json").json()
    assert (status["experts"]["running"], status["experts"]["pending"]) == (0, 4)
    assert status["progress"] is None


def test_an_unfinished_group_is_left_out_until_it_is_trained(copy, trained):
    (copy.folder / "done" / "groups" / "3.json").unlink()
    result = copy("aggregate", "run=done", "output=json")
    assert result.code == 0, result.err
    assert result.json()["unusable_experts"] == 4
    assert "1 of 6 groups are not finished" in result.err
    assert copy("launch", "run=done").code == 0
    assert copy("aggregate", "run=done", "output=json").json()["unusable_experts"] == 0
    heldout = copy("evaluate", "run=done", "output=json").json()["heldout"]
    assert heldout["bits_per_byte"] == trained[1].json()["heldout"]["bits_per_byte"]


@pytest.mark.parametrize("verb", ["launch", "aggregate", "train"])
def test_a_second_launcher_is_told_who_is_there(copy, verb):
    with open(copy.folder / "done" / ".lock", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 4242 on here")
        file.flush()
        result = copy(verb, "run=done", *(["resume=true"] if verb == "train" else []))
    assert result.code == 2
    assert "in use by process 4242 on here" in result.last
    assert "Traceback" not in result.err


@pytest.mark.parametrize("limit", [4096, 250_000])
def test_a_full_disk_is_one_line(cli, small, limit):
    # a limit on the size of files fails a write just as a full disk does; the smaller one fails the partition
    before = sorted(path.name for path in cli.folder.iterdir())

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = cli.start("train", *small, "run=r", "plan.group_size=9", preexec_fn=limited)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith("colonnade: ")
    assert "resume=true" in err.splitlines()[-1]
    assert "Traceback" not in err
    if limit < 100_000:
        assert sorted(path.name for path in cli.folder.iterdir()) == before
        return
    assert not committed(cli.folder / "r")
    result = cli("train", "run=r", "resume=true")
    assert result.code == 0, result.err


def test_a_mistake_found_while_partitioning_leaves_nothing(cli, small):
    result = cli("train", *small, "run=deep/r", "router.areas=[{name: a, strategy: hash}]")
    assert result.code == 2
    assert "needs lags" in result.last
    assert not (cli.folder / "deep" / "r").exists()


def fake_worker(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def launch_with(tmp_path, monkeypatch, body):
    monkeypatch.setattr(sys, "executable", fake_worker(tmp_path, body))
    groups = [plans.Group(g, 0, 2 * g, 2, 10, 2) for g in range(3)]
    engine = local.LocalEngine(tmp_path, tmp_path, None, [Slice((0,)), Slice((0,))], retries=1)
    return engine.launch(groups, Progress(tmp_path, "experts", 6, 10))


def test_workers_that_never_get_ready_end_the_launch(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"with exit code 3 before it was ready.*no numbers today"):
        launch_with(tmp_path, monkeypatch, "echo no numbers today >&2; exit 3")
    with pytest.raises(UserError, match=r"by signal 9 before it was ready.*memory"):
        launch_with(tmp_path, monkeypatch, "kill -9 $$")


def test_a_group_that_kills_its_workers_is_given_up_with_its_log(tmp_path, monkeypatch):
    body = """echo '{"event": "ready"}'
while read -r order; do
  case "$order" in *1}) echo boom >&2; exit 7;; esac
  g=$(echo "$order" | tr -dc 0-9)
  echo '{"event": "done", "group": '$g', "failed": 0, "peak_anonymous_mb": 5.0, "peak_resident_mb": 9.5}'
done"""
    result = launch_with(tmp_path, monkeypatch, body)
    assert list(result.failed_groups) == [1]
    assert "died 2 times, last with exit code 7: boom" in result.failed_groups[1]
    assert (result.experts, result.peak_anonymous_mb, result.peak_resident_mb) == (4, 5.0, 9.5)


def test_a_mistake_that_a_worker_meets_is_the_users(tmp_path, monkeypatch):
    body = """echo '{"event": "ready"}'; read -r order
echo '{"event": "error", "group": 0, "user": true, "message": "no room"}'; sleep 60"""
    with pytest.raises(UserError, match="group 0: no room; mend it"):
        launch_with(tmp_path, monkeypatch, body)


def test_markers_of_another_plan_are_refused(tmp_path, trained):
    run = trained[0] / "done"
    plan = plans.load(run)
    assert sorted(finished_markers(run, plan)) == list(range(6))
    shifted = plans.Plan(3, tuple(plans.Group(**{**vars(group), "num_experts": 3}) for group in plan.groups))
    with pytest.raises(UserError, match="of another plan"):
        finished_markers(run, shifted)
