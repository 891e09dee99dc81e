"""Text of one sequence, piece by piece, while its tokens come in."""

import codecs
from collections.abc import Sequence

from jaxpaged.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Joins the bytes of tokens and gives out whole characters, never a byte of the prompt.

    All pieces together are `tokenizer.decode` of the output's ids: a character whose first bytes
    end the prompt shows as U+FFFD. One difference: a decoder that strips a space at the beginning
    strips it from a text's beginning, and behind a prompt the output begins in the middle.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ):
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = _new_utf8_decoder(errors="replace")
        self._strips_leading_space = tokenizer.strips_leading_space and not any(
            tokenizer.token_bytes(i) for i in prompt_token_ids if i not in self._skipped
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` completes; a character waits for its last byte."""
        skipped = self._skipped
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in skipped])
        return self._strip(self._decoder.decode(data))

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete, else nothing. To be called once."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_leading_space and text:
            self._strips_leading_space = False
            return text.removeprefix(" ")
        return text
