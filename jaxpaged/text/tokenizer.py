"""A model's own tokenizer: text <-> token ids."""

from collections.abc import Mapping, Sequence

import tokenizers

from jaxpaged.checkpoint import Checkpoint, eos_token_ids
from jaxpaged.checkpoint.gguf import GgufCheckpoint
from jaxpaged.errors import InvalidFieldError
from jaxpaged.text.token_bytes import token_decoder


class Tokenizer:
    """Wraps a tokenizer of the `tokenizers` library; safe to use from several threads.

    Attributes:
      eos_token_ids: the union of what config, generation config and tokenizer say.
      special_token_ids: those that `skip_special_tokens` leaves out of a text.
      chat_template: Jinja source, or None.
      special_tokens: texts by name ("bos_token", ...), the variables of a chat template.
      strips_leading_space: decoding drops one space at the beginning of a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        bos_token_id: int | None,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ):
        """Takes `backend` over. Raises UnsupportedOptionError if its decoder is unknown."""
        backend.no_truncation()
        backend.no_padding()
        decoder = token_decoder(backend)
        self._backend = backend
        self._to_bytes = decoder.to_bytes
        self._bytes_of: dict[int, bytes] = {}
        self.strips_leading_space = decoder.strips_leading_space
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.adds_bos = bos_token_id is not None and self.encode("")[:1] == [bos_token_id]

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
          add_special_tokens: add what the model wants around a text, above all a BOS if it has one.

        Raises:
          InvalidFieldError: `text` holds half of a surrogate pair, which no byte sequence encodes.
        """
        try:
            text.encode()  # why: the library only says "TextInputSequence must be str"
        except UnicodeEncodeError as error:
            raise InvalidFieldError(
                "text", f"text holds a lone surrogate at character {error.start}"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, in UTF-8, perhaps part of a character."""
        found = self._bytes_of.get(token_id)
        if found is None:
            known = 0 <= token_id < 2**32  # what the library takes for an id
            token = self._backend.id_to_token(token_id) if known else None
            found = self._bytes_of[token_id] = self._to_bytes(token) if token is not None else b""
        return found

    def max_token_bytes(self) -> int:
        """Length of the longest token: no text of more bytes than n times this has n tokens."""
        return max(len(self.token_bytes(i)) for i in range(self.vocab_size))


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None when it has no tokenizer files.

    Raises:
      CheckpointError: its files are damaged.
      UnsupportedOptionError: a kind of tokenizer that is not supported.
    """
    # why: each brings in a library that takes long to import, and only one is needed
    if isinstance(checkpoint, GgufCheckpoint):
        from jaxpaged.text.gguf_tokenizer import build

        parts = build(checkpoint)
    else:
        from jaxpaged.text.hf_tokenizer import load

        parts = load(checkpoint)
    if parts is None:
        return None
    return Tokenizer(
        parts.backend,
        eos_token_ids=eos_token_ids(
            checkpoint.config, checkpoint.generation_config, {"eos_token_id": parts.eos_token_id}
        ),
        bos_token_id=parts.bos_token_id,
        chat_template=parts.chat_template,
        special_tokens=parts.special_tokens,
    )
