"""What a `Tokenizer` is made of, whichever files it came from."""

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True)
class TokenizerParts:
    """`special_tokens` are texts by name ("bos_token", ...); ids are None where there is none."""

    backend: tokenizers.Tokenizer
    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: str | None
    special_tokens: Mapping[str, str]
