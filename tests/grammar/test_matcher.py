"""Masks allow exactly what keeps a text inside its grammar, and ends only where it is complete."""

import json
import re

import numpy as np
import pytest
from helpers.byte_tokenizer import BOS, EOS, TURN_END, ByteTokenizer
from helpers.grammar_walks import allowed_ids, ids_of_mask, walk

from jaxpaged.grammar import MaskFiller, Matcher, Vocabulary, grammar_of, mask_width
from jaxpaged.sampling_params import Constraint

VOCABULARY = Vocabulary.of(ByteTokenizer(), 300)  # the logits are wider than the tokenizer
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "한"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# More derivatives than the compiler makes of one grammar, after a while.
TOO_COMPLEX = "((a{1,1000}){1,1000}){1,1000}"


def matcher_of(*, ends: tuple[int, ...] = (EOS,), vocabulary=VOCABULARY, **constraint) -> Matcher:
    return Matcher(vocabulary, grammar_of(Constraint(**constraint), vocabulary), frozenset(ends))


def text_of(ids: list[int]) -> str:
    return bytes(ids).decode()


def characters(ids: list[int]) -> str:
    return "".join(chr(i) for i in ids if i < 128)


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_json_schema_walks(schema):
    matcher = matcher_of(json_schema=schema)
    rng = np.random.default_rng(0)
    for _ in range(25):
        value = json.loads(text_of(walk(matcher.copy(), rng, end_token_ids=[EOS])))
        assert {"name", "age"} <= set(value) <= {"name", "age", "tags"}
        assert isinstance(value["name"], str) and len(value["name"]) <= 8
        assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
        assert set(value.get("tags", [])) <= {"a", "한"} and len(value.get("tags", [])) <= 3


def test_a_walk_that_ignores_the_mask_is_refused():
    """The control of all walks: `accept` takes nothing that a mask does not allow."""
    matcher = matcher_of(json_schema=SCHEMA)
    rng = np.random.default_rng(0)
    for _ in range(25):
        other = matcher.copy()
        allowed = set(allowed_ids(other))
        token_id = int(rng.choice([i for i in range(256) if i not in allowed]))
        with pytest.raises(RuntimeError, match=rf"tokens \[{token_id}\] do not match the grammar"):
            other.accept([token_id])


def test_the_empty_schema_is_any_json():
    matcher = matcher_of(json_schema={})
    for value in ['{"a": [1, -2.5e3, null]}', '"x"', "true"]:
        other = matcher.copy()
        other.accept(list(value.encode()))
        assert other.is_complete


@pytest.mark.parametrize(
    "regex", [r"[A-Z]{2}-[0-9]{1,3}(\.5)?", "a/b|c\nd", r"^(?i:yes)$", "[가-힣]{2,3}!", "(a|b)*c"]
)
def test_regex_walks(regex: str):
    matcher = matcher_of(regex=regex)
    rng = np.random.default_rng(1)
    for _ in range(10):
        assert re.fullmatch(regex, text_of(walk(matcher.copy(), rng, end_token_ids=[EOS])))


def test_choice():
    choices = ["a", "ab", 'say "é"\\\n', "<|eos|>"]
    matcher = matcher_of(choice=choices)
    rng = np.random.default_rng(2)
    texts = {text_of(walk(matcher.copy(), rng, end_token_ids=[EOS])) for _ in range(60)}
    assert texts == set(choices)
    matcher.accept([ord("a")])
    assert allowed_ids(matcher) == [ord("b"), EOS]
    matcher.accept([ord("b")])
    assert allowed_ids(matcher) == [EOS]  # nothing can follow


def test_many_choices():
    matcher = matcher_of(choice=[f"choice {i}" for i in range(3000)])
    matcher.accept(list(b"choice 299"))
    assert characters(allowed_ids(matcher)) == "0123456789"
    assert matcher.is_complete


def test_lark_grammar_counts():
    matcher = matcher_of(grammar='start: "(" start* ")"')
    rng = np.random.default_rng(3)
    for _ in range(10):
        depth = 0
        for char in text_of(walk(matcher.copy(), rng, end_token_ids=[EOS])):
            depth += 1 if char == "(" else -1
            assert depth >= 0
        assert depth == 0


def test_characters_split_over_tokens():
    matcher = matcher_of(choice=["한😀"])
    for byte in "한😀".encode():
        assert not matcher.is_complete
        assert allowed_ids(matcher) == [byte]
        matcher.accept([byte])
    assert matcher.is_complete


def test_ends_only_where_the_text_is_complete():
    # A stop id may be an ordinary token: it is not part of the text, so "ab" cannot be written.
    matcher = matcher_of(regex="a[bc]*", ends=(EOS, TURN_END, ord("b")))
    assert allowed_ids(matcher) == [ord("a")]
    matcher.accept([ord("a")])
    assert allowed_ids(matcher) == [ord("b"), ord("c"), EOS, TURN_END]
    matcher.accept([ord("c"), ord("b")])
    assert matcher.is_complete
    assert allowed_ids(matcher) == [ord("b"), EOS, TURN_END]
    with pytest.raises(RuntimeError, match="comes after the end"):
        matcher.accept([ord("c")])


def test_an_end_inside_a_text_is_refused():
    matcher = matcher_of(regex="ab")
    with pytest.raises(RuntimeError, match="do not end the text"):
        matcher.accept([ord("a"), EOS])


