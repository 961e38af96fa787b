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
from colonnade.experts.families.mlp import build_spec, check_loss
from colonnade.experts.families.starts import class_frequencies
from colonnade.experts.training import advance_group, finish_group, start_group, train_group, train_seed
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
    spec = make_spec(problem[-1], optimizer, diagnose_every=2)
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
    looks, unbroken = (
        sorted(read_marker(place, 1)["diagnostics"], key=lambda look: (look["expert"], look["step"]))
        for place in (broken, whole)
    )
    assert {look["step"] for look in unbroken} == {2, 4, 6, 8, 10}
    assert looks == unbroken


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
    spec = make_spec(problem[-1])
    original = type(spec).initial

    def poisoned(self, *arguments):
        packed, fixed = original(self, *arguments)
        self.shape.views(packed)["w1"][3] = np.nan
        return packed, fixed

    monkeypatch.setattr(type(spec), "initial", poisoned)
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
    assert spec.parameter_split() == (13 * 8, 255 * 9)
    assert sum(spec.parameter_split()) == spec.shape.num_parameters


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ExpertConfig(head="forest"), "known: regression, softmax, tree"),
        (lambda: ExpertConfig(hidden=0), "expert.hidden=0"),
        (lambda: ExpertConfig(num_outputs=10), "use expert.head=softmax"),
        (lambda: EstimatorConfig("newton"), "known: activation, agzo, backprop, delta, fzoo"),
        (lambda: EstimatorConfig(perturbation_size=0), "estimator.perturbation_size=0"),
        (lambda: EstimatorConfig(num_perturbations=0), "between 1"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "optimizer.learning_rate=nan"),
        (lambda: OptimizerConfig(beta1=1.0), "optimizer.beta1"),
        (lambda: OptimizerConfig(schedule="step"), "known: constant, cosine, linear"),
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


@pytest.mark.parametrize(
    ("expert", "estimator", "optimizer", "words"),
    [
        ({}, {"num_perturbations": 33}, {}, "has 32 rows"),
        ({}, {"name": "lowrank", "directions": "lowrank", "head": "same", "rank": 20}, {}, "estimator.rank=20"),
        ({}, {"name": "agzo", "directions": "subspace", "head": "same", "rank": 20}, {}, "estimator.rank=20"),
        ({}, {}, {"anchored": True}, "seed_expert.steps"),
        ({}, {}, {"schedule": "plateau"}, "optimizer.schedule=plateau"),
        ({"loss": "zero_one"}, {"name": "backprop", "directions": "signs"}, {}, "derivative of the loss"),
        ({"loss": "zero_one"}, {"head": "delta"}, {}, "use pairs"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(expert, estimator, optimizer, words):
    with pytest.raises(UserError, match=words):
        build_spec(
            ExpertConfig(**expert),
            EstimatorConfig(**estimator),
            OptimizerConfig(**optimizer),
            TrainConfig(),
            12,
            np.ones(256) / 256,
        )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: EstimatorConfig(directions="gaussian"), "takes hadamard or signs"),
        (lambda: EstimatorConfig(head="same"), "use pairs or delta"),
        (lambda: EstimatorConfig(num_perturbations=1, fitness="std"), "2 or more"),
        (lambda: ExpertConfig(use_body=False), "nothing is left to learn"),
        (lambda: ExpertConfig(memory=True, head="softmax"), "expert.head=tree"),
        (lambda: ExpertConfig(loss="mine:loss", loss_function=len), "softmax or regression"),
        (lambda: TrainConfig(hold_back=1.0), "train.hold_back=1.0"),
    ],
)
def test_choices_that_contradict_each_other_say_so(build, words):
    with pytest.raises(UserError, match=words):
        build()


@pytest.mark.parametrize("result", [0.5, np.zeros((3, 1)), np.zeros(1)], ids=["scalar", "matrix", "mean"])
def test_a_loss_that_is_not_one_number_an_example_is_refused(result):
    expert = ExpertConfig(head="softmax", num_outputs=4, loss="mine:loss", loss_function=lambda *_: result)
    with pytest.raises(UserError, match="one number an example"):
        check_loss(expert)


def test_early_stopping_keeps_the_best_look_and_survives_checkpoints(tmp_path, problem):
    inputs, indices, offsets, frequencies = problem
    ids = IDS
    train_config = TrainConfig(steps=40, batch=8, hold_back=0.3, looks=8)
    # a rate that diverges: the best look is an early one
    optimizer = OptimizerConfig(learning_rate=40.0, clip_norm=0.0, weight_decay=0.0, schedule="constant")
    spec = build_spec(ExpertConfig(hidden=8), EstimatorConfig(), optimizer, train_config, 12, frequencies)
    whole = train_group(spec, inputs, indices, offsets, ids)
    e = int(np.argmax(np.diff(offsets)))
    own = indices[offsets[e] : offsets[e + 1]]
    count = len(own) - int(0.3 * len(own))
    own, held = own[:count], own[count:]
    kept = spec.shape.pack({role: values[e : e + 1] for role, values in whole.weights.items() if role != "b0"})[0]
    start = spec.initial(inputs, own, np.array([0, len(own)]), ids[e : e + 1])[0][0]
    assert spec.loss(inputs, held, kept) <= spec.loss(inputs, held, start) + 1e-6
    assert 0 <= whole.columns["kept_step"][e] < 40
    for every in (7, 13):
        progress = start_group(spec, inputs, indices, offsets, ids)
        for stop in [*range(every, 40, every), 40]:
            advance_group(spec, inputs, indices, offsets, ids, progress, stop)
        again = finish_group(spec, offsets, ids, progress)
        for role in whole.weights:
            np.testing.assert_array_equal(again.weights[role], whole.weights[role])


def test_a_seed_is_where_every_expert_starts_and_what_decay_pulls_to(problem):
    inputs, indices, offsets, frequencies = problem
    ids = IDS
    small, estimator, steps = ExpertConfig(hidden=8), EstimatorConfig(), TrainConfig(steps=30)
    plain = build_spec(small, estimator, OptimizerConfig(), steps, 12, frequencies)
    seed = train_seed(plain, inputs, indices, 0xFFFFFFFE)
    strong = OptimizerConfig(learning_rate=1.0, weight_decay=1.0, anchored=True, schedule="constant")
    spec = build_spec(small, estimator, strong, steps, 12, frequencies, seed_expert=seed)
    packed, _ = spec.initial(inputs, indices, offsets, ids)
    np.testing.assert_array_equal(packed, np.repeat(seed[None], len(ids), axis=0))
    trained = train_group(spec, inputs, indices, offsets, ids).weights
    # a full pull each step leaves the weights one clipped step from the seed
    used = np.diff(offsets) > 0
    distance = np.abs(trained["w1"][used] - spec.shape.views(seed)["w1"]).max()
    assert 0 < distance <= 0.5 + 1e-6
