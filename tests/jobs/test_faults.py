"""Killed workers, killed launchers, interruptions, a second launcher, a full disk: nothing lost, nothing half-read."""

import contextlib
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
from colonnade.experts.bank import Bank, damaged_files, read_marker

GROUPS = 12


def children(pid):
    """Process ids of a launcher's workers."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in found.split()]


def committed(run):
    """Groups with a marker; every marker's files must be whole at any moment."""
    found = []
    for group in range(GROUPS):
        marker = read_marker(run, group)
        if marker is not None and marker["state"] == "done":
            assert damaged_files(run, marker) == []
            found.append(group)
    return found


def weights(run):
    bank = Bank(run)
    return [bank.read_group(group, read_marker(run, group)["num_experts"]) for group in range(GROUPS)]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        for role, values in one.items():
            np.testing.assert_array_equal(values, other[role])


@pytest.fixture(scope="module")
def peace(tmp_path_factory, command_line, small):
    """(command line, overrides, weights) of a run of twelve groups trained undisturbed."""
    cli = command_line(tmp_path_factory.mktemp("faults"))
    long = [*small, "router.experts_per_area=24", "train.steps=900"]
    result = cli("train", *long, "run=peace")
    assert result.code == 0, result.err
    return cli, long, weights(cli.folder / "peace")


def test_twenty_kills_at_random_moments(peace):
    cli, long, expected = peace
    run = cli.folder / "killed"
    rng = random.Random()
    kills, launches = 0, 0
    process = cli.start("train", *long, "run=killed", "engine.retries=100")
    while kills < 20:
        time.sleep(rng.uniform(0.02, 0.6))
        if process.poll() is not None:
            # all groups are trained: take some back, as a damaged disk would, and go on
            for group in committed(run)[::2]:
                (run / "groups" / f"{group}.json").unlink()
            process = cli.start("train", "run=killed", "resume=true", "engine.retries=100")
            launches += 1
            continue
        workers = children(process.pid)
        # one in four kills hits the launcher, the others a worker
        if kills % 4 == 3 and workers:
            process.kill()
            process.wait()
            time.sleep(0.3)
            assert not [pid for pid in workers if _alive(pid)], "workers go with their launcher"
            committed(run)
            process = cli.start("train", "run=killed", "resume=true", "engine.retries=100")
            launches += 1
            kills += 1
        elif workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
                kills += 1
            committed(run)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert committed(run) == list(range(GROUPS))
    assert_same(weights(run), expected)
    assert launches >= 5
    assert not list(run.rglob("*.tmp"))


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("every", [0, 100])
def test_interrupted_once_then_resumed(peace, every):
    cli, long, expected = peace
    name = f"interrupted{every}"
    process = cli.start("train", *long, f"run={name}", f"train.checkpoint_every={every}")
    run = cli.folder / name
    while not list(run.glob("groups/*.json")):
        assert process.poll() is None
        time.sleep(0.05)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "resume=true" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not [pid for pid in workers if _alive(pid)]
    kept = committed(run)
    assert len(kept) < GROUPS
    times = {group: (run / "groups" / f"{group}.json").stat().st_mtime_ns for group in kept}
    resumed = cli("train", f"run={name}", "resume=true", "engine.workers=1")
    assert resumed.code == 0, resumed.err
    assert_same(weights(run), expected)
    for group, before in times.items():
        assert (run / "groups" / f"{group}.json").stat().st_mtime_ns == before, "what was committed is not done again"


def test_a_full_disk_ends_in_one_line_and_resumes(peace, tmp_path_factory):
    cli, long, expected = peace
    # a small disk of its own, as far as the rights here go
    disk = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        result = cli("train", *long, f"run={disk}/run")
        assert result.code == 2
        assert "No space left" in result.last or "disk is full" in result.last
        assert "resume=true" in result.last
        assert "Traceback" not in result.err
        kept = committed(disk / "run") if (disk / "run" / "groups").exists() else []
        assert len(kept) < GROUPS
        assert not list((disk / "run").rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        resumed = cli("train", f"run={disk}/run", "resume=true")
        assert resumed.code == 0, resumed.err
        assert_same(weights(disk / "run"), expected)
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_the_order_and_number_of_workers_change_nothing(peace):
    cli, long, expected = peace
    for workers, size in ((1, 4), (3, 4)):
        name = f"workers{workers}"
        result = cli("train", *long, f"run={name}", f"engine.workers={workers}", f"plan.group_size={size}")
        assert result.code == 0, result.err
        assert_same(weights(cli.folder / name), expected)


def test_the_size_of_groups_changes_nothing(peace):
    cli, long, expected = peace
    result = cli("train", *long, "run=large", "plan.group_size=24")
    assert result.code == 0, result.err
    bank = Bank(cli.folder / "large")
    for area in range(2):
        together = bank.read_group(area, 24)
        for place in range(6):
            for role, values in expected[6 * area + place].items():
                np.testing.assert_array_equal(together[role][4 * place : 4 * place + 4], values)
