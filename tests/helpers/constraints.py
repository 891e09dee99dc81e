"""Constraints whose texts end soon, and what their texts must be."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.outputs import RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import Constraint, SamplingParams

GREEDY = {"temperature": 0.0, "max_tokens": 100}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "한"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"[A-Z]{2}-[0-9]{1,6}(\.5)?"
CHOICES = ["yes", "yesterday", "no", "아니요"]
# As many b as a, at most four; one letter behind them.
GRAMMAR = """start: four /[c-z]/
four: "a" three "b" | "ab"
three: "a" two "b" | "ab"
two: "a" one "b" | "ab"
one: "ab"
"""


@dataclass(frozen=True)
class Case:
    """A constraint, and whether a text is one of its texts, found out without it."""

    constraint: Constraint
    allows: Callable[[str], bool]


def _is_of_schema(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and {"name", "age"} <= set(value) <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and set(value.get("tags", [])) <= {"a", "한"}
        and len(value.get("tags", [])) <= 2
    )


def _is_of_grammar(text: str) -> bool:
    half = len(text) // 2
    return 1 <= half <= 4 and text[:-1] == "a" * half + "b" * half and "c" <= text[-1] <= "z"


CASES = {
    "json_schema": Case(Constraint(json_schema=SCHEMA), _is_of_schema),
    "schema as text": Case(Constraint(json_schema=json.dumps(SCHEMA)), _is_of_schema),
    "regex": Case(Constraint(regex=REGEX), lambda text: bool(re.fullmatch(REGEX, text))),
    "choice": Case(Constraint(choice=CHOICES), lambda text: text in CHOICES),
    "grammar": Case(Constraint(grammar=GRAMMAR), _is_of_grammar),
}


def constrained(constraint: Constraint | None = None, **options: Any) -> SamplingParams:
    """Greedy unless told otherwise; constraints also by the name of their field."""
    if constraint is None:
        kinds = options.keys() & {"regex", "choice"}
        constraint = Constraint(**{kind: options.pop(kind) for kind in kinds})
    return SamplingParams(**{"constraint": constraint, **GREEDY, **options})


def whole(output: RequestOutput) -> list[tuple[list[int], str, FinishReason]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in output.completions]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, num_tokens).tolist()
