"""Streamed text equals the text of all tokens, however tokens cut its characters."""

from pathlib import Path

import numpy as np
import pytest
from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.tiny_gguf import SPM_TOKENS, THINK, byte_level_vocabulary, spm_vocabulary, write_gguf

from jaxpaged.checkpoint import locate
from jaxpaged.text import Detokenizer, Tokenizer, load_tokenizer

TEXT = "né 안녕하세요 반갑습니다 🤖🧑‍🚀 สวัสดี"


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push([i]) for i in output), detokenizer.finish()]


def of_gguf(folder: Path, vocabulary: dict) -> Tokenizer:
    tokenizer = load_tokenizer(locate(str(write_gguf(folder / "m.gguf", vocabulary=vocabulary))))
    assert tokenizer is not None
    return tokenizer


def test_characters_come_whole():
    tokenizer = ByteTokenizer()
    pieces = stream(tokenizer, [], tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert all(len(piece) <= 1 for piece in pieces)
    # The negative control: token by token, the same ids are mostly U+FFFD.
    assert "\ufffd" in "".join(tokenizer.decode([i]) for i in tokenizer.encode(TEXT))


def test_a_character_waits_for_its_last_byte():
    detokenizer = Detokenizer(ByteTokenizer(), [], skip_special_tokens=True)
    assert detokenizer.push(list(b"ab\xf0\x9f")) == "ab"
    assert detokenizer.push([0xA4]) == ""
    assert detokenizer.push(list(b"\x96c")) == "🤖c"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_incomplete_end_is_flushed_once(num_bytes: int):
    ids = [97, *"🤖".encode()[:num_bytes]]
    assert stream(ByteTokenizer(), [], ids)[-1] == "\ufffd"
    assert "".join(stream(ByteTokenizer(), [], ids)) == "a\ufffd" == ByteTokenizer().decode(ids)


def test_broken_bytes_neither_stick_nor_differ():
    tokenizer = ByteTokenizer()
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = [int(i) for i in rng.integers(0, 260, 100)]
        pieces = stream(tokenizer, [], ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        # Never more than one character behind: three bytes of it may wait.
        detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
        pending = 0
        for i in ids:
            pending = 0 if detokenizer.push([i]) else pending + (i < 256)
            assert pending <= 3


def test_any_grouping_gives_the_same_text():
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode(TEXT), 0xFF, 0xE2, 0x82, EOS]
    rng = np.random.default_rng(1)
    for _ in range(20):
        detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
        cuts = sorted(rng.integers(0, len(ids), 8).tolist())
        groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        text = "".join(detokenizer.push(group) for group in groups) + detokenizer.finish()
        assert text == tokenizer.decode(ids)


def test_no_prompt_text_ever():
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode("a🤖")[:-2]  # ends inside a character
    output = [*"🤖".encode()[2:], *b"ok"]
    text = "".join(stream(tokenizer, prompt, output))
    assert text == tokenizer.decode(output) == "\ufffd\ufffdok"


def test_special_tokens_are_skipped_or_shown(tmp_path: Path):
    tokenizer = of_gguf(tmp_path, byte_level_vocabulary())
    ids = [*tokenizer.encode("in"), THINK, *tokenizer.encode(" the<|end|>")]
    for skip, text in [(True, "in<think> the"), (False, "in<think> the<|end|>")]:
        assert "".join(stream(tokenizer, [], ids, skip)) == text == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("skip", [True, False])
def test_a_space_is_stripped_at_the_beginning_of_a_text_only(tmp_path: Path, skip: bool):
    tokenizer = of_gguf(tmp_path, spm_vocabulary())
    hello = SPM_TOKENS.index("▁hello")
    for prompt in ([], [1], [1, hello]):
        whole = tokenizer.decode([*prompt, hello, hello], skip)
        text = "".join(stream(tokenizer, prompt, [hello, hello], skip))
        assert text == whole.removeprefix(tokenizer.decode(prompt, skip))
    assert "".join(stream(tokenizer, [1, hello], [hello])) == " hello"
    assert "".join(stream(tokenizer, [1], [hello])) == "hello"


def test_byte_tokens_of_sentencepiece(tmp_path: Path):
    tokenizer = of_gguf(tmp_path, spm_vocabulary())
    ids = tokenizer.encode("hello 한국 🤖", add_special_tokens=False)
    pieces = stream(tokenizer, [], ids)
    assert "".join(pieces) == "hello 한국 🤖"


def test_each_token_is_looked_at_once():
    """The cost of a push does not grow with what came before."""

    class Counting(ByteTokenizer):
        calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.calls += 1
            return super().token_bytes(token_id)

    tokenizer = Counting()
    stream(tokenizer, [97] * 1000, [0xF0] * 1000)
    assert tokenizer.calls <= 1000
