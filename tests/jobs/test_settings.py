import pytest
from colonnade.jobs import argv
from colonnade.jobs.settings import read
from colonnade.kernels.errors import UserError
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra


def composed(*overrides):
    GlobalHydra.instance().clear()
    with initialize_config_module("colonnade.conf", version_base="1.3"):
        return compose("config", overrides=list(overrides))


# what some options cannot be read without
WINDOWS = ("router=windows", "expert=lstm", "estimator=soma", "ensemble=mean_proba", "baselines=false", "controls=[]")
COMPANIONS = {
    "router=windows": WINDOWS,
    "expert=lstm": WINDOWS,
    "ensemble=mean_proba": WINDOWS,
    "ensemble=linear": ("expert.head=softmax",),
    "ensemble=log": ("expert.head=softmax",),
    "expert=integer": ("estimator.perturbation_size=1", "controls=[]"),
    "expert=module": ("preset=digits", "expert.module=mine:net", "estimator=spsa"),
    "estimator=soma": WINDOWS,
    "estimator=soma_paper": WINDOWS,
}


@pytest.mark.parametrize("choice", [f"{group}={option}" for group in argv.GROUPS for option in argv.options(group)])
def test_every_yaml_composes_and_is_read(choice):
    companions = [extra for extra in COMPANIONS.get(choice, ()) if extra.split("=")[0] != choice.split("=")[0]]
    settings = read(composed(choice, *companions, "router.experts_per_area=3"))
    if settings.family == "lstm":
        assert settings.windows().experts == 3
        assert settings.lstm().width >= 1
    else:
        assert settings.router().areas


def test_presets_are_what_the_readme_says():
    tenk = read(composed("preset=tenk"))
    assert sum(area.experts for area in tenk.router().areas) >= 10_240
    assert len(tenk.router().areas) == 8
    assert tenk.train.steps == 300
    assert tenk.train.batch == 64
    assert tenk.expert(256).num_outputs == 256


def test_experts_are_shared_out():
    def shares(*overrides):
        return [area.experts for area in read(composed("preset=smoke", *overrides)).router().areas]

    assert shares("router.experts=1003") == [126, 126, 126, 125, 125, 125, 125, 125]
    assert shares("router.experts_per_area=7") == [7] * 8
    assert shares("router.experts=21", "router.areas=3") == [7, 7, 7]
    assert shares("router.experts=56", "router.experts_per_area=7") == [7] * 8
    own = "router.areas=[{name: mine, strategy: hash, lags: [2]}]"
    assert read(composed(own)).router().areas[0].lags == (2,)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["router.experts=100", "router.experts_per_area=7"], "contradict each other"),
        (["router.experts=3"], "fewer than the 8 areas"),
        (["router.experts_per_area=0"], "at least 1"),
        (["router.areas=9"], "knows 8"),
        (["router.areas=[]"], "must be a list of areas"),
        (["router.areas=[3]"], r"router.areas\[0\]=3"),
        (["router.areas=[{nam: x}]"], r"router.areas\[0\].nam: no such field"),
        (["router.areas=[{name: x, strategy: magic}]"], "known: hash, kmeans, random"),
        (["train.steps=many"], "train.steps=many: must be a whole number"),
        (["train.steps=2.5"], "must be a whole number"),
        (["train.steps=0"], "train.steps=0"),
        (["train.batch=true"], "must be a whole number"),
        (["seed=-1"], "seed=-1"),
        (["optimizer.learning_rate=fast"], "must be a number"),
        (["optimizer.learning_rate=.nan"], "optimizer.learning_rate"),
        (["estimator.name=newton"], "known: activation, agzo, backprop, delta, fzoo"),
        (["expert.head=forest"], "known: regression, softmax, tree"),
        (["expert.family=cnn"], "known: mlp"),
        (["ensemble=linear"], "not for expert.head=tree"),
        (["engine.workers=0"], "engine.workers=0"),
        (["backend=cuda"], "known: auto, numba, reference"),
        (["plan.group_size=0"], "plan.group_size=0"),
        (["controls=[magic]"], "known: frozen_body, backprop"),
    ],
)
def test_values_out_of_range_are_named(overrides, words):
    with pytest.raises(UserError, match=words):
        read(composed(*overrides))


def test_the_published_recipe_and_its_wide_controls():
    own = read(composed("preset=soma_paper"))
    assert own.windows().experts == 256
    assert own.windows().top_k == 4
    assert (own.windows().length, own.windows().prefix) == (1024, 256)
    assert own.lstm().width == 32
    assert own.estimator.density == 0.5
    assert not own.estimator.rescale
    assert own.estimator.num_perturbations == 64
    assert own.optimizer.schedule == "plateau"
    assert own.seed_rate == own.head_rate == 0.0025
    for experts, width in ((1, 509), (2, 361), (8, 181)):
        wide = read(composed("preset=soma_paper", f"router.experts={experts}", f"expert.width={width}",
                             "expert.head_width=32", "expert.train_embedding=true", "optimizer.weight_decay=1e-4",
                             "optimizer.coupled=true"))  # fmt: skip
        assert wide.windows().experts == experts
        assert wide.lstm().width == width
        assert wide.optimizer.coupled
    with pytest.raises(UserError, match=r"optimizer\.coupled=true: "):
        read(composed("optimizer.coupled=true"))
