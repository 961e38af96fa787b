"""Single fields of the config, checked: one line for a value of the wrong kind."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..kernels.errors import UserError


def number(config: DictConfig, field: str, kind: type, optional: bool = False) -> Any:
    """The value of a dotted field as an int, float or bool; UserError where it is none."""
    value = OmegaConf.select(config, field)
    return None if value is None and optional else checked(field, value, kind)


def checked(field: str, value: Any, kind: type) -> Any:
    """`value` as an int, float or bool; UserError that names the field where it is none."""
    wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
    good = isinstance(value, bool) if kind is bool else isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and isinstance(value, float):
        good = value.is_integer()
    if not good:
        raise UserError(f"{field}={value}: must be {wanted}")
    return kind(value)


def in_range(config: DictConfig, field: str, low: int, high: int, optional: bool = False) -> Any:
    """The value of a dotted field as an int between bounds, or None where that is allowed and given."""
    value = number(config, field, int, optional)
    if value is not None and not low <= value <= high:
        raise UserError(f"{field}={value}: must be between {low} and {high}{', or null' if optional else ''}")
    return value


def text(config: DictConfig, field: str) -> str | None:
    """The value of a dotted field as text, None where it is null or empty."""
    value = OmegaConf.select(config, field)
    return None if value is None or value == "" else str(value)
