"""A user's constraint -> a grammar in llguidance's own form, or a refusal in llguidance's words.

A grammar has two parts. The user's part is called `body`; the top part around it

- forbids llguidance to force tokens: a mask then allows every way to spell what must come, and the
  model chooses among them as it does anywhere else;
- begins with the space that some tokenizers drop from the beginning of a text.

Grammars come from strangers. llguidance bounds the work of one step and most of the work of
compiling, but some of it grows faster than the text does. The limits below keep what is accepted
under a second, and a refusal to some seconds (a long chain of rules that ends in an unknown one).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from jaxpaged.errors import InvalidFieldError
from jaxpaged.front_checks import check_constraint
from jaxpaged.grammar.vocabulary import Vocabulary
from jaxpaged.sampling_params import Constraint

MAX_SCHEMA_BYTES = 65536
MAX_CHOICE_BYTES = 65536
MAX_GRAMMAR_BYTES = 16384
MAX_REGEX_BYTES = 4096
_MAX_LINE = 160
_MAX_LINES = 12

# To see that an intersection or a complement is not empty can take exponential time. A unit of this
# fuel costs up to 70 microseconds there and some nanoseconds in plain grammars, which need more.
_FUEL = 1_000_000
_FUEL_OF_INTERSECTIONS = 10_000
_INTERSECTION_MARKS = ("&", "~")

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

_TOP = '%llguidance {"no_forcing": true}\nstart: @body'
_TOP_WITH_SPACE = '%llguidance {"no_forcing": true}\nstart: " " @body'


def grammar_of(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Checks `constraint` and compiles it once; it holds no lock, so it may run in a thread.

    Raises:
      InvalidFieldError: not exactly one field is set, or that one is not valid, too large, or
        nothing that llguidance supports.
    """
    name = check_constraint(constraint)
    body = _BODIES[name](getattr(constraint, name))
    top = _TOP_WITH_SPACE if vocabulary.strips_leading_space else _TOP
    grammar = json.dumps({"grammars": [{"lark_grammar": top}, {"name": "body", **body}]})
    intersects = any(mark in body.get("lark_grammar", "") for mark in _INTERSECTION_MARKS)
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_FUEL_OF_INTERSECTIONS if intersects else _FUEL,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(vocabulary.index, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # why: only the first step finds that no text matches at all
    if matcher.is_error():
        message = error_of(matcher)
        if "NoExtension" in message:
            message = "no text of this model's tokens matches it"
        if name == "grammar" and _GBNF_RULE.search(body["lark_grammar"]):
            message += ' (this looks like GBNF: give Lark\'s notation, as start: "a" | "b")'
        raise InvalidFieldError(f"constraint.{name}", f"constraint.{name} is refused: {message}")
    return grammar


def error_of(matcher: llguidance.LLMatcher) -> str:
    """llguidance's message as one line, without the whole of a long text that it quotes."""
    lines = matcher.get_error().replace("<non-verbose/>", "").splitlines()
    short = [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..." for line in lines]
    return " ".join(" ".join(short[:_MAX_LINES]).split())


def _schema_body(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    name = "json_schema"
    try:
        if isinstance(schema, str):
            _check_size(name, schema, MAX_SCHEMA_BYTES)
            parsed = json.loads(schema)
            json.dumps(parsed, allow_nan=False)  # why: the parser lets NaN pass
        else:
            parsed = dict(schema)
            text = json.dumps(parsed, allow_nan=False, ensure_ascii=False)
            _check_size(name, text, MAX_SCHEMA_BYTES)
    except RecursionError:
        raise _invalid(name, "is nested too deeply") from None
    except InvalidFieldError:
        raise
    except (TypeError, ValueError) as error:
        raise _invalid(name, f"is not JSON: {error}") from error
    return {"json_schema": parsed}


def _regex_body(regex: str) -> dict[str, Any]:
    _check_size("regex", regex, MAX_REGEX_BYTES)
    return {"lark_grammar": f"start: /{llguidance.regex_to_lark(regex, use_ascii='')}/"}


def _choice_body(choice: Sequence[Any]) -> dict[str, Any]:
    name = "choice"
    if not choice:
        raise _invalid(name, "must hold at least one string")
    for text in choice:
        if not isinstance(text, str):
            raise _invalid(name, f"must be strings only, not {type(text).__name__}")
        _check_size(name, text, MAX_CHOICE_BYTES)
        if not text:
            raise _invalid(name, "must not hold an empty string")
    _check_size(name, "".join(choice), MAX_CHOICE_BYTES)
    # One terminal, not one rule for each: a parser's row holds 2000 rules at most.
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choice))}"}


def _grammar_body(grammar: str) -> dict[str, Any]:
    _check_size("grammar", grammar, MAX_GRAMMAR_BYTES)
    return {"lark_grammar": grammar}


_BODIES = {
    "json_schema": _schema_body,
    "regex": _regex_body,
    "choice": _choice_body,
    "grammar": _grammar_body,
}


def _check_size(name: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _invalid(name, f"holds a lone surrogate at character {error.start}") from error
    if size > limit:
        raise _invalid(name, f"has {size} bytes, at most {limit} are allowed")


def _invalid(name: str, message: str) -> InvalidFieldError:
    return InvalidFieldError(f"constraint.{name}", f"constraint.{name} {message}")
