import numpy as np
import pytest
from colonnade.jobs import plan as plans
from colonnade.jobs.slices import Slice, available_cores, cpu_slices
from colonnade.kernels.errors import UserError
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 140), st.integers(0, 2**32))
def test_groups_hold_every_expert_once_and_cross_no_area(areas, group_size, seed):
    first_expert = np.concatenate([[0], np.cumsum(areas)])
    sizes = np.random.default_rng(seed).integers(0, 3, first_expert[-1])
    plan = plans.make(sizes, first_expert, group_size)
    ids = [e for group in plan.groups for e in range(group.first_expert, group.first_expert + group.num_experts)]
    assert ids == list(range(first_expert[-1]))
    assert [group.group for group in plan.groups] == list(range(len(plan.groups)))
    for group in plan.groups:
        assert 1 <= group.num_experts <= group_size
        assert first_expert[group.area] <= group.first_expert
        assert group.first_expert + group.num_experts <= first_expert[group.area + 1]
        own = sizes[group.first_expert : group.first_expert + group.num_experts]
        assert group.inputs == own.sum()
        assert group.busy_experts == (own > 0).sum()
    assert sum(group.inputs for group in plan.groups) == sizes.sum()


def test_round_trip_and_damage(tmp_path):
    plan = plans.make(np.ones(10, int), np.array([0, 4, 10]), 4)
    plans.save(tmp_path, plan, [Slice((0,))])
    assert plans.load(tmp_path) == plan
    (tmp_path / "plan.json").write_text('{"schema": 1, "group_size": 4}')
    with pytest.raises(UserError, match="groups"):
        plans.load(tmp_path)
    (tmp_path / "plan.json").write_text('{"schema": 7}')
    with pytest.raises(UserError, match="schema 7"):
        plans.load(tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(UserError, match="missing"):
        plans.load(tmp_path)


def test_slices_use_the_cores_in_turn():
    cores = available_cores()
    assert [entry.cores for entry in cpu_slices(None)] == [(core,) for core in cores]
    many = cpu_slices(2 * len(cores) + 1)
    assert len(many) == 2 * len(cores) + 1
    assert many[0] == many[len(cores)] == many[2 * len(cores)]
