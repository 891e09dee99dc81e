"""Vocabularies of real kinds of tokenizers: the text that comes out is the one that was asked."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.grammar_walks import allowed_ids, walk
from helpers.tiny_gguf import (
    BYTE_LEVEL_TOKENS,
    END,
    START,
    byte_level_vocabulary,
    spm_vocabulary,
    write_gguf,
)
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxpaged.checkpoint import locate
from jaxpaged.checkpoint.locate import BUNDLED_MODELS, models_folder
from jaxpaged.errors import UnsupportedOptionError
from jaxpaged.grammar import Matcher, Vocabulary, grammar_of
from jaxpaged.sampling_params import Constraint
from jaxpaged.text import Tokenizer, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"enum": [1, 2, 30]}},
    "required": ["name", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def of_gguf(folder: Path, vocabulary: dict) -> Tokenizer:
    tokenizer = load_tokenizer(locate(str(write_gguf(folder / "m.gguf", vocabulary=vocabulary))))
    assert tokenizer is not None
    return tokenizer


def of_hugging_face() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(BYTE_LEVEL_TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|start|>"), AddedToken("<|end|>")])
    return Tokenizer(
        backend,
        eos_token_ids=frozenset({END}),
        bos_token_id=START,
        chat_template=None,
        special_tokens={},
    )


def matcher_of(tokenizer: Tokenizer, vocab_size: int, **constraint) -> Matcher:
    vocabulary = Vocabulary.of(tokenizer, vocab_size)
    grammar = grammar_of(Constraint(**constraint), vocabulary)
    return Matcher(vocabulary, grammar, tokenizer.eos_token_ids)


def walks(tokenizer: Tokenizer, matcher: Matcher, count: int) -> list[str]:
    rng = np.random.default_rng(0)
    ends = tokenizer.eos_token_ids
    return [tokenizer.decode(walk(matcher.copy(), rng, end_token_ids=ends)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["gguf", "hugging_face"])
def test_byte_level(tmp_path: Path, kind: str):
    tokenizer = of_gguf(tmp_path, byte_level_vocabulary()) if kind == "gguf" else of_hugging_face()
    matcher = matcher_of(tokenizer, 512, json_schema=SCHEMA)
    for text in walks(tokenizer, matcher, 5):
        assert json.loads(text)["count"] in (1, 2, 30)
    matcher = matcher_of(tokenizer, 512, choice=["the 한"])
    assert {tokenizer.token_bytes(i) for i in allowed_ids(matcher)} >= {b"t", b"the"}
    assert set(walks(tokenizer, matcher, 5)) == {"the 한"}


@pytest.mark.parametrize("text", ["hello", " hello", "  hello", "한"])
def test_sentencepiece_text_is_the_one_asked_for(tmp_path: Path, text: str):
    """Decoding drops a space in front, so the tokens have one more."""
    tokenizer = of_gguf(tmp_path, spm_vocabulary())
    assert tokenizer.strips_leading_space
    matcher = matcher_of(tokenizer, tokenizer.vocab_size, choice=[text])
    assert set(walks(tokenizer, matcher, 10)) == {text}
    if not text.startswith(" "):  # encoding drops a space in front, too
        matcher.accept(tokenizer.encode(text, add_special_tokens=False))
        assert matcher.is_complete


def test_ids_of_another_width_than_the_logits():
    tokenizer = ByteTokenizer()
    wide = Vocabulary.of(tokenizer, 1000)
    assert wide.vocab_size == 1000
    assert set(wide.tokens[260:]) == {b""}
    narrow = Vocabulary.of(tokenizer, EOS + 1)
    assert narrow.special_token_ids == {EOS - 1, EOS}
    matcher = Matcher(
        narrow, grammar_of(Constraint(regex="a"), narrow), frozenset({EOS, EOS + 1, 5000})
    )
    matcher.accept([ord("a")])
    assert allowed_ids(matcher) == [EOS]


def test_a_model_without_eos_is_refused():
    with pytest.raises(UnsupportedOptionError, match="has no EOS token"):
        Vocabulary.of(ByteTokenizer(), EOS)


def test_a_vocabulary_travels():
    vocabulary = Vocabulary.of(ByteTokenizer(), 300)
    grammar = grammar_of(Constraint(regex="a"), vocabulary)
    other = pickle.loads(pickle.dumps(vocabulary))  # after its index was built
    assert other == vocabulary
    assert allowed_ids(Matcher(other, grammar, frozenset({EOS}))) == [ord("a")]


@pytest.mark.skipif(
    not (models_folder() / BUNDLED_MODELS["smollm2"]).exists(), reason="needs the bundled model"
)
def test_smollm2():
    tokenizer = load_tokenizer(locate("smollm2"))
    assert tokenizer is not None
    matcher = matcher_of(tokenizer, 49152, json_schema=SCHEMA)
    for text in walks(tokenizer, matcher, 5):
        value = json.loads(text)
        assert set(value) == {"name", "count"} and len(value["name"]) <= 20
    text = '{"name":"안녕 \\"x\\"","count":30}'
    matcher.accept(tokenizer.encode(text, add_special_tokens=False))
    assert allowed_ids(matcher) == sorted(tokenizer.eos_token_ids)


def test_another_width_keeps_the_ids_and_needs_an_eos():
    tokenizer = ByteTokenizer()
    (eos,) = tokenizer.eos_token_ids
    vocabulary = Vocabulary.of(tokenizer, eos + 1)
    wider = vocabulary.resized(eos + 40)
    assert wider is not None and wider.vocab_size == eos + 40
    assert wider.tokens[: eos + 1] == vocabulary.tokens and not any(wider.tokens[eos + 1 :])
    assert wider.resized(eos + 1) == vocabulary
    assert vocabulary.resized(eos) is None, "no text could end"
