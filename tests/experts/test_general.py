"""The loop of families that know their weights alone, around bodies whose losses are written out here."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from colonnade.experts.checkpoint import load_checkpoint, save_checkpoint
from colonnade.experts.config import EstimatorConfig, OptimizerConfig, TrainConfig
from colonnade.experts.families.general import general_spec
from colonnade.experts.training import advance_group, finish_group, start_group, train_group
from colonnade.kernels.mlp_resident import contract as c
from colonnade.kernels.mlp_resident.directions import flat_direction
from colonnade.kernels.philox import reference as philox
from scipy.stats import rankdata

F, V = 4, 3
T = F * V + V
DATA = np.random.default_rng(8).standard_normal((60, F)), np.arange(60) * 7 % V
IDS = np.array([5, 2, 900, 77])
OFFSETS = np.array([0, 20, 20, 21, 60])
INDICES = np.random.default_rng(9).permutation(60).astype(np.uint32)
BUSY = [0, 2, 3]
OWN = [INDICES[OFFSETS[e] : OFFSETS[e + 1]] for e in BUSY]
DENSE = np.arange(T) >= F * V
SEED_EXPERT = np.linspace(-1, 1, T, dtype=np.float32)
ESTIMATORS = {
    "signs": {},
    "gaussian": {"directions": "gaussian", "difference": "one_sided"},
    "sparse": {"directions": "sparse", "density": 0.3},
    "shrunk": {"directions": "sparse", "density": 0.3, "rescale": False},
    "ranks": {"fitness": "ranks"},
    "fzoo": {"name": "fzoo", "difference": "one_sided", "fitness": "std"},
    "lowrank": {"name": "lowrank", "directions": "lowrank", "fitness": "normalised", "rank": 2},
    "lowrank1": {"name": "lowrank", "directions": "lowrank", "fitness": "normalised", "difference": "one_sided"},
}
FREE = {"clip_norm": 0.0, "weight_decay": 0.0, "schedule": "constant"}
OPTIMIZERS = {
    "sgd": OptimizerConfig("sgd", 0.02, **FREE),
    "momentum": OptimizerConfig("momentum", 0.1, **{**FREE, "clip_norm": 0.4}),
    "adam": OptimizerConfig("adam", 0.05, **FREE),
}
PLATEAU = OptimizerConfig("adam", 0.5, schedule="plateau", patience=1)
KEEPING = {"steps": 7, "hold_back": 0.25, "looks": 3}


class Softmax:
    """Softmax regression; losses of expert `ill[0]` are NaN from step `ill[1]` on."""

    def __init__(self, ill=(None, 0)):
        self.roles, self.ill = {"w": (F, V), "b": (V,)}, ill

    def dense(self):
        return DENSE

    def initial(self, seed, expert):
        return np.random.default_rng([seed, expert]).standard_normal(T).astype(np.float32)

    def losses(self, candidates, inputs, positions, offset, draw):
        x, y = inputs
        w = candidates.astype(np.float64)
        z = np.einsum("bf,kfv->kbv", x[positions], w[:, : F * V].reshape(-1, F, V)) + w[:, None, F * V :]
        found = np.logaddexp.reduce(z, axis=2) - z[:, np.arange(len(positions)), y[positions]]
        return found * np.nan if draw[2] == self.ill[0] and draw[1] >= self.ill[1] else found


class Bowl(Softmax):
    """steepness |theta - target|^2 of an input's two numbers; starts at zero."""

    def __init__(self, size):
        self.roles = {"w": (size,)}

    def initial(self, seed, expert):
        return np.zeros(self.roles["w"], np.float32)

    def losses(self, candidates, inputs, positions, offset, draw):
        target, steepness = (np.array(values, np.float64)[positions] for values in inputs)
        return steepness * ((candidates.astype(np.float64)[:, None] - target[:, None]) ** 2).sum(2)


def make_spec(kind="signs", optimizer=OPTIMIZERS["sgd"], coupling="independent", body=None, **train):
    rest = {"name": "spsa", "directions": "signs", "difference": "central", "head": "same", **ESTIMATORS[kind]}
    estimator = EstimatorConfig(num_perturbations=5, perturbation_size=0.05, **rest)
    config = TrainConfig(**{"steps": 6, "batch": 7, "seed": 3, **train})
    seed_expert = SEED_EXPERT if optimizer.anchored else None
    return general_spec(body or Softmax(), "tiny", estimator, optimizer, config, coupling, seed_expert=seed_expert)


def plain_direction(rule, step, expert, probe):
    if rule.kind != "lowrank":
        z = flat_direction(c.DIRECTIONS[rule.kind], rule.density, 3, step, expert, probe, T)
        full = flat_direction(c.SIGNS, 1, 3, step, expert, probe, T)
        return np.where(DENSE & (rule.kind == "sparse"), full, z).astype(np.float64)
    r, word = rule.rank, philox.pack_draw(philox.PURPOSE_PERTURBATION, c.LAYER_NORMAL, probe)
    n = philox.normals(3, word, step, expert, (F + V) * r + V).astype(np.float64)
    left, right = n[: F * r].reshape(F, r), n[F * r : (F + V) * r].reshape(V, r)
    return np.concatenate([(left @ right.T / np.sqrt(r)).ravel(), n[(F + V) * r :]])


