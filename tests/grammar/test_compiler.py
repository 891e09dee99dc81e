"""Constraints are checked, bounded, and refused in the compiler's own words."""

import json

import pytest
from helpers.byte_tokenizer import EOS, ByteTokenizer

from jaxpaged.errors import InvalidFieldError
from jaxpaged.grammar import Matcher, Vocabulary, compiler, grammar_of
from jaxpaged.grammar.compiler import MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES
from jaxpaged.sampling_params import Constraint

VOCABULARY = Vocabulary.of(ByteTokenizer(), 260)


def nested_schema(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def matches(constraint: Constraint, text: str) -> bool:
    matcher = Matcher(VOCABULARY, grammar_of(constraint, VOCABULARY), frozenset({EOS}))
    try:
        matcher.accept(list(text.encode()))
    except RuntimeError:
        return False
    return matcher.is_complete


def refusal(**constraint) -> InvalidFieldError:
    with pytest.raises(InvalidFieldError) as caught:
        grammar_of(Constraint(**constraint), VOCABULARY)
    assert "\n" not in str(caught.value)
    return caught.value


# More keys than a step of the parser may look at.
WIDE_SCHEMA = {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}


DIVISOR = 'start: %%json {"type":"number","multipleOf":%s}'


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({}, "exactly one of json_schema, regex, choice, grammar, it sets none"),
        ({"regex": "a", "choice": ["a"]}, "it sets regex, choice"),
    ],
)
def test_exactly_one_field(constraint: dict, message: str):
    error = refusal(**constraint)
    assert error.field == "constraint"
    assert message in str(error)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("regex", b"a", "must be a string, not bytes"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        ("regex", r"[^\s\S]", "no text of this model's tokens matches it"),
        ("regex", "a\ud800", "lone surrogate at character 1"),
        ("choice", "abc", "must be a sequence of strings, not str"),
        ("choice", [], "at least one string"),
        ("choice", ["a", ""], "must not hold an empty string"),
        ("choice", ["a", 1], "must be strings only, not int"),
        ("json_schema", 3, "must be a JSON text or a mapping, not int"),
        ("json_schema", "{", "is not JSON: Expecting property name"),
        ("json_schema", '{"const": NaN}', "is not JSON: Out of range float"),
        ("json_schema", {"const": {1, 2}}, "is not JSON: Object of type set"),
        ("json_schema", "3", "schema must be an object or boolean"),
        ("json_schema", {"type": "strin"}, "Invalid type: strin"),
        ("json_schema", {"type": "array", "uniqueItems": True}, r'Unimplemented keys: ["unique'),
        ("json_schema", {"$ref": "https://example.com/a.json"}, "does not fetch resources"),
        ("json_schema", {"multipleOf": 30011}, "multipleOf=30011: all of them multiplied"),
        ("json_schema", {"allOf": [{"multipleOf": 257}] * 2}, "multipleOf=257: all of them"),
        ("json_schema", WIDE_SCHEMA, "Too many items"),
        ("grammar", 'start: %json {"multiple\\u004ff": 30011}', "multipleOf=30011"),
        (
            "grammar",
            DIVISOR % "1e20000000",
            "multipleOf=1e20000000: its exponent must be at most 308",
        ),
        ("grammar", DIVISOR % "1E-309", "multipleOf=1E-309: its exponent"),
        ("grammar", DIVISOR % "1e308", "all of them multiplied"),
        # Python reads 4300 digits at most, so Fraction would not judge these.
        (
            "grammar",
            DIVISOR % ("30011." + "0" * 4400),
            "multipleOf=30011.0000000000... of 4406 char",
        ),
        ("grammar", 'start: "a" // "multipleOf":1e20000000', "its exponent must be at most 308"),
        ("grammar", "", "no start"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", "start: <|foo|>", 'unknown special token: "<|foo|>"'),
        ("grammar", '{"grammars": [{"json_schema": {}}]}', "expecting rule, token or statement"),
    ],
)
def test_refused_in_the_compilers_words(name: str, value, message: str):
    error = refusal(**{name: value})
    assert error.field == f"constraint.{name}"
    assert str(error).startswith(f"constraint.{name} ")
    assert message in str(error)


