"""The tokens of a model as bytes, which is all that a grammar knows of a tokenizer."""

from collections.abc import Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import llguidance

from jaxpaged.errors import UnsupportedOptionError


class TokenTexts(Protocol):
    """What is read of a `jaxpaged.text.Tokenizer`; the engine's process never imports that."""

    @property
    def eos_token_ids(self) -> Set[int]: ...
    @property
    def special_token_ids(self) -> Set[int]: ...
    @property
    def strips_leading_space(self) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True)
class Vocabulary:
    """Plain data that may be pickled; the index over it is built at the first use.

    Attributes:
      tokens: what each id adds to a text, one for each of the model's logits; empty where the
        tokenizer has no such id, and such ids are never allowed.
      special_token_ids: allowed only where a grammar names them.
      eos_token_ids: at least one.
      strips_leading_space: a text is its tokens' bytes less one leading space.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    strips_leading_space: bool = False

    @classmethod
    def of(cls, tokenizer: TokenTexts, vocab_size: int) -> "Vocabulary":
        """The tokenizer's ids below `vocab_size`, the width of the model's logits.

        Raises:
          UnsupportedOptionError: none of them is an EOS, so no constrained text could end.
        """
        eos_token_ids = frozenset(i for i in tokenizer.eos_token_ids if i < vocab_size)
        if not eos_token_ids:
            raise UnsupportedOptionError(
                "constraint", "constraint is not supported: the model has no EOS token"
            )
        special = frozenset(i for i in tokenizer.special_token_ids if i < vocab_size)
        return cls(
            tokens=tuple(tokenizer.token_bytes(i) for i in range(vocab_size)),
            special_token_ids=special | eos_token_ids,
            eos_token_ids=eos_token_ids,
            strips_leading_space=tokenizer.strips_leading_space,
        )

    def resized(self, vocab_size: int) -> "Vocabulary | None":
        """The same for logits of another width; None where no EOS is left."""
        padding = (b"",) * (vocab_size - len(self.tokens))
        eos_token_ids = frozenset(i for i in self.eos_token_ids if i < vocab_size)
        if not eos_token_ids:
            return None
        return replace(
            self,
            tokens=self.tokens[:vocab_size] + padding,
            special_token_ids=frozenset(i for i in self.special_token_ids if i < vocab_size),
            eos_token_ids=eos_token_ids,
        )

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def index_eos_token_id(self) -> int:
        """The only id that the index itself takes for an end."""
        return min(self.eos_token_ids)

    @cached_property
    def index(self) -> llguidance.LLTokenizer:
        """The trie over all tokens that masks are computed on; some tenths of a second to build."""
        wrapper: Any = _TokenizerWrapper(self)
        return llguidance.LLTokenizer(wrapper)

    def __getstate__(self) -> dict[str, Any]:
        # why: the index cannot be pickled
        return {field.name: getattr(self, field.name) for field in fields(self)}


class _TokenizerWrapper:
    """The attributes by which llguidance reads a tokenizer that is written in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.index_eos_token_id
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self.tokens = list(vocabulary.tokens)

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("grammars force no tokens, so none are asked for")
