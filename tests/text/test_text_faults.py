"""Faults of streamed text that others had, with whole tokenizers and one id a step."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_gguf import THINK, byte_level_vocabulary, spm_vocabulary, write_gguf

from jaxpaged.checkpoint import locate
from jaxpaged.text import Detokenizer, StopChecker, Tokenizer, load_tokenizer

TOKENIZERS = pytest.mark.parametrize("vocabulary", [byte_level_vocabulary, spm_vocabulary])


def load(folder: Path, vocabulary: Callable[[], dict]) -> Tokenizer:
    tokenizer = load_tokenizer(locate(str(write_gguf(folder / "m.gguf", vocabulary=vocabulary()))))
    assert tokenizer is not None
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
def test_added_tokens_get_no_spaces(skip: bool, tmp_path: Path):
    """B44: THINK is added and not special, the end is special."""
    tokenizer = load(tmp_path, byte_level_vocabulary)
    ids = tokenizer.encode("the<think>in<|end|>the")
    assert THINK in ids
    text = "".join(pieces_of(tokenizer, ids, skip))
    assert text == tokenizer.decode(ids, skip)
    assert text == ("the<think>inthe" if skip else "the<think>in<|end|>the")


@TOKENIZERS
def test_whole_characters_and_one_replacement_at_a_cut(vocabulary, tmp_path: Path):
    """B48."""
    tokenizer = load(tmp_path, vocabulary)
    for text in ("🤖", "안녕하세요", "สวัสดี", "a🤖b한 é"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pieces_of(tokenizer, ids)) == text
        for num_ids in range(len(ids)):
            pieces = pieces_of(tokenizer, ids[:num_ids])
            assert "\ufffd" not in "".join(pieces[:-1]), "in the middle"
            assert pieces[-1] in ("", "\ufffd")
            assert "".join(pieces) == tokenizer.decode(ids[:num_ids])


@TOKENIZERS
def test_random_ids_never_stop_a_stream(vocabulary, tmp_path: Path):
    """B49."""
    tokenizer = load(tmp_path, vocabulary)
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 500).tolist()
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@TOKENIZERS
def test_spaces_in_front_stay(vocabulary, tmp_path: Path):
    """B51: streamed behind a prompt = the whole text less the prompt's."""
    tokenizer = load(tmp_path, vocabulary)
    prompt = tokenizer.encode("the")
    output = tokenizer.encode("  the in hello", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    text = "".join([*(detokenizer.push([i]) for i in output), detokenizer.finish()])
    whole = tokenizer.decode([*prompt, *output])
    assert text == whole.removeprefix(tokenizer.decode(prompt)) and text.startswith("  ")


@pytest.mark.parametrize("include", [False, True])
def test_no_part_of_a_stop_string_is_shown(include: bool):
    """B45: the stop string begins with a token, and ends inside another one."""
    checker = StopChecker(["DEFGHIJ"], include_stop_string=include)
    matches = [checker.push(piece) for piece in ("ABC", "DEF", "G", "HI", "JK")]
    assert [match.text for match in matches] == ["ABC", "", "", "", "DEFGHIJ" * include]
    assert [match.stop for match in matches] == [None] * 4 + ["DEFGHIJ"]
