"""The commit protocol in one process; what workers and launchers add is tested in tests/jobs."""

import json

import numpy as np
import pytest
from colonnade.experts import bank as bank_module
from colonnade.experts import commit as commit_module
from colonnade.experts.bank import Bank, damaged_files, marker_path, read_marker
from colonnade.experts.checkpoint import load_checkpoint
from colonnade.experts.commit import train_and_commit
from colonnade.experts.config import EstimatorConfig, ExpertConfig, OptimizerConfig, TrainConfig
from colonnade.experts.mlp import class_frequencies
from colonnade.experts.training import build_spec, parameter_split, train_group
from colonnade.kernels.errors import UserError
from colonnade.kernels.mlp_resident.contract import Inputs

SIZES = (40, 0, 1, 25)
IDS = np.array([12, 13, 14, 15])


@pytest.fixture
def problem():
    rng = np.random.default_rng(5)
    text = rng.integers(97, 123, 2000).astype(np.uint8)
    inputs = Inputs(text=text, embedding=rng.standard_normal((256, 4)).astype(np.float32), context=3)
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    indices = rng.integers(10, 2000, offsets[-1]).astype(np.uint32)
    return inputs, indices, offsets, class_frequencies(text, 256)


def make_spec(frequencies, optimizer="adam", **train):
    return build_spec(
        ExpertConfig(hidden=8),
        EstimatorConfig(num_perturbations=4),
        OptimizerConfig(optimizer),
        TrainConfig(**{"steps": 12, "batch": 8, **train}),
        12,
        frequencies,
    )


def make_bank(directory, spec):
    shapes = {**spec.shape.roles, "b0": spec.shape.roles["b2"]}
    return Bank.create(directory, shapes, num_groups=3, group_size=6)


def train(directory, spec, problem, every=0):
    inputs, indices, offsets, _ = problem
    bank = make_bank(directory, spec)
    train_and_commit(directory, bank, 1, 0, spec, inputs, indices, offsets, IDS, every)
    return bank


