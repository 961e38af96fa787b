"""What a person typed, made ready for Hydra, and what Hydra complained of, made ready for a person.

Hydra's grammar refuses common text (`prompt=def f(x):`, globs, quotes). Fields that hold text or paths are therefore
taken verbatim after the first `=`: plain ones are handed on, the others are put into the composed config afterwards.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files

from ..kernels.errors import UserError

TEXT_FIELDS = ("run", "source.path", "input", "prompt", "tracking.uri", "tracking.experiment", "where", "to")
GROUPS = ("preset", "source", "router", "expert", "estimator", "optimizer", "ensemble", "engine", "tracking")
_FLAGS = ("--help", "-h", "--cfg", "-c", "--multirun", "-m", "--info", "-i", "--resolve", "--package", "-p",
          "--hydra-help", "--version")  # fmt: skip
_TAKES_VALUE = ("--cfg", "-c", "--package", "-p")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")
_RESERVED = re.compile(r"(?i)(null|true|false|[+-]?(\d[\d_]*)?\.?\d*(e[+-]?\d+)?|[+-]?(inf|nan))")


def options(group: str) -> list[str]:
    """Names that a config group offers."""
    folder = files("colonnade.conf") / group
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def split(tokens: list[str]) -> tuple[list[str], dict[str, str]]:
    """(tokens for Hydra, text fields to put into the config afterwards).

    Raises:
        UserError: a token that is neither an override nor a flag, or a group option that does not exist.
    """
    plain, texts = [], {}
    value_of_flag = False
    for token in tokens:
        if value_of_flag:
            plain.append(token)
            value_of_flag = False
            continue
        if token.startswith("-"):
            flag = token.split("=", 1)[0]
            if flag not in _FLAGS:
                raise UserError(f"{flag}: no such flag; fields are set as name=value, flags are --cfg, --help, -m")
            value_of_flag = token in _TAKES_VALUE
            plain.append(token)
            continue
        if token.startswith("~"):
            plain.append(token)
            continue
        field, equals, value = token.partition("=")
        if not equals:
            raise UserError(f"{token}: not understood; write name=value, as in train.steps=200")
        name = field.lstrip("+")
        if name in TEXT_FIELDS:
            if value == "" or not _PLAIN.fullmatch(value) or _RESERVED.fullmatch(value):
                texts[name] = value
                continue
        elif name in GROUPS:
            known = options(name)
            for option in value.split(","):
                if option not in known:
                    raise UserError(f"{name}={option}: unknown; known: {', '.join(known)}")
        plain.append(token)
    return plain, texts


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
