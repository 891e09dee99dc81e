"""Checks of single values. Each refusal is one line that names the field, the value and the limit.

`validation.py` says which field must pass which.
"""

from collections.abc import Callable, Iterable
from typing import Any

from jaxpaged.errors import InvalidFieldError

# Floats reach the device in 32 bits.
MAX_FLOAT = 3.4028234e38
MIN_FLOAT = 1.1754944e-38


def check_float(
    name: str,
    value: Any,
    is_ok: Callable[[float], bool] = lambda value: True,
    limit: str = "",
    *,
    field: str | None = None,
) -> float:
    """`field` is the field's name where `name` is that of a part of it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not asked `math.isfinite`: that fails on an integer above every float.
    if not (is_number and abs(value) <= MAX_FLOAT and is_ok(value)):
        line = f"{name}={value!r} must be a finite number {limit}".rstrip()
        raise InvalidFieldError(field or name, line)
    return float(value)


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidFieldError(name, f"{name}={value!r} must be an integer {limit}")
    return value


def check_bool(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidFieldError(name, f"{name}={value!r} must be true or false")
    return value


def check_id(what: str, token_id: Any, vocab_size: int, *, field: str) -> int:
    try:
        number = token_id.__index__()  # numpy's integers too
    except (AttributeError, TypeError):  # an array has the method, and refuses
        raise InvalidFieldError(field, f"{what} is {token_id!r}, not an integer") from None
    if not 0 <= number < vocab_size:
        raise InvalidFieldError(
            field, f"{what} is {number}: ids are 0 to {vocab_size - 1} in this model's vocabulary"
        )
    return number


def check_ids(name: str, token_ids: Any, vocab_size: int) -> frozenset[int]:
    if not isinstance(token_ids, Iterable):
        raise InvalidFieldError(name, f"{name}={token_ids!r} must be a list of token ids")
    return frozenset(
        check_id(f"{name}[{i}]", token_id, vocab_size, field=name)
        for i, token_id in enumerate(token_ids)
    )