def test_what_is_committed_is_what_was_trained(tmp_path, problem):
    inputs, indices, offsets, frequencies = problem
    spec = make_spec(frequencies)
    bank = train(tmp_path, spec, problem)
    result = train_group(spec, inputs, indices, offsets, IDS)
    read = bank.read_group(1, 4)
    assert sorted(read) == ["b0", "b1", "b2", "w1", "w2"]
    for role, values in result.weights.items():
        np.testing.assert_array_equal(read[role], values)
    marker = read_marker(tmp_path, 1)
    assert marker["experts"]["state"] == ["done", "cold", "done", "done"]
    assert marker["experts"]["size"] == list(SIZES)
    assert marker["step"] == 12
    assert damaged_files(tmp_path, marker) == []
    assert read_marker(tmp_path, 0) is None


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_checkpoint_continues_bit_for_bit(tmp_path, problem, monkeypatch, optimizer):
    spec = make_spec(problem[-1], optimizer)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    expected = train(whole, spec, problem).read_group(1, 4)
    saves = []
    original = commit_module.save_checkpoint

    def save_then_die(directory, group, slot, progress):
        original(directory, group, slot, progress)
        saves.append((slot, progress.step))
        if progress.step == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(commit_module, "save_checkpoint", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        train(broken, spec, problem, every=5)
    assert saves == [(0, 5), (1, 10)]
    progress, slot = load_checkpoint(broken, 1)
    assert (progress.step, slot) == (10, 1)
    bank = train(broken, spec, problem, every=5)
    assert saves == [(0, 5), (1, 10)], "the second run had one stretch left"
    for role, values in bank.read_group(1, 4).items():
        np.testing.assert_array_equal(values, expected[role])
    assert sorted(path.name for path in (broken / "groups").iterdir()) == ["1.json"]


def test_a_damaged_checkpoint_is_not_believed(tmp_path, problem, monkeypatch):
    spec = make_spec(problem[-1])
    original = commit_module.save_checkpoint

    def save_then_die(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(commit_module, "save_checkpoint", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, spec, problem, every=5)
    slot = tmp_path / "groups" / "1.slot0.safetensors"
    content = bytearray(slot.read_bytes())
    content[-1] ^= 1
    slot.write_bytes(content)
    assert load_checkpoint(tmp_path, 1) is None


def test_a_flipped_byte_is_found_and_named(tmp_path, problem):
    spec = make_spec(problem[-1])
    bank = train(tmp_path, spec, problem)
    shard = bank.shard_path("w2", 1)
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 16
    shard.write_bytes(content)
    assert damaged_files(tmp_path, read_marker(tmp_path, 1)) == [str(shard.relative_to(tmp_path))]
    shard.unlink()
    assert damaged_files(tmp_path, read_marker(tmp_path, 1)) == [str(shard.relative_to(tmp_path))]


def test_no_marker_before_the_shards_are_whole(tmp_path, problem, monkeypatch):
    spec = make_spec(problem[-1])

    def full_disk(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bank_module, "file_digest", full_disk)
    with pytest.raises(OSError, match="No space"):
        train(tmp_path, spec, problem)
    assert read_marker(tmp_path, 1) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not a group marker"), ("[1]", "not a group marker"), ('{"schema": 9, "group": 1}', "schema 9")],
)
def test_a_marker_that_cannot_be_believed(tmp_path, content, words):
    marker_path(tmp_path, 1).parent.mkdir()
    marker_path(tmp_path, 1).write_text(content)
    with pytest.raises(UserError, match=words):
        read_marker(tmp_path, 1)


def test_a_bank_of_another_shape_is_refused(tmp_path, problem):
    spec = make_spec(problem[-1])
    make_bank(tmp_path, spec)
    with pytest.raises(UserError, match="the plan needs"):
        Bank.create(tmp_path, {"w1": (3, 3)}, 3, 6)


def test_a_failed_expert_is_marked_and_left_out(tmp_path, problem, monkeypatch):
    from colonnade.experts import training

    spec = make_spec(problem[-1])
    original = training.initial_weights

    def poisoned(*arguments):
        weights = original(*arguments)
        weights["w1"][3] = np.nan
        return weights

    monkeypatch.setattr(training, "initial_weights", poisoned)
    bank = train(tmp_path, spec, problem)
    marker = json.loads(marker_path(tmp_path, 1).read_text())
    assert [entry["expert"] for entry in marker["failed"]] == [15]
    assert "finite" in marker["failed"][0]["reason"]
    assert marker["experts"]["state"] == ["done", "cold", "done", "failed"]
    weights = bank.read_group(1, 4)
    assert not weights["w1"][3].any()
    assert weights["w1"][0].any()


def test_parameters_are_split_into_sampled_and_exact(problem):
    spec = make_spec(problem[-1])
    assert parameter_split(spec) == (13 * 8, 255 * 9)
    assert sum(parameter_split(spec)) == spec.shape.num_parameters


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ExpertConfig(head="forest"), "known: softmax, tree"),
        (lambda: ExpertConfig(hidden=0), "expert.hidden=0"),
        (lambda: ExpertConfig(num_outputs=10), "use expert.head=softmax"),
        (lambda: EstimatorConfig("newton"), "known: activation, backprop, spsa"),
        (lambda: EstimatorConfig(perturbation_size=0), "estimator.perturbation_size=0"),
        (lambda: EstimatorConfig(num_perturbations=0), "between 1"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "optimizer.learning_rate=nan"),
        (lambda: OptimizerConfig(beta1=1.0), "optimizer.beta1"),
        (lambda: OptimizerConfig(schedule="step"), "known: constant, linear"),
        (lambda: TrainConfig(steps=0), "train.steps=0"),
        (lambda: TrainConfig(batch=0), "train.batch=0"),
        (lambda: TrainConfig(seed=-1), "seed=-1"),
    ],
)
def test_settings_out_of_range_say_which(build, words):
    with pytest.raises(UserError, match=words):
        build()


def test_more_directions_than_the_basis_are_refused(problem):
    with pytest.raises(UserError, match="has 32 rows"):
        build_spec(
            ExpertConfig(hidden=20),
            EstimatorConfig(num_perturbations=33),
            OptimizerConfig(),
            TrainConfig(),
            12,
            problem[-1],
        )
