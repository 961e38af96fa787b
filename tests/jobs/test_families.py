"""Whole runs of what is not the default: memory and seeds, windows, modules and losses of one's own, numbers."""

import json

import numpy as np
import pytest

SMALL = ("router.areas=2", "router.experts_per_area=6", "plan.group_size=4", "train.steps=20", "controls=[]",
         "baselines=false", "tracking=none", "output=json")  # fmt: skip
OWN = """
import numpy as np
import torch


def net(features, outputs):
    return torch.nn.Sequential(torch.nn.Linear(features, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, outputs))


def flat(features, outputs):
    return torch.nn.Sequential(torch.nn.Linear(features, outputs), torch.nn.Flatten(0))


def hinge(outputs, targets):
    chosen = np.take_along_axis(outputs, targets[:, None], 1)
    return np.maximum(0, 1 - chosen + outputs).sum(1) - 1


def mean(outputs, targets):
    return hinge(outputs, targets).mean()
"""


def summary(result):
    assert result.code == 0, result.err
    return json.loads(result.out)


@pytest.fixture
def own_code(cli, monkeypatch):
    (cli.folder / "mine.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(cli.folder))
    return cli


def test_memory_with_a_seed_and_mixers(cli):
    memory = ("preset=memory", *SMALL, "source=text", "source.path=corpus", "seed_expert.steps=50",
              "controls=[mixers]", "expert.mixer_areas=[word]", "router.areas=3")  # fmt: skip
    found = summary(cli("train", *memory, "run=m"))
    held = found["heldout"]
    assert held["bits_per_byte"] < held["untrained"]
    assert held["mixers"] > 0
    assert held["seed"] > 0
    assert held["seed_mixer"] > 0
    assert found["memory"]["table_bytes"] > 0
    assert found["memory"]["row_bytes"] % 128 == 0
    # the word area's experts hold biases and memory weights alone
    mixer = 255 + 8 * 16
    assert found["expert"]["total_params"] == 12 * found["expert"]["params_per_expert"] + 6 * mixer
    again = summary(cli("evaluate", "run=m", "output=json"))["heldout"]
    assert again["bits_per_byte"] == pytest.approx(held["bits_per_byte"], abs=1e-9)
    computed = summary(cli("train", *memory, "run=c", "relay.memory_bytes=0"))
    assert computed["memory"]["row_bytes"] == 0
    for name in ("bits_per_byte", "seed", "mixers"):
        assert computed["heldout"][name] == held[name]
    assert not (cli.folder / "c" / "memory" / "rows.int8").exists()
    scored = summary(cli("predict", "run=m", "input=corpus/00.txt", "output=json"))
    assert 0 < scored["bits_per_byte"] < 8
    sampled = summary(cli("predict", "run=m", "prompt=the", "sample=3", "output=json"))
    assert sampled["items"] == 3


def test_a_memory_that_is_changed_is_refused(cli):
    summary(cli("train", "preset=memory", *SMALL, "source=text", "source.path=corpus", "seed_expert.steps=5",
                        "run=m", "controls=[]"))  # fmt: skip
    path = cli.folder / "m" / "memory" / "memory.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    refused = cli("evaluate", "run=m")
    assert refused.code == 2
    assert "memory" in refused.last


def test_windows_by_the_soma_recipe(cli):
    soma = ("preset=soma", "source=text", "source.path=corpus", "router.length=64", "router.prefix=16",
            "expert.width=8", "estimator.num_perturbations=2", "train.batch=2", "seed_expert.steps=3",
            "train.total_steps=6", "tracking=none", "output=json")  # fmt: skip
    first = summary(cli("train", *soma, "run=s1", "router.experts=2"))
    assert first["router"]["experts"] == 2
    assert first["train"]["steps"] == 3
    assert first["expert"]["params_per_expert"] == 32 * 64 + 5 * 8
    assert len(first["heldout"]["by_k"]) == 2
    assert first["heldout"]["bytes"] % 48 == 0
    assert summary(cli("evaluate", "run=s1", "output=json"))["heldout"]["by_k"] == first["heldout"]["by_k"]
    assert summary(cli("aggregate", "run=s1", "output=json"))["unusable_experts"] == 0
    size = (cli.folder / "corpus" / "00.txt").stat().st_size
    scored = summary(cli("predict", "run=s1", "input=corpus/00.txt", "output=json"))
    assert scored["items"] == len(scored["bits"]) == size - 16
    assert 0 < scored["bits_per_byte"] < 16
    (cli.folder / "short.txt").write_text("sixteen bytes !!")
    assert "the first 16 only say" in cli("predict", "run=s1", "input=short.txt").last
    assert "input=FILE" in cli("predict", "run=s1", "prompt=a", "sample=3").last
    again = summary(cli("train", *soma, "run=s2", "router.experts=2", "engine.workers=1", "plan.group_size=2"))
    assert again["heldout"]["bits_per_byte"] == first["heldout"]["bits_per_byte"]
    summed = summary(cli("train", *soma, "run=s3", "router.experts=2", "expert.loss_coupling=summed",
                                 "plan.group_size=2"))  # fmt: skip
    assert summed["heldout"]["bits_per_byte"] != first["heldout"]["bits_per_byte"]
    one = summary(cli("train", *soma, "run=s4", "router.experts=1", "estimator=lowrank"))
    assert one["train"]["steps"] == 6
    plateau = summary(cli("train", *soma, "run=s5", "optimizer.schedule=plateau", "train.hold_back=0.1",
                                  "optimizer.patience=1"))  # fmt: skip
    assert plateau["train"]["failed_experts"] == 0


def test_a_module_of_ones_own_runs_where_the_command_line_names_it(own_code):
    digits = ("preset=digits", *SMALL[:2], "train.steps=10", "tracking=none", "output=json", "expert=module",
              "estimator=spsa", "estimator.num_perturbations=2", "optimizer=adam")  # fmt: skip
    found = summary(own_code("train", *digits, "expert.module=mine:net", "run=d"))
    assert found["expert"]["family"] == "module"
    assert found["expert"]["params_per_expert"] == 65 * 8 + 9 * 10
    refused = own_code("evaluate", "run=d")
    assert refused.code == 2
    assert "repeat expert.module=mine:net" in refused.last
    again = summary(own_code("evaluate", "run=d", "expert.module=mine:net", "output=json"))["heldout"]
    assert again["accuracy"] == found["heldout"]["accuracy"]


def test_a_loss_of_ones_own(own_code):
    digits = ("preset=digits", *SMALL[:2], "train.steps=10", "tracking=none", "output=json")
    found = summary(own_code("train", *digits, "loss=mine:hinge", "run=d"))
    assert found["train"]["backend"] == "reference"
    assert found["heldout"]["accuracy"] > 0.3


def test_numbers_instead_of_classes(cli):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((600, 4))
    np.savez(cli.folder / "numbers.npz", x=x, y=50 + 10 * np.sin(x[:, 0]) + x[:, 1])
    numbers = ("preset=regression", "source.path=numbers.npz", "tracking=none", "output=json", "run=r")
    found = summary(cli("train", *numbers, "train.steps=100"))
    held = found["heldout"]
    assert held["rmse"] < 0.7 * held["untrained"]
    predicted = summary(cli("predict", "run=r", "input=numbers.npz", "output=json"))
    assert predicted["rmse"] < 5
    assert len(predicted["values"]) == 600


def test_diagnostics_stand_in_the_summary(cli):
    found = summary(cli("train", "preset=smoke", *SMALL, "source=text", "source.path=corpus", "run=q",
                                "source.fraction=1", "diagnostics.every=10", "diagnostics.experts=3",
                                "estimator=spsa"))  # fmt: skip
    rows = found["diagnostics"]
    assert [row["step"] for row in rows] == [0, 10]
    for row in rows:
        assert abs(row["relative_variance"] / row["theory"] - 1) < 0.5
        assert 0 < row["cosine"] < 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("expert=module expert.module=mine:flat estimator=spsa", "an axis of examples"),
        ("expert=module expert.module=mine:absent estimator=spsa", "cannot be imported"),
        ("expert=module estimator=spsa", "must be package:factory"),
        ("expert=module expert.module=mine:net", "estimator.name=activation: needs layer inputs"),
        ("expert=module expert.module=mine:net estimator=agzo", "estimator.name=agzo: needs layer inputs"),
        ("loss=mine:mean", "one number an example"),
        ("estimator.num_perturbations=64", "has 32 rows"),
        ("estimator=lowrank estimator.rank=40", "estimator.rank=40"),
        ("estimator.perturbation_size=0", "above 0"),
        ("loss=zero_one estimator=backprop", "derivative"),
        ("relay.memory=true", "relay.memory=true: goes with"),
        ("optimizer.anchored=true", "seed_expert.steps"),
        ("optimizer.schedule=plateau", "optimizer.schedule=plateau"),
        ("expert=lstm", "router=windows"),
        ("controls=[mixers]", "relay.memory=true"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(own_code, arguments, words):
    refused = own_code("train", "preset=digits", "tracking=none", "run=x", *arguments.split())
    assert refused.code == 2
    assert words in refused.last
    assert "Traceback" not in refused.err
    assert not (own_code.folder / "x").exists()