def test_text_after_a_finished_grammar_is_refused():
    matcher = matcher_of(regex="ab")
    with pytest.raises(RuntimeError, match="do not match the grammar"):
        matcher.accept(list(b"abb"))
    matcher = matcher_of(regex="ab")
    matcher.accept(list(b"ab"))
    with pytest.raises(RuntimeError, match="do not match the grammar"):
        matcher.accept([ord("b")])


def test_eos_that_ends_nothing_is_never_allowed():
    matcher = matcher_of(regex="a+", ends=())
    matcher.accept([ord("a")])
    assert allowed_ids(matcher) == [ord("a")]
    matcher = matcher_of(regex="a", ends=(TURN_END,))
    matcher.accept([ord("a")])
    assert allowed_ids(matcher) == [TURN_END]


def test_special_and_unknown_ids_are_never_allowed():
    matcher = matcher_of(regex=r"(?s:.*)")
    ids = allowed_ids(matcher)
    assert [i for i in ids if i > 255] == [EOS]
    assert 0xFF not in ids  # no UTF-8 text holds it
    with pytest.raises(RuntimeError, match=rf"tokens \[{BOS}\] do not match"):
        matcher.copy().accept([BOS])
    with pytest.raises(RuntimeError, match=r"\[300\] are outside the vocabulary"):
        matcher.accept([300])


def test_a_special_token_that_the_grammar_names():
    matcher = matcher_of(grammar='start: <|bos|> "a"')
    assert allowed_ids(matcher) == [BOS]
    matcher.accept([BOS, ord("a")])
    assert matcher.is_complete


def test_all_spellings_are_allowed():
    tokens = (*VOCABULARY.tokens[:290], b"na", b"name", b"a", b"nb", *VOCABULARY.tokens[294:])
    vocabulary = Vocabulary(tokens, VOCABULARY.special_token_ids, VOCABULARY.eos_token_ids)
    matcher = matcher_of(choice=["name"], vocabulary=vocabulary)
    assert allowed_ids(matcher) == [ord("n"), 290, 291]
    matcher.accept([ord("n")])
    assert allowed_ids(matcher) == [ord("a"), 292]  # the same bytes twice


def test_accepting_at_once_is_accepting_one_by_one():
    ids = walk(matcher_of(json_schema=SCHEMA), np.random.default_rng(5), end_token_ids=[EOS])
    stepwise = matcher_of(json_schema=SCHEMA)
    for k, token_id in enumerate(ids):
        at_once = matcher_of(json_schema=SCHEMA)
        at_once.accept(ids[:k])
        assert allowed_ids(at_once) == allowed_ids(stepwise)
        stepwise.accept([token_id])


def test_a_copy_goes_its_own_way():
    matcher = matcher_of(regex="ab|cd")
    other = matcher.copy()
    other.accept([ord("c")])
    assert characters(allowed_ids(matcher)) == "ac"
    assert characters(allowed_ids(other)) == "d"
    other.accept([ord("d"), EOS])
    matcher.accept([ord("a"), ord("b")])
    assert allowed_ids(matcher) == [EOS]


def test_mask_filler_fills_rows_as_they_are():
    matchers = [matcher_of(regex=f"[a-{chr(ord('b') + i)}]x?") for i in range(6)]
    matchers[3].accept([ord("a")])
    rows = [*matchers[:2], None, *matchers[2:], None]
    masks = np.full((len(rows), mask_width(300)), -1, np.int32)
    MaskFiller(num_threads=2).fill(rows, masks)
    for matcher, mask in zip(rows, masks, strict=True):
        if matcher is None:
            assert (mask == -1).all()
        else:
            assert ids_of_mask(mask) == allowed_ids(matcher)
    MaskFiller(num_threads=2).fill([None], masks[:1])


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros(mask_width(300) - 1, np.uint32),
        np.zeros(mask_width(300), np.uint64),
        np.zeros(2 * mask_width(300), np.uint32)[::2],
    ],
)
def test_masks_of_another_form_are_refused(mask: np.ndarray):
    matcher = matcher_of(regex="a")
    with pytest.raises(ValueError, match="mask"):
        matcher.fill(mask)
    with pytest.raises(ValueError, match="mask"):
        MaskFiller(num_threads=1).fill([matcher], mask[None])


def test_a_grammar_that_becomes_too_complex_stops_alone():
    hostile, neighbour = matcher_of(regex=TOO_COMPLEX), matcher_of(regex="a")
    masks = np.zeros((2, mask_width(300)), np.uint32)
    filler = MaskFiller(num_threads=2)
    for _ in range(500):
        hostile.accept([ord("a")])
        filler.fill([hostile, neighbour], masks)
        assert ids_of_mask(masks[1]) == [ord("a")]
        if hostile.error is not None:
            break
    assert hostile.error is not None and "too many expressions" in hostile.error
    assert ids_of_mask(masks[0]) == []
    assert not hostile.is_complete
    hostile.accept([ord("a")])  # the token of a step that was under way


def test_copies_share_the_limits_and_other_matchers_do_not():
    matcher, other = matcher_of(regex=TOO_COMPLEX), matcher_of(regex=TOO_COMPLEX)
    copied = matcher.copy()
    while matcher.error is None:
        matcher.accept([ord("a")])
        allowed_ids(matcher)
    for follower, goes_on in ((copied, False), (other, True)):
        follower.accept([ord("a")])
        assert (ord("a") in allowed_ids(follower)) == goes_on
        assert (follower.error is None) == goes_on


def test_a_grammar_that_was_not_checked():
    with pytest.raises(ValueError, match=r"grammar is refused: .*unknown name"):
        Matcher(VOCABULARY, "start: foo", frozenset({EOS}))
