import pytest
from colonnade.jobs import argv
from colonnade.kernels.errors import UserError
from hypothesis import given
from hypothesis import strategies as st
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf


def through_hydra(*tokens):
    GlobalHydra.instance().clear()
    with initialize_config_module("colonnade.conf", version_base="1.3"):
        return compose("config", overrides=argv.for_hydra(list(tokens)))


AWKWARD = [
    "def f(x): return {x: [1, 2]}",
    "loss > 2 and area = 'hash12'",
    "a,b",
    "corpus/**/*.txt",
    "${name}",
    r"\${name}",
    r"\\${x}",
    "a${",
    "${oc.env:HOME}",
    'it\'s "quoted"',
    r"back\slash",
    "trailing\\",
    "two\nlines",
    "true",
    "12",
    "=",
    " spaces ",
    "ünïcode",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_is_taken_verbatim(text):
    assert through_hydra(f"prompt={text}").prompt == text


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1).filter(lambda text: text != "null"))
def test_any_text_is_taken_verbatim(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides(argv.for_hydra([f"source.path={text}"]))
    config = OmegaConf.create({"field": None, "name": "value"})
    OmegaConf.update(config, "field", override.value())
    assert config.field == text


@given(st.text())
def test_what_is_put_into_the_config_reads_back(text):
    config = OmegaConf.create({"field": None, "name": "value"})
    OmegaConf.update(config, "field", argv.escape(text))
    assert config.field == text


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("preset=foo", "known: digits, smoke, tenk"),
        ("estimator=spsa,foo", "estimator=foo: unknown; known: activation, backprop, spsa"),
        ("source=foo", "known: arrays, digits, stdlib, text"),
        ("--frobnicate", "no such flag"),
        ("--cfg=everything", "known: job, hydra, all"),
        ("seed", "write name=value"),
    ],
)
def test_what_is_not_understood(token, words):
    with pytest.raises(UserError, match=words):
        argv.for_hydra([token])


def test_flags_and_overrides_pass():
    tokens = ["--cfg", "job", "-m", "seed=1,2", "train.steps=5", "router.areas=[{name: a}]", "~tracking", "+x=1"]
    assert argv.for_hydra(tokens) == tokens
