"""The bytes that one token adds to a text, read off a tokenizer's decoder.

Decoders of the `tokenizers` library work on whole lists of tokens, which is no use when tokens come
one at a time. All decoders met in language models do the same two things: they turn each token into
bytes by itself, and some strip one space at the very beginning.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import tokenizers

from jaxpaged.errors import UnsupportedOptionError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenDecoder:
    """`to_bytes` of each token, joined; less one leading space if `strips_leading_space`."""

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool


def token_decoder(backend: tokenizers.Tokenizer) -> TokenDecoder:
    """Raises UnsupportedOptionError when the decoder does not work token by token."""
    if backend.decoder is None:
        raise UnsupportedOptionError("model", "the tokenizer has no decoder")
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    replacements: list[tuple[str, str]] = []
    strips = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(kinds) == 1:
                return TokenDecoder(_byte_level_bytes, strips_leading_space=False)
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                replacements.append((mark, " "))
                strips = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if "Fuse" in kinds:
                strips = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise UnsupportedOptionError(
                    "model", f"the tokenizer's decoder {kinds} is not supported"
                )
    has_byte_tokens = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return TokenDecoder(to_bytes, strips)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[char] for char in token])
    except KeyError:  # an added token, written in plain characters
        return token.encode()
