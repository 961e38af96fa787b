"""What a person typed, made ready for Hydra, and what Hydra complained of, made ready for a person.

Hydra's grammar refuses common text (`prompt=def f(x):`, globs, quotes). Fields that hold text or paths are therefore
taken verbatim after the first `=` and quoted for Hydra, so that they are recorded and swept like any other override.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files

from ..kernels.errors import UserError

TEXT_FIELDS = ("run", "source.path", "input", "prompt", "tracking.uri", "tracking.experiment", "where", "to")
GROUPS = ("preset", "source", "router", "expert", "estimator", "optimizer", "ensemble", "engine", "tracking")
MULTIRUN = ("-m", "--multirun")
_FLAGS = (*MULTIRUN, "--help", "-h", "--cfg", "-c", "--info", "-i", "--resolve", "--package", "-p", "--hydra-help")
_CFG = ("--cfg", "-c")
_CFG_VALUES = ("job", "hydra", "all")


def options(group: str) -> list[str]:
    """Names that a config group offers."""
    folder = files("colonnade.conf") / group
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def for_hydra(tokens: list[str]) -> list[str]:
    """The same tokens, flags first, with text fields quoted as Hydra's grammar wants them.

    Raises:
        UserError: a token that is neither an override nor a flag, or a group option that does not exist.
    """
    flags, overrides = [], []
    flag_before = ""
    for token in tokens:
        if flag_before in _CFG:
            if token not in _CFG_VALUES:
                raise UserError(f"{flag_before} {token}: unknown; known: {', '.join(_CFG_VALUES)}")
            flags.append(token)
            flag_before = ""
        elif flag_before:
            flags.append(token)
            flag_before = ""
        elif token.startswith("-"):
            flag, equals, value = token.partition("=")
            if flag not in _FLAGS:
                raise UserError(f"{flag}: no such flag; fields are set as name=value, flags are --cfg, --help, -m")
            if equals and flag in _CFG and value not in _CFG_VALUES:
                raise UserError(f"{token}: unknown; known: {', '.join(_CFG_VALUES)}")
            flag_before = token if token in (*_CFG, "--package", "-p") else ""
            flags.append(token)
        else:
            overrides.append(token if token.startswith("~") else _override(token))
    if flag_before:
        raise UserError(f"{flag_before}: a value is missing after it, as in --cfg job")
    # argparse, which Hydra uses, loses overrides that stand on both sides of a flag
    return [*flags, *overrides]


def _override(token: str) -> str:
    field, equals, value = token.partition("=")
    if not equals:
        raise UserError(f"{token}: not understood; write name=value, as in train.steps=200")
    name = field.lstrip("+")
    if name in TEXT_FIELDS:
        return f"{field}={quote(value)}"
    if name in GROUPS:
        known = options(name)
        for option in value.split(","):
            if option not in known:
                raise UserError(f"{name}={option}: unknown; known: {', '.join(known)}")
    return token


def quote(text: str) -> str:
    """Text as a quoted string of Hydra's grammar, which reads back verbatim; `null` alone means not given."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return text if text == "null" else QuotedString(escape(text), Quote.single).with_quotes()


def is_multirun(tokens: list[str]) -> bool:
    """Whether the tokens ask for a sweep."""
    return any(token in MULTIRUN for token in tokens)


def text_of(tokens: list[str], name: str) -> str | None:
    """The last value that raw tokens give a text field; None where they give none."""
    values = [
        value for field, equals, value in (t.partition("=") for t in tokens) if equals and field.lstrip("+") == name
    ]
    return values[-1] if values and values[-1] not in ("", "null") else None


def escape(text: str) -> str:
    r"""Text that OmegaConf reads back as `text`: `${` is an interpolation there unless written `\${`."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def explain(error: Exception, known_fields: list[str]) -> str:
    """One line for an exception of Hydra or OmegaConf."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    texts = [str(entry) for entry in chain]
    for text in texts:
        found = re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text)
        if found:
            return _unknown_field(found[2], known_fields)
    for text in texts:
        found = re.search(r"Could not override '([^']+)'", text)
        if found:
            return _unknown_field(found[1], known_fields)
    first = next((line.strip() for line in texts[0].splitlines() if line.strip()), type(error).__name__)
    if "mismatched input" in texts[0] or "token recognition" in texts[0] or "no viable" in texts[0]:
        found = re.search(r"Error when parsing (?:index: \d+, )?string: (.*)", texts[0])
        what = found[1].strip("'") if found else first
        return f"{what}: not understood; put the value in quotes: \"name='value'\""
    return first


def _unknown_field(field: str, known_fields: list[str]) -> str:
    near = difflib.get_close_matches(field, known_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "--cfg job lists the fields"
    return f"{field}: no such field; {hint}"
