import pytest
from colonnade.jobs import argv
from colonnade.kernels.errors import UserError
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

AWKWARD = ["def f(x): return {x: [1, 2]}", "loss > 2 and area = 'hash12'", "it's \"so\"", "${name}", r"\${name}",
           r"\\${x}", "a${", "\\${", "${oc.env:HOME}", "}", "$", r"\$", "trailing\\", "\\'", "\\\\'", "*.[ch]", "a,b",
           "corpus/**/*.txt", "a=b=c", "[1,2]", "{a: 1}", "true", "007", "1e3", "~", "two\nlines", " spaces ",
           "null,", "", "\\", "'", "''", "\t", "ünïcode"]  # fmt: skip
# all that an argument can hold, undecodable bytes (lone surrogates) included
arguments = st.text(st.characters(exclude_characters="\0", exclude_categories=()))


def through_hydra(token):
    """What a config field holds after Hydra has parsed a token, once directly and once as a sweep hands it on."""
    (override,) = OverridesParser.create().parse_overrides([token])
    assert not override.is_sweep_override()
    again = f"{override.get_key_element()}={override.get_value_element_as_str()}"
    (swept,) = OverridesParser.create().parse_overrides([again])
    found = []
    for each in (override, swept):
        config = OmegaConf.create({"field": None, "name": "value"})
        OmegaConf.update(config, "field", each.value())
        found.append(config.field)
    assert found[0] == found[1]
    return found[0]


@given(arguments, st.sampled_from(argv.TEXT_FIELDS))
def test_any_text_is_taken_verbatim(text, field):
    (token,) = argv.for_hydra([f"{field}={text}"])
    assert through_hydra(token) == (None if text == "null" else text)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_is_taken_verbatim(text):
    (token,) = argv.for_hydra([f"prompt={text}"])
    assert through_hydra(token) == text
    assert through_hydra(argv.for_hydra([f"++prompt={text}"])[0]) == text
    GlobalHydra.instance().clear()
    with initialize_config_module("colonnade.conf", version_base="1.3"):
        assert compose("config", overrides=[token]).prompt == text


@given(arguments)
def test_what_is_escaped_reads_back(text):
    assert OmegaConf.create({"field": argv.escape(text)}).field == text


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["preset=foo"], "known: claim, digits, memory, regression, smoke, soma"),
        (["estimator=spsa,foo"], "estimator=foo: unknown; known: activation, agzo, backprop, delta, fzoo"),
        (["source=foo"], "known: arrays, digits, stdlib, text"),
        (["--frobnicate"], "no such flag"),
        (["seed"], "write name=value"),
        (["--cfg"], "a value is missing"),
        (["--cfg", "jobs"], "known: job, hydra, all"),
        (["--cfg=everything"], "known: job, hydra, all"),
    ],
)
def test_what_is_not_understood(tokens, words):
    with pytest.raises(UserError, match=words):
        argv.for_hydra(tokens)


def test_flags_go_first_and_overrides_keep_their_order():
    overrides = ["seed=1,2", "train.steps=5", "router.areas=[{name: a}]", "~tracking", "+x=1", "preset=smoke,digits"]
    tokens = [*overrides[:2], "--cfg", "job", *overrides[2:5], "-m", overrides[5]]
    assert argv.for_hydra(tokens) == ["--cfg", "job", "-m", *overrides]


def test_the_last_value_of_a_text_field_counts():
    assert argv.text_of(["run=a", "seed=1", "run=b=c"], "run") == "b=c"
    assert argv.text_of(["run=a", "run=null"], "run") is None
    assert argv.text_of(["runs=a"], "run") is None
