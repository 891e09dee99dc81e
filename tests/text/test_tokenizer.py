"""Tokenizers of GGUF files and of Hugging Face folders: right ids, right BOS, exact decoding."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers.byte_tokenizer import BOS, ByteTokenizer
from helpers.tiny_gguf import (
    BYTE_LEVEL_TOKENS,
    END,
    SPM_TOKENS,
    START,
    THINK,
    byte_level_vocabulary,
    spm_vocabulary,
    write_gguf,
)
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxpaged.checkpoint import locate
from jaxpaged.checkpoint.locate import BUNDLED_MODELS, models_folder
from jaxpaged.errors import CheckpointError, InvalidFieldError, UnsupportedOptionError
from jaxpaged.text import Tokenizer, load_tokenizer

KOREAN = "안녕하세요 반갑습니다"
# SmolLM2-135M-Instruct, Q4_1.
SMOLLM2_IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    KOREAN: [
        *(183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183, 244, 238, 25947),
        *(125, 242, 181, 125, 235, 183, 228, 130, 41259, 226, 41259, 114),
    ],
}


def of_gguf(folder: Path, vocabulary: dict, **options) -> Tokenizer:
    tokenizer = load_tokenizer(
        locate(str(write_gguf(folder / "m.gguf", vocabulary=vocabulary, **options)))
    )
    assert tokenizer is not None
    return tokenizer


def byte_level(text: str) -> list[int]:
    return list(text.encode())  # the first 256 ids are the bytes


def ids_of(*tokens: str) -> list[int]:
    return [BYTE_LEVEL_TOKENS.index(token) for token in tokens]


def test_gguf_byte_level(tmp_path: Path):
    tokenizer = of_gguf(tmp_path, byte_level_vocabulary())
    assert tokenizer.encode("the in the") == ids_of("the", "Ġin", "Ġthe")
    assert tokenizer.encode(KOREAN) == byte_level(KOREAN)
    assert tokenizer.vocab_size == len(BYTE_LEVEL_TOKENS)
    assert tokenizer.eos_token_ids == {END}
    assert tokenizer.bos_token_id == START
    assert not tokenizer.adds_bos
    assert tokenizer.special_token_ids == {START, END}  # THINK is added, and not special


def test_gguf_added_tokens(tmp_path: Path):
    tokenizer = of_gguf(tmp_path, byte_level_vocabulary())
    ids = tokenizer.encode("<think>the<|end|>")
    assert ids == [THINK, *ids_of("the"), END]
    assert tokenizer.decode(ids) == "<think>the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>the<|end|>"


@pytest.mark.parametrize(
    ("pre", "digits", "joint"),
    [
        ("smollm", ["1", "2"], False),
        ("qwen2", ["1", "2"], False),
        ("llama-bpe", ["12"], False),
        ("gpt-2", ["12"], True),
    ],
)
def test_gguf_words_are_split_as_the_model_wants(
    tmp_path: Path, pre: str, digits: list[str], joint: bool
):
    tokenizer = of_gguf(tmp_path, byte_level_vocabulary(pre, add_bos_token=False))
    assert tokenizer.encode("12") == ids_of(*digits)
    # Of these only GPT-2 joins a space with the digits behind it.
    words = tokenizer._backend.pre_tokenizer.pre_tokenize_str("a 12")
    assert ("Ġ12" in [word for word, _ in words]) == joint


@pytest.mark.parametrize(
    ("pre", "options", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True}, [START], []),
        ("llama-bpe", {}, [START], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [START], [END]),
    ],
)
def test_gguf_bos_where_the_model_wants_one(tmp_path: Path, pre, options, before, after):
    tokenizer = of_gguf(tmp_path, byte_level_vocabulary(pre, **options))
    assert tokenizer.encode("the") == [*before, *ids_of("the"), *after]
    assert tokenizer.encode("the", add_special_tokens=False) == ids_of("the")
    assert tokenizer.encode("") == before + after
    assert tokenizer.adds_bos == (before == [START])


def test_gguf_sentencepiece(tmp_path: Path):
    tokenizer = of_gguf(tmp_path, spm_vocabulary())
    hello = SPM_TOKENS.index("▁hello")
    assert tokenizer.encode("hello") == [1, hello]
    assert tokenizer.encode("hello hello") == [1, hello, hello]
    # "ll" scores better than "lo", so "llo" wins over "l" + "lo".
    assert tokenizer.encode("xllo")[-1] == SPM_TOKENS.index("llo")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    ids = tokenizer.encode("é")
    assert ids == [
        1,
        SPM_TOKENS.index("▁"),
        *(SPM_TOKENS.index(f"<0x{b:02X}>") for b in b"\xc3\xa9"),
    ]
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids[:-1]) == "\ufffd"


def test_gguf_sentencepiece_without_a_space_in_front(tmp_path: Path):
    tokenizer = of_gguf(tmp_path, spm_vocabulary(add_space_prefix=False))
    hello, marked = SPM_TOKENS.index("hello"), SPM_TOKENS.index("▁hello")
    assert tokenizer.encode("hello hello") == [1, hello, marked]
    assert tokenizer.decode([marked]) == " hello"
    # A run of spaces is one piece, stored with plain spaces, whatever its score.
    assert tokenizer.encode("h  h")[2] == SPM_TOKENS.index("  ")
    assert tokenizer.vocab_size == len(SPM_TOKENS)


def test_gguf_without_vocabulary_has_no_tokenizer(tmp_path: Path):
    assert load_tokenizer(locate(str(write_gguf(tmp_path / "m.gguf")))) is None


def test_gguf_kinds_that_are_not_supported(tmp_path: Path):
    with pytest.raises(UnsupportedOptionError, match="'unheard-of' is not supported, only"):
        of_gguf(tmp_path, byte_level_vocabulary("unheard-of"))
    with pytest.raises(UnsupportedOptionError, match="'bert' is not supported"):
        of_gguf(tmp_path, byte_level_vocabulary() | {"model": "bert"})
    vocabulary = byte_level_vocabulary()
    del vocabulary["merges"]
    with pytest.raises(CheckpointError, match=r"lacks the metadata .*merges"):
        of_gguf(tmp_path, vocabulary)


@pytest.mark.parametrize("make", [byte_level_vocabulary, spm_vocabulary])
def test_decode_is_that_of_the_library(tmp_path: Path, make: Callable[[], dict]):
    """On whole characters; on broken ones ours is one U+FFFD per broken sequence."""
    tokenizer = of_gguf(tmp_path, make())
    rng = np.random.default_rng(0)
    texts = ["", " the  in\n12", KOREAN, "🤖 <think> hello", "  x"]
    texts += ["".join(rng.choice(list("the inlo12é한"), 30)) for _ in range(30)]
    for text in texts:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip) == expected


def test_unknown_ids_and_lone_surrogates(tmp_path: Path):
    tokenizer = of_gguf(tmp_path, byte_level_vocabulary())
    assert tokenizer.token_bytes(10**9) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([*byte_level("a"), 10**9, *byte_level("b")]) == "ab"
    with pytest.raises(InvalidFieldError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


# --- Hugging Face folders ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small byte-level tokenizer in Hugging Face form, with BOS."""
    merges: list = [tuple(merge.split()) for merge in ("t h", "th e")]
    vocab = {token: i for i, token in enumerate(BYTE_LEVEL_TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|start|>"), AddedToken("<|end|>")])
    backend.add_tokens([AddedToken("<think>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", START)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>",'
        ' "eos_token": "<|end|>", "chat_template": "{{ bos_token }}x"}'
    )
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    return tmp_path


def test_hugging_face_folder(folder: Path, capfd: pytest.CaptureFixture[str]):
    tokenizer = load_tokenizer(locate(str(folder)))
    assert tokenizer is not None
    assert tokenizer.encode("the") == [START, *ids_of("the")]
    assert tokenizer.encode("the", add_special_tokens=False) == ids_of("the")
    assert tokenizer.adds_bos
    assert tokenizer.eos_token_ids == {5, 6, 7, END}
    assert tokenizer.bos_token_id == START
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert tokenizer.chat_template == "{{ bos_token }}x"
    ids = [START, THINK, *byte_level(" é"), END]
    assert tokenizer.decode(ids) == "<think> é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|><think> é<|end|>"
    assert "PyTorch" not in capfd.readouterr().err


def test_only_the_note_about_pytorch_is_silenced(folder: Path):
    load_tokenizer(locate(str(folder)))
    for message, is_shown in [("PyTorch was not found. Models", False), ("something else", True)]:
        record = logging.LogRecord("transformers", logging.WARNING, "", 0, message, None, None)
        assert bool(logging.getLogger("transformers").filter(record)) == is_shown


def test_a_folder_without_tokenizer_files(folder: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # to import it raises
    with pytest.raises(ImportError):  # negative control
        load_tokenizer(locate(str(folder)))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(locate(str(folder))) is None


def test_a_broken_tokenizer_file(folder: Path):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="cannot load the tokenizer in") as error:
        load_tokenizer(locate(str(folder)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), None])
def test_decoders_that_need_their_neighbours_are_refused(decoder):
    backend = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(UnsupportedOptionError, match="decoder"):
        Tokenizer(
            backend,
            eos_token_ids=frozenset(),
            bos_token_id=None,
            chat_template=None,
            special_tokens={},
        )


# --- the real model and the tests' own -----------------------------------------------------------


@pytest.mark.skipif(
    not (models_folder() / BUNDLED_MODELS["smollm2"]).is_file(),
    reason="SmolLM2 is not there: run scripts/fetch_model",
)
def test_smollm2():
    tokenizer = load_tokenizer(locate("smollm2"))
    assert tokenizer is not None
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == []
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.has_chat_template


def test_byte_tokenizer():
    tokenizer = ByteTokenizer(adds_bos=True)
    assert tokenizer.encode("é") == [BOS, 0xC3, 0xA9]
    assert tokenizer.decode([BOS, 0xC3, 0xA9, 0xC3]) == "é\ufffd"
    assert tokenizer.encode("a<|eos|>b", add_special_tokens=False) == [97, 257, 98]
