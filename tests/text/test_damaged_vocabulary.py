"""Vocabularies in GGUF files that make no sense: one clear line, whatever the library raises."""

from pathlib import Path

import pytest
from helpers.tiny_gguf import byte_level_vocabulary, spm_vocabulary, write_gguf

from jaxpaged.checkpoint import locate
from jaxpaged.errors import CheckpointError
from jaxpaged.text import load_tokenizer


def load(folder: Path, vocabulary: dict) -> None:
    load_tokenizer(locate(str(write_gguf(folder / "m.gguf", vocabulary=vocabulary))))


@pytest.mark.parametrize("make", [byte_level_vocabulary, spm_vocabulary])
@pytest.mark.parametrize("role", ["bos", "eos", "unknown", "padding"])
def test_gguf_ids_outside_the_vocabulary_are_named(tmp_path: Path, make, role: str):
    vocabulary = make() | {f"{role}_token_id": 10**6}
    with pytest.raises(CheckpointError, match=f"{role}_token_id=1000000 must be below"):
        load(tmp_path, vocabulary)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (byte_level_vocabulary, {"merges": ["t", "h e"]}),
        (byte_level_vocabulary, {"merges": ["not there"]}),
        (byte_level_vocabulary, {"token_type": [1, 1]}),
        (spm_vocabulary, {"token_type": [1, 1]}),
        (spm_vocabulary, {"scores": [0.0]}),
    ],
)
def test_gguf_vocabularies_that_contradict_themselves(tmp_path: Path, make, change: dict):
    with pytest.raises(CheckpointError, match=r"m\.gguf: its vocabulary makes no sense: ") as error:
        load(tmp_path, make() | change)
    assert "\n" not in str(error.value)