def test_gbnf_is_told_from_other_mistakes():
    assert "give Lark's notation" in str(refusal(grammar='root ::= "a" | "b"'))
    assert "give Lark's notation" in str(refusal(grammar='# yes\n the-root ::= "a"'))
    assert "Lark" not in str(refusal(grammar='start: "a ::= b" foo'))
    assert "give Lark's notation" in str(refusal(grammar='\n\n\t root\n\n ::= "a"'))


@pytest.mark.timeout(60, method="thread")
def test_blank_lines_before_a_gbnf_rule_are_read_once():
    (found,) = compiler._GBNF_RULE.finditer("\n\n\t root ::= a")
    assert found.start() == 2, "a match from line 0 means that each line reads all after it"
    assert compiler._GBNF_RULE.search("\n" * 1_000_000) is None
    assert compiler._GBNF_RULE.search("a\n\r" * 300_000) is None


def test_divisors_that_a_double_holds_are_judged_by_their_value():
    for number in ("1e-7", "0.1", "1.00000000000000000000000000000", "2E+2"):
        grammar_of(Constraint(grammar=DIVISOR % number), VOCABULARY)
    with pytest.raises(InvalidFieldError) as caught:
        grammar_of(Constraint(grammar=DIVISOR % "1e-308"), VOCABULARY)
    assert "too many digits" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "a" * (MAX_REGEX_BYTES + 1)),
        ("regex", "é" * (MAX_REGEX_BYTES // 2 + 1)),
        ("grammar", 'start: "a"' + " " * MAX_GRAMMAR_BYTES),
        ("choice", ["a" * 40000, "b" * 40000]),
        ("json_schema", " " * MAX_SCHEMA_BYTES + "{}"),
        ("json_schema", {"const": "a" * MAX_SCHEMA_BYTES}),
    ],
)
def test_size_limits(name: str, value):
    assert "bytes, at most" in str(refusal(**{name: value}))


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        # Whether three such patterns have a text in common takes exponential time to find out.
        (
            "grammar",
            "start: X\nX: /(?s:.*a.{50}.*)/ & /(?s:.*b.{51}.*)/ & ~/(?s:.*c.{52}.*)/",
            "fuel exhausted",
        ),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("regex", "(" * 2000 + "a" + ")" * 2000, "nested parentheses"),
        ("json_schema", nested_schema(500), "recursion limit exceeded"),
        ("json_schema", "[" * 60000, "is nested too deeply"),
    ],
)
def test_hostile_constraints_are_refused(name: str, value, message: str):
    error = refusal(**{name: value})
    assert message in str(error)
    assert len(str(error)) < 12 * 165


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize(
    "regex", ["((a{1,1000}){1,1000}){1,1000}", "(.{0,5000}a){0,5000}", "[ab]*a[ab]{40}"]
)
def test_large_repetitions_compile(regex: str):
    assert matches(Constraint(regex=regex), "aa" if "ab" not in regex else "a" * 50)


def test_small_intersections_and_complements_compile():
    constraint = Constraint(grammar="start: X\nX: /[a-z ]{1,200}/ & ~/.*(foo|bar).*/")
    assert matches(constraint, "some text")
    assert not matches(constraint, "some foo")


def test_schema_text_cannot_leave_its_place():
    assert "is not JSON" in str(refusal(json_schema='{}}, {"name": "x", "json_schema": {}'))
    grammar = json.loads(grammar_of(Constraint(json_schema='{"type": "null"}'), VOCABULARY))
    assert [set(part) for part in grammar["grammars"]] == [
        {"lark_grammar"},
        {"name", "json_schema"},
    ]


def test_options_of_the_schema_are_kept():
    schema = {"type": "array", "items": {"type": "integer"}}
    assert matches(Constraint(json_schema=schema), "[1, 2]")
    tight = schema | {"x-guidance": {"whitespace_flexible": False}}
    assert not matches(Constraint(json_schema=tight), "[1, 2]")
    assert matches(Constraint(json_schema=tight), "[1,2]")


def test_order_of_properties_is_that_of_the_schema():
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    assert matches(Constraint(json_schema=json.dumps(schema)), '{"b":null,"a":null}')
    assert not matches(Constraint(json_schema=json.dumps(schema)), '{"a":null,"b":null}')


def test_regex_is_unicode():
    assert matches(Constraint(regex=r"\d\w+"), "٣한글")
    assert not matches(Constraint(regex="."), "\n")


def test_the_empty_regex_is_the_empty_text():
    assert matches(Constraint(regex=""), "")
    assert not matches(Constraint(regex=""), "a")
