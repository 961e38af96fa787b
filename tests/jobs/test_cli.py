"""Exit codes, stdout and one-line errors, through real processes."""

import json

import numpy as np
import pytest

WRONG = [
    (["trian"], "known: train, partition"),
    (["train", "preset=foo"], "known: claim, digits, memory, regression, smoke, soma"),
    (["train", "train.stepz=3"], "did you mean train.steps?"),
    (["train", "--frobnicate"], "no such flag"),
    (["train", "train.steps=[1,"], "not understood"),
    (["train", "output=xml"], "known: table, json"),
    (["train", "source=text", "source.path=nothing here.txt"], "source.path=nothing here.txt: no such file"),
    (["train", "source=text", "source.path=*.xyz"], "no file matches"),
    (["train", "source=arrays", "source.path=x.npz", "expert.head=softmax", "ensemble=log"], "no such file"),
    (["train", "tracking.name=paper"], "known: mlflow, none"),
    (["status"], "run: not given"),
    (["status", "run=nothing"], "no such folder"),
    (["evaluate", "run=corpus"], "not a run directory"),
    (["train", "run=corpus"], "is not empty"),
    (["train", "run=corpus/00.txt"], "is a file"),
    (["train", "resume=true"], "run: not given"),
    (["train", "resume=perhaps"], "must be true or false"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_mistakes_end_in_one_line_and_leave_nothing(cli, arguments, words):
    before = sorted(str(path) for path in cli.folder.rglob("*"))
    result = cli(*arguments)
    assert result.code == 2
    assert words in result.last
    assert result.last.startswith("colonnade: ")
    assert "Traceback" not in result.err
    assert result.out == ""
    assert sorted(str(path) for path in cli.folder.rglob("*")) == before


def test_help_and_version(cli):
    for arguments in ([], ["--help"]):
        result = cli(*arguments)
        assert result.code == 0
        assert "colonnade VERB" in result.out
    assert cli("--version").out.strip()
    result = cli("train", "--help")
    assert result.code == 0
    assert "preset: claim, digits, memory, regression, smoke, soma" in result.out


def test_cfg_job_prints_the_config_and_writes_nothing(cli):
    result = cli("train", "--cfg", "job", "preset=smoke", "seed=5")
    assert result.code == 0
    assert "seed: 5" in result.out
    assert sorted(path.name for path in cli.folder.iterdir()) == ["corpus"]


def test_awkward_paths_are_taken_verbatim(cli):
    folder = cli.folder / "my 'odd' ${run} = [folder]"
    (cli.folder / "corpus").rename(folder)
    result = cli.train(f"source.path={folder.name}", "run=a run, with $ymbols", "output=json")
    assert result.code == 0, result.err
    run = cli.folder / "a run, with $ymbols"
    assert (run / "summary.json").exists()
    again = cli("evaluate", "run=a run, with $ymbols", "output=json")
    assert again.code == 0, again.err
    assert again.json()["heldout"]["bits_per_byte"] == result.json()["heldout"]["bits_per_byte"]
    assert folder.name in (run / "config.yaml").read_text()


def test_multirun_gives_each_job_a_run_and_prints_a_line_each(cli):
    result = cli.train("-m", "seed=1,2", "output=json")
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["seed"] for line in lines] == [1, 2]
    assert lines[0]["heldout"]["bits_per_byte"] != lines[1]["heldout"]["bits_per_byte"]
    (sweep,) = (cli.folder / "runs").iterdir()
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1"]
    for number, line in enumerate(lines):
        assert json.loads((sweep / str(number) / "summary.json").read_text()) == line


def test_arrays_from_a_file(cli):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 400)
    x = rng.standard_normal((400, 5)) + 3 * np.eye(3, 5)[y]
    np.savez(cli.folder / "data.npz", x=x, y=y)
    result = cli(
        "train", "preset=digits", "source=arrays", "source.path=data.npz", "run=r", "tracking=none", "output=json",
        "router.areas=2", "router.experts_per_area=2",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.json()["heldout"]["accuracy"] > 0.8
    predicted = cli("predict", "run=r", "input=data.npz", "output=json")
    assert predicted.json()["accuracy"] > 0.8
    assert predicted.json()["items"] == 400
    np.savez(cli.folder / "bad.npz", x=np.where(x > 3, np.nan, x), y=y)
    for arguments in (
        ("train", "preset=digits", "source=arrays", "source.path=bad.npz"),
        ("predict", "run=r", "input=bad.npz"),
        ("predict", "run=r", "prompt=x", "sample=3"),
    ):
        refused = cli(*arguments)
        assert refused.code == 2
        assert "Traceback" not in refused.err


def test_more_experts_than_inputs_leaves_cold_ones(cli):
    text = b"abcdefgh" * 600
    (cli.folder / "small.txt").write_bytes(text)
    result = cli.train("source.path=small.txt", "router.experts_per_area=9000", "plan.group_size=5000", "run=r",
                       "output=json", "train.steps=3")  # fmt: skip
    assert result.code == 0, result.err
    summary = result.json()
    assert summary["router"]["cold_experts"] > 9000
    assert summary["heldout"]["bits_per_byte"] < 8
    counts = cli("status", "run=r", "output=json").json()["experts"]
    assert counts["cold"] == summary["router"]["cold_experts"]
    assert counts["done"] == 18_000 - counts["cold"]
