"""Log-probabilities on their way from the engine to the front: one packed record a position.

A record is the chosen token's log-probability (float32) and rank (int32), then for each of the best
tokens its id (int32) and log-probability (float32), best first. A shorter record is a prefix of a
longer one. The engine copies bytes; what they mean is worked out in the front.
"""

import struct
from collections.abc import Callable, Sequence

from jaxpaged.outputs import PositionLogprobs, TokenLogprob

WORD_BYTES = 4


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
