"""A tokenizer without files, with the interface of `jaxpaged.text.Tokenizer`: a byte is a token."""

import re
from collections.abc import Sequence

from jaxpaged.text import Tokenizer

BOS, EOS, TURN, TURN_END = 256, 257, 258, 259
_SPECIAL_TEXTS = {BOS: "<|bos|>", EOS: "<|eos|>", TURN: "<|turn|>", TURN_END: "<|end|>"}
_ID_OF = {text: token_id for token_id, text in _SPECIAL_TEXTS.items()}
_SPECIALS = re.compile(f"({'|'.join(map(re.escape, _ID_OF))})")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes, then come four special tokens, which texts can spell out."""

    def __init__(self, *, adds_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE):
        self.vocab_size = 260
        self.eos_token_ids = frozenset({EOS})
        self.bos_token_id = BOS
        self.chat_template = chat_template
        self.special_tokens = {"bos_token": _SPECIAL_TEXTS[BOS], "eos_token": _SPECIAL_TEXTS[EOS]}
        self.special_token_ids = frozenset(_SPECIAL_TEXTS)
        self.strips_leading_space = False
        self.adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens and self.adds_bos else []
        for piece in _SPECIALS.split(text):
            special = _ID_OF.get(piece)
            ids += piece.encode() if special is None else [special]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(
            errors="replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return bytes([token_id])
        return _SPECIAL_TEXTS.get(token_id, "").encode()
