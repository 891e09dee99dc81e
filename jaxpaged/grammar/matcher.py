"""One sequence's place in its grammar, and the mask of the tokens that may come next."""

from collections.abc import Iterable, Sequence, Set
from copy import copy as shallow_copy

import llguidance
import numpy as np
from jaxtyping import Integer

from jaxpaged.grammar.compiler import error_of, parser_limits
from jaxpaged.grammar.vocabulary import Vocabulary

# Masks: words of 32 bits, signed or not; bit i of word w stands for the token id 32 * w + i.

# llguidance's words for a token that no mask allowed; other errors are limits.
_MISMATCHES = ("doesn't satisfy the grammar", "parser stopped")


def mask_width(vocab_size: int) -> int:
    """How many 32-bit words a row of a mask has."""
    return -(-vocab_size // 32)


class Matcher:
    """Follows one sequence. It is used by one thread at a time.

    A grammar that turns out too complex halfway stops its own sequence only: `error` then says why,
    and its masks allow nothing.

    Attributes:
      parser: llguidance's matcher, which this one owns.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str, end_token_ids: Set[int]):
        """Compiles `grammar`: mostly milliseconds, up to a second for what `grammar_of` lets pass.

        Args:
          grammar: made by `grammar_of`, for the same vocabulary.
          end_token_ids: EOS and stop ids of the sequence. They end a text and belong to none, so
            they are allowed exactly where the text before them is complete.

        Raises:
          ValueError: llguidance refuses `grammar`.
        """
        limits = parser_limits()
        matcher = llguidance.LLMatcher(vocabulary.index, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"grammar is refused: {error_of(matcher)}")
        self.parser = matcher
        self.vocab_size = vocabulary.vocab_size
        self._end_token_ids = frozenset(i for i in end_token_ids if i < vocabulary.vocab_size)
        self._end_bits = _bits(self._end_token_ids)
        # why: llguidance allows its own EOS, even where the sequence cannot go on or ignores EOS
        self._cleared_bits = _bits(self._end_token_ids | {vocabulary.index_eos_token_id})
        self._has_ended = False

    def accept(self, token_ids: Sequence[int]) -> None:
        """Moves on over generated tokens, an end id included.

        Raises:
          RuntimeError: a token that no mask allowed, or one after the end.
        """
        ids = list(token_ids)
        if outside := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise RuntimeError(f"tokens {outside} are outside the vocabulary")
        if self._has_ended and ids:
            raise RuntimeError(f"token {ids[0]} comes after the end of a constrained text")
        num_text_ids = next((k for k, i in enumerate(ids) if i in self._end_token_ids), len(ids))
        text_ids, end_ids = ids[:num_text_ids], ids[num_text_ids:]
        self.parser.consume_tokens(text_ids)
        if self.error is not None:
            if any(words in self.error for words in _MISMATCHES):
                raise RuntimeError(f"tokens {text_ids} do not match the grammar: {self.error}")
            return
        if end_ids:
            if not self.is_complete or len(end_ids) > 1:
                raise RuntimeError(f"tokens {end_ids} do not end the text where it is complete")
            self._has_ended = True

    def fill(self, mask: Integer[np.ndarray, " mask_width"]) -> None:
        """Writes which tokens may come next into all words of `mask`, `[mask_width]`."""
        _check_mask(mask, (mask_width(self.vocab_size),))
        self.parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.settle_ends(mask)

    def settle_ends(self, mask: Integer[np.ndarray, " mask_width"]) -> None:
        """Makes llguidance's own mask ours: what it says of ends is replaced."""
        words = mask.view(np.uint32)
        is_complete = self.is_complete
        if self._has_ended:
            words[:] = 0
        for word, bits in self._cleared_bits.items():
            words[word] &= ~bits
        if is_complete:
            for word, bits in self._end_bits.items():
                words[word] |= bits

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches as it stands."""
        return self._has_ended or self.parser.is_accepting()

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on, in llguidance's words; None while it can."""
        return error_of(self.parser) if self.parser.is_error() else None

    def copy(self) -> "Matcher":
        """Another matcher at the same place, some microseconds instead of milliseconds.

        The two share the compiled grammar and its limits: where one becomes too complex, so does
        the other. So copy for the sequences of one request, not across requests.
        """
        other = shallow_copy(self)
        other.parser = self.parser.deep_copy()
        return other


class MaskFiller:
    """Fills the masks of many sequences at once, in threads of its own that hold no lock."""

    def __init__(self, num_threads: int | None = None):
        """None: most of the machine's cores."""
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(
        self, matchers: Sequence[Matcher | None], masks: Integer[np.ndarray, "num_rows mask_width"]
    ) -> None:
        """`Matcher.fill` for each row of `masks`; a row without a matcher is left as it is.

        Args:
          matchers: different ones, all of one vocabulary.
          masks: `[len(matchers), mask_width]`.
        """
        rows = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]
        if not rows:
            return
        width = mask_width(rows[0][0].vocab_size)
        _check_mask(masks, (len(matchers), width))
        pairs = [(matcher.parser, row) for matcher, row in rows]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, width * 4, len(matchers))
        for matcher, row in rows:
            matcher.settle_ends(masks[row])


def _bits(token_ids: Iterable[int]) -> dict[int, np.uint32]:
    """The bits of `token_ids` by word."""
    words: dict[int, int] = {}
    for i in token_ids:
        words[i // 32] = words.get(i // 32, 0) | 1 << i % 32
    return {word: np.uint32(bits) for word, bits in words.items()}


def _check_mask(mask: np.ndarray, shape: tuple[int, ...]) -> None:
    # why: llguidance writes through a bare pointer
    if mask.dtype not in (np.uint32, np.int32) or mask.shape != shape:
        raise ValueError(f"{mask.dtype=} {mask.shape=} must be 32-bit integers of {shape=}")
    if not mask.flags.c_contiguous or not mask.flags.writeable:
        raise ValueError("mask must be contiguous and writeable")
