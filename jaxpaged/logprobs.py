"""Log-probabilities: what a user reads, and one packed record a position on the way to the front.

A record is the chosen token's log-probability (float32) and rank (int32), then for each of the best
tokens its id (int32) and log-probability (float32), best first. A shorter record is a prefix of a
longer one. The engine copies bytes; what they mean is worked out in the front.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token at one position: the log-softmax of the model's own logits there.

    Attributes:
      rank: 1 is the most likely; of equals, the lower id comes first.
      token_bytes: the token's text, which need not be whole UTF-8; empty without a tokenizer.
    """

    token_id: int
    logprob: float
    rank: int
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one position, and the most likely ones there, best first.

    Attributes:
      chosen: None for the first token of a prompt, which nothing precedes.
    """

    chosen: TokenLogprob | None
    top: list[TokenLogprob] = field(default_factory=list)

    @property
    def entries(self) -> list[TokenLogprob]:
        """The k best and the chosen one, best first: k or k + 1 of them."""
        if self.chosen is None or self.chosen in self.top:
            return self.top
        return sorted([*self.top, self.chosen], key=lambda entry: entry.rank)


def num_words(num_best: int) -> int:
    return 2 + 2 * num_best


def unpack_logprobs(
    packed: bytes, token_ids: Sequence[int], token_bytes: Callable[[int], bytes]
) -> list[PositionLogprobs]:
    """Reads one record of equal length for each of the chosen `token_ids`.

    Args:
      token_bytes: the text of a token.
    """
    if not token_ids:
        return []
    num_best = (len(packed) // (WORD_BYTES * len(token_ids)) - 2) // 2
    records = struct.iter_unpack("=fi" + "if" * num_best, packed)
    positions = []
    for token_id, (logprob, rank, *best) in zip(token_ids, records, strict=True):
        top = [
            TokenLogprob(best_id, best_logprob, at, token_bytes(best_id))
            for at, (best_id, best_logprob) in enumerate(zip(best[::2], best[1::2], strict=True), 1)
        ]
        chosen = TokenLogprob(token_id, logprob, rank, token_bytes(token_id))
        positions.append(PositionLogprobs(chosen, top))
    return positions


def unpack_best(record: bytes) -> list[tuple[int, float]]:
    """The best tokens of one record and their log-probabilities."""
    return list(struct.iter_unpack("=if", record[num_words(0) * WORD_BYTES :]))
