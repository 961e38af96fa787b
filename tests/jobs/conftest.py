"""The command line as a person uses it: a subprocess in a folder of its own."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SMALL = [
    "preset=smoke",
    "router.areas=2",
    "router.experts_per_area=9",
    "plan.group_size=4",
    "train.steps=20",
    "controls=[]",
    "baselines=false",
    "tracking=none",
    "source=text",
    "source.fraction=1",
    "source.path=corpus",
]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def last(self):
        """The last line on stderr: what a person reads."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def json(self):
        return json.loads(self.out)


def _hear_interrupts() -> None:
    """A test run that a shell put in the background ignores SIGINT, and its children would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class CommandLine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *arguments: str, **options):
        command = [sys.executable, "-P", "-m", "colonnade.jobs.cli", *arguments]
        options.setdefault("preexec_fn", _hear_interrupts)
        return subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )

    def __call__(self, *arguments: str, timeout: float = 180) -> Result:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout)
        return Result(process.returncode, out, err)

    def train(self, *arguments: str) -> Result:
        return self("train", *SMALL, *arguments)


def write_corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    words = ["alpha", "beta", "gamma", "delta", "(x, y)", "return", "\n", "if not", "self.", "0.5"]
    for number in range(60):
        # nearly the same text in every file would be one cluster of near copies
        chosen = random.Random(number).choices(words, k=150 + number)
        text = " ".join(chosen)
        (folder / "corpus" / f"{number:02d}.txt").write_text(text)


@pytest.fixture
def cli(tmp_path):
    write_corpus(tmp_path)
    return CommandLine(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A small finished run; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    result = CommandLine(folder).train("run=done", "output=json", "engine.workers=2")
    assert result.code == 0, result.err
    return folder, result


@pytest.fixture
def copy(trained, tmp_path):
    """A command line in a folder with its own copy of the finished run `done`."""
    import shutil

    shutil.copytree(trained[0] / "done", tmp_path / "done")
    os.symlink(trained[0] / "corpus", tmp_path / "corpus")
    return CommandLine(tmp_path)


@pytest.fixture(scope="session")
def small():
    """Overrides of a run of seconds."""
    return SMALL


@pytest.fixture(scope="session")
def command_line():
    """Makes a command line in a folder, with a corpus in it."""

    def make(folder):
        write_corpus(folder)
        return CommandLine(folder)

    return make


# long enough to be hit in the middle, short enough to wait for
LONG = ["train.steps=4000", "train.checkpoint_every=700", "engine.workers=2"]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A command line in a folder with the longer run `whole`, which nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder)
    cli = CommandLine(folder)
    result = cli.train(*LONG, "run=whole")
    assert result.code == 0, result.err
    return cli


@pytest.fixture
def long():
    """Overrides of a run of a few seconds."""
    return [*SMALL, *LONG]
