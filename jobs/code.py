"""`package:name` in a config: code of the user's own, imported only where the command line repeats it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..kernels.errors import UserError

# fields that may name code
FIELDS = ("loss", "expert.module")
# what this process was told that it may import
_allowed: set[str] = set()


def is_code(value: str) -> bool:
    """Whether a value names code rather than something built in."""
    return ":" in value


def allow(values: list[str]) -> None:
    """Trust these names for the rest of the process: they stood on its command line."""
    _allowed.update(values)


def allow_from(arguments: list[str]) -> None:
    """Trust what the fields that may name code are set to on a command line."""
    pairs = (argument.partition("=") for argument in arguments)
    allow([value for field, _, value in pairs if field in FIELDS and is_code(value)])


def allowed() -> list[str]:
    """Names that are trusted."""
    return sorted(_allowed)


def imported(field: str, value: str) -> Any:
    """The object that `package:name` names; UserError where it is not trusted or not there."""
    if value not in _allowed:
        raise UserError(
            f"{field}={value}: the run names code of your own; repeat {field}={value} on the command line to run it"
        )
    module, _, name = value.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{field}={value}: cannot be imported ({error}); is it on PYTHONPATH?") from None


def deferred(field: str, value: str) -> Callable[..., Any]:
    """A function that imports the named one at its first call."""
    found: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        if not found:
            found.append(imported(field, value))
        return found[0](*arguments)

    return call
