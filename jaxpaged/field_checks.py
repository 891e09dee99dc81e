"""Checks of single values. Each refusal is one line that names the field, the value and the limit.

`validation.py` says which field must pass which.
"""

from collections.abc import Callable, Iterable
from numbers import Integral, Real
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
    is_number = isinstance(value, Real) and not isinstance(value, bool)  # numpy's too
    number: Any = float(value) if is_number and not isinstance(value, Integral) else value
    # Compared, not asked `math.isfinite`: that fails on an integer above every float.
    if not (is_number and abs(number) <= MAX_FLOAT and is_ok(number)):
        line = f"{name}={value!r} must be a finite number {limit}".rstrip()
        raise InvalidFieldError(field or name, line)
    return float(number)


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    is_int = isinstance(value, Integral) and not isinstance(value, bool)  # numpy's too
    number: Any = int(value) if is_int else value
    if not is_int or number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidFieldError(name, f"{name}={value!r} must be an integer {limit}")
    return number


def check_bool(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidFieldError(name, f"{name}={value!r} must be true or false")
    return value


def check_text(name: str, text: str) -> None:
    """Refuses half of a surrogate pair, which no byte sequence encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidFieldError(
            name, f"{name} holds a lone surrogate at character {error.start}"
        ) from error


def check_id(what: str, token_id: Any, vocab_size: int, *, field: str) -> int:
    try:
        number = token_id.__index__()  # numpy's integers too
    except (AttributeError, TypeError):  # an array has the method, and refuses
        number = None
    if number is None or isinstance(token_id, bool):
        raise InvalidFieldError(field, f"{what} is {token_id!r}, not an integer")
    if not 0 <= number < vocab_size:
        raise InvalidFieldError(
            field, f"{what} is {number}: ids are 0 to {vocab_size - 1} in this model's vocabulary"
        )
    return number


def check_ids(name: str, token_ids: Any, vocab_size: int, *, what: str | None = None) -> list[int]:
    """The ids in their order.

    Args:
      what: names one of them in a message, before its index.
    """
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, str | bytes):
        raise InvalidFieldError(name, f"{name}={token_ids!r:.80} must be a list of token ids")
    checked = list(token_ids)
    for i, token_id in enumerate(checked):
        # Messages are made for bad ids alone: there may be a whole vocabulary of good ones.
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            one = f"{name}[{i}]" if what is None else f"{what} {i}"
            checked[i] = check_id(one, token_id, vocab_size, field=name)
    return checked