def plain_slopes(rule, told):
    """Coefficients of the directions by docs/estimators.md; told the losses at +e, then at -e or at the point."""
    ends = told if rule.difference == "central" else told[:5]
    scale = ends.std() if rule.fitness in ("std", "normalised") else 1
    if rule.fitness == "ranks":
        ends = (rankdata(ends) - 1) / (len(ends) - 1) - 0.5
    if rule.difference == "central":
        return (ends[:5] - ends[5:]) / scale / (2 * 0.05)
    return (ends - (ends.mean() if rule.fitness == "normalised" else told[5])) / scale / 0.05


def plain_run(spec, summed=False):
    """Weights float64 [N, T] of the busy experts after the last step, and the losses [steps, N] on the way."""
    rule, o, experts = spec.rule, spec.optimizer_config, IDS[BUSY]
    theta = np.stack([Softmax().initial(3, expert) for expert in experts]).astype(np.float64)
    m, v, curve = 0 * theta, 0 * theta, []
    for step in range(6):
        z, told = [], []
        for i, expert in enumerate(experts):
            z.append(np.array([plain_direction(rule, step, expert, j) for j in range(5)]))
            other = theta[i] - 0.05 * z[i] if rule.difference == "central" else theta[i : i + 1]
            chosen = philox.uniform_ints(3, philox.pack_draw(philox.PURPOSE_BATCH), step, expert, 7, len(OWN[i]))
            points = np.concatenate([theta[i] + 0.05 * z[i], other])
            told.append(Softmax().losses(points, DATA, OWN[i][chosen], None, (0, 0, 0)).mean(1))
        curve.append(np.mean(told, axis=1))
        told = [sum(told)] * len(told) if summed else told
        for i in range(len(experts)):
            g = (plain_slopes(rule, told[i])[:, None] * z[i]).mean(0)
            if rule.kind == "sparse" and rule.rescale:
                g[~DENSE] /= rule.density
            g *= min(1, (o.clip_norm or np.inf) / np.linalg.norm(g))
            if o.name == "adam":
                m[i] = o.beta1 * m[i] + (1 - o.beta1) * g
                v[i] = o.beta2 * v[i] + (1 - o.beta2) * g**2
                root = np.sqrt(v[i] / (1 - o.beta2 ** (step + 1)))
                g = m[i] / (1 - o.beta1 ** (step + 1)) / (root + o.epsilon)
            elif o.name == "momentum":
                m[i] = g = o.beta1 * m[i] + g
            theta[i] -= o.learning_rate * g
    return theta, np.array(curve)


def flat(result):
    return np.concatenate([values.reshape(len(values), -1) for values in result.weights.values()], axis=1)


def columns(result):
    return {name: values for name, values in result.columns.items() if name != "seconds"}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("kind", sorted(ESTIMATORS))
def test_steps_are_those_of_the_formulas(kind, optimizer):
    spec = make_spec(kind, OPTIMIZERS[optimizer])
    result = train_group(spec, DATA, INDICES, OFFSETS, IDS)
    expected, curve = plain_run(spec)
    np.testing.assert_allclose(flat(result)[BUSY], expected, rtol=1e-4, atol=5e-5)
    np.testing.assert_allclose([result.columns["loss_first"][e] for e in BUSY], curve[0], rtol=1e-5)
    np.testing.assert_allclose([result.columns["loss_last"][e] for e in BUSY], curve[-1], rtol=1e-3)
    assert result.columns["state"] == ["done", "cold", "done", "done"]
    assert not flat(result)[1].any()


