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
from fractions import Fraction
from typing import Any

import llguidance

from jaxpaged.errors import InvalidFieldError
from jaxpaged.front_checks import check_constraint
from jaxpaged.grammar.vocabulary import Vocabulary
from jaxpaged.sampling_params import MAX_CHOICE_BYTES, Constraint

MAX_SCHEMA_BYTES = 65536
MAX_GRAMMAR_BYTES = 16384
MAX_REGEX_BYTES = 4096
_MAX_LINE = 160
_MAX_LINES = 12

# To see that an intersection or a complement is not empty can take exponential time. A unit of this
# fuel costs up to 70 microseconds there and some nanoseconds in plain grammars, which need more.
_FUEL = 1_000_000
_FUEL_OF_INTERSECTIONS = 10_000
_INTERSECTION_MARKS = ("&", "~")

# From the name's own line: \s* there would try every run of blank lines from each of its lines.
_GBNF_RULE = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)

# All ways to read a text so far; some grammars have more of them with every token.
_MAX_ITEMS_A_STEP = 2000

# An automaton that divides by n has n states, and one for several divisors has their product.
MAX_DIVISORS = 20_000
# A power of ten is computed in one piece, without the other threads; JSON's doubles end at 1e308.
MAX_DIVISOR_CHARACTERS = 32
MAX_DIVISOR_EXPONENT = 308
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*([-+.\deE]+)')
_ESCAPE = re.compile(r"\\u([\da-fA-F]{4})")

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
    _check_divisors(name, body)
    top = _TOP_WITH_SPACE if vocabulary.strips_leading_space else _TOP
    grammar = json.dumps({"grammars": [{"lark_grammar": top}, {"name": "body", **body}]})
    intersects = any(mark in body.get("lark_grammar", "") for mark in _INTERSECTION_MARKS)
    limits = parser_limits(_FUEL_OF_INTERSECTIONS if intersects else _FUEL)
    matcher = llguidance.LLMatcher(vocabulary.index, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # why: only the first step finds that no text matches at all
    if name == "json_schema" and not matcher.is_error():
        _try_object(matcher, vocabulary)
    if matcher.is_error():
        message = error_of(matcher)
        if "NoExtension" in message:
            message = "no text of this model's tokens matches it"
        if name == "grammar" and _GBNF_RULE.search(body["lark_grammar"]):
            message += ' (this looks like GBNF: give Lark\'s notation, as start: "a" | "b")'
        raise InvalidFieldError(f"constraint.{name}", f"constraint.{name} is refused: {message}")
    return grammar


def parser_limits(initial_lexer_fuel: int = _FUEL) -> llguidance.LLParserLimits:
    """What a grammar may cost, the same where it is checked and where it is followed."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=initial_lexer_fuel,
        step_max_items=_MAX_ITEMS_A_STEP,
        verbose_errors=False,
    )


def _try_object(matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
    """Opens an object, if the schema begins with one: it fails here when it has too many keys."""
    brace = next((i for i, token in enumerate(vocabulary.tokens) if token == b"{"), None)
    if brace is not None and matcher.validate_tokens([brace]) == 1:
        matcher.consume_tokens([brace])
        matcher.compute_bitmask()


def _check_divisors(name: str, body: Mapping[str, Any]) -> None:
    """Refuses what would take minutes and gigabytes, for which llguidance has no limit."""
    text = body["lark_grammar"] if "lark_grammar" in body else json.dumps(body["json_schema"])
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    product = 1
    for number in _DIVISOR.findall(text):
        product *= _numerator(name, number)
        if product > MAX_DIVISORS:
            raise _invalid(
                name,
                f"has multipleOf={number}: all of them multiplied must be at most {MAX_DIVISORS}",
            )


def _numerator(name: str, number: str) -> int:
    """The divisor's numerator; 1 where `number` is none, which llguidance refuses."""
    if len(number) > MAX_DIVISOR_CHARACTERS:
        raise _invalid(
            name,
            f"has multipleOf={number[:16]}... of {len(number)} characters: "
            f"at most {MAX_DIVISOR_CHARACTERS} are allowed",
        )
    try:
        exponent = int(number.lower().partition("e")[2] or 0)
        value = Fraction(number) if abs(exponent) <= MAX_DIVISOR_EXPONENT else None
    except ValueError:
        return 1
    if value is None:
        raise _invalid(
            name,
            f"has multipleOf={number}: its exponent must be at most {MAX_DIVISOR_EXPONENT}, "
            f"with either sign",
        )
    return max(1, abs(value.numerator))


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
