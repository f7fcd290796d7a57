"""Checks of plain numbers among arguments."""

from __future__ import annotations

import math
import operator

from .errors import argument_error


def integer(name: str, value: object) -> int:
    """An integer within 32 bits."""
    try:
        result = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise argument_error(name, repr(value), "an integer") from None
    if not -(2**31) <= result < 2**31:
        raise argument_error(name, result, "within 32 bits")
    return result


def non_negative(name: str, value: object) -> int:
    """An integer of at least 0."""
    result = integer(name, value)
    if result < 0:
        raise argument_error(name, result, "at least 0")
    return result


def positive(name: str, value: object) -> int:
    """An integer of at least 1."""
    result = integer(name, value)
    if result < 1:
        raise argument_error(name, result, "at least 1")
    return result


def optional_non_negative(name: str, value: int | None) -> int:
    """None, or an integer of at least 0; -1 for None, which is WorkspaceOptions::kDefault."""
    return -1 if value is None else non_negative(name, value)


def flag(name: str, value: object) -> bool:
    """True or False, or an integer that stands for one."""
    if not isinstance(value, int):
        raise argument_error(name, repr(value), "True or False")
    return bool(value)


def finite(name: str, value: object) -> float:
    """A number that is neither NaN nor infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise argument_error(name, repr(value), "a finite number")
    return float(value)


def positive_seconds(name: str, value: object) -> float:
    """A finite number above 0."""
    result = finite(name, value)
    if result <= 0.0:
        raise argument_error(name, value, "above 0")
    return result