@pytest.mark.parametrize("kind", ["signs", "fzoo", "lowrank"])
def test_summed_losses_are_the_sum_over_the_experts(kind):
    spec, alone = (make_spec(kind, OPTIMIZERS["momentum"], coupling) for coupling in ("summed", "independent"))
    result = train_group(spec, DATA, INDICES, OFFSETS, IDS)
    expected, curve = plain_run(spec, summed=True)
    np.testing.assert_allclose(flat(result)[BUSY], expected, rtol=1e-4, atol=5e-5)
    np.testing.assert_allclose([result.columns["loss_first"][e] for e in BUSY], curve[0].mean(), rtol=1e-5)
    independent = flat(train_group(alone, DATA, INDICES, OFFSETS, IDS))
    assert np.abs(flat(result) - independent)[BUSY].max(1).min() > 1e-2
    single = flat(train_group(spec, DATA, OWN[0], np.array([0, 20]), IDS[:1]))
    np.testing.assert_array_equal(single[0], independent[0], "a sum over one expert is its own loss")


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", ["sparse", "fzoo", "lowrank"])
def test_an_expert_does_not_depend_on_its_group_or_on_threads(kind, keeps):
    spec = make_spec(kind, PLATEAU, **KEEPING) if keeps else make_spec(kind, OPTIMIZERS["momentum"])
    whole = train_group(spec, DATA, INDICES, OFFSETS, IDS)

    def group(first, last):
        ends = OFFSETS[first : last + 1]
        return train_group(spec, DATA, INDICES[ends[0] : ends[-1]], ends - ends[0], IDS[first:last])

    for threads, cuts in ((1, range(5)), (4, range(5)), (2, [0, 3, 4])):
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(group, cuts[:-1], cuts[1:]))
        np.testing.assert_array_equal(np.concatenate([flat(part) for part in parts]), flat(whole))
        for name, values in columns(whole).items():
            assert [value for part in parts for value in part.columns[name]] == values


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_checkpoint_at_any_step_continues_bit_for_bit(tmp_path, stop):
    (tmp_path / "groups").mkdir()
    spec = make_spec("sparse", PLATEAU, **KEEPING)
    whole = train_group(spec, DATA, INDICES, OFFSETS, IDS)
    progress = start_group(spec, DATA, INDICES, OFFSETS, IDS)
    advance_group(spec, DATA, INDICES, OFFSETS, IDS, progress, stop)
    save_checkpoint(tmp_path, 4, 0, progress)
    progress, _ = load_checkpoint(tmp_path, 4)
    advance_group(spec, DATA, INDICES, OFFSETS, IDS, progress, 7)
    again = finish_group(spec, OFFSETS, IDS, progress)
    assert progress.state.rate_scale.min() < 1
    np.testing.assert_array_equal(flat(again), flat(whole))
    assert columns(again) == columns(whole)


def test_what_is_kept_is_the_best_look():
    spec = make_spec(optimizer=OptimizerConfig("sgd", 0.05, **FREE), body=Bowl(1), steps=20, hold_back=0.25, looks=10)
    # one weight: the estimate is exact, and theta = 2 (1 - 0.9^s) passes 1, the best for what is held back of the first
    data = [2] * 6 + [1] * 2 + [2] * 6 + [-1] * 2, [1] * 16
    result = train_group(spec, data, np.arange(16), np.array([0, 8, 16]), IDS[:2])
    assert result.columns["kept_step"] == [6, 0]
    np.testing.assert_allclose(result.weights["w"], [[2 * (1 - 0.9**6)], [0]], atol=1e-4)


@pytest.mark.parametrize(("anchored", "centre"), [(False, 0), (True, SEED_EXPERT)], ids=["zero", "seed"])
def test_decay_pulls_matrices_to_zero_or_to_the_seed(anchored, centre):
    decayed = OptimizerConfig("sgd", 0.02, **{**FREE, "weight_decay": 0.5}, anchored=anchored)
    found = []
    for optimizer in (decayed, OPTIMIZERS["sgd"]):
        spec = make_spec(optimizer=optimizer, steps=1)
        progress = start_group(spec, DATA, INDICES, OFFSETS, IDS)
        progress.state.packed[:] = 2
        advance_group(spec, DATA, INDICES, OFFSETS, IDS, progress, 1)
        found.append(progress.state.packed[BUSY])
    pull = np.broadcast_to(0.02 * 0.5 * (2 - centre), (3, T))[:, ~DENSE]
    np.testing.assert_allclose((found[1] - found[0])[:, ~DENSE], pull, atol=1e-6)


def test_an_expert_that_fails_leaves_its_neighbours_alone():
    good, bad = (train_group(make_spec(body=b), DATA, INDICES, OFFSETS, IDS) for b in (Softmax(), Softmax((900, 4))))
    assert bad.columns["state"] == ["done", "cold", "failed", "done"]
    assert bad.columns["reason"][2] == "no finite pair of losses left in a step (step 4)"
    assert bad.columns["dropped_pairs"] == [0, 0, 5, 0]
    assert not flat(bad)[2].any()
    np.testing.assert_array_equal(flat(bad)[[0, 3]], flat(good)[[0, 3]])


@pytest.mark.parametrize(("steps", "reason"), [(1, "a weight is not finite"), (4, "no finite pair")])
def test_weights_that_overflow_are_a_failure(steps, reason):
    spec = make_spec(optimizer=OptimizerConfig("sgd", 0.05, **FREE), body=Bowl(3), steps=steps)
    data = [1] * 8, [1] * 4 + [1e50] * 4
    both = train_group(spec, data, np.arange(8), np.array([0, 4, 8]), IDS[:2])
    assert both.columns["state"] == ["done", "failed"]
    assert reason in both.columns["reason"][1]
    alone = train_group(spec, data, np.arange(4), np.array([0, 4]), IDS[:1])
    np.testing.assert_array_equal(both.weights["w"][0], alone.weights["w"][0])
