"""Texts drawn at random from a grammar, token by token, as a model that knows nothing would."""

from collections.abc import Iterable

import numpy as np

from jaxpaged.grammar import Matcher, mask_width


def allowed_ids(matcher: Matcher) -> list[int]:
    """The ids of the matcher's mask, which is checked to be zero beyond the vocabulary."""
    mask = np.full(mask_width(matcher.vocab_size), 0xFFFFFFFF, np.uint32)
    matcher.fill(mask)
    ids = ids_of_mask(mask)
    assert all(i < matcher.vocab_size for i in ids)
    return ids


def ids_of_mask(mask: np.ndarray) -> list[int]:
    words = [int(word) & 0xFFFFFFFF for word in mask]
    return [32 * w + bit for w, word in enumerate(words) for bit in range(32) if word >> bit & 1]


def walk(
    matcher: Matcher,
    rng: np.random.Generator,
    *,
    end_token_ids: Iterable[int],
    max_tokens: int = 2000,
) -> list[int]:
    """Draws allowed ids until an end id comes, which is not in the result."""
    ends = set(end_token_ids)
    ids: list[int] = []
    for _ in range(max_tokens):
        token_id = int(rng.choice(allowed_ids(matcher)))
        assert matcher.is_complete or token_id not in ends
        matcher.accept([token_id])
        if token_id in ends:
            return ids
        ids.append(token_id)
    raise AssertionError(f"no end after {max_tokens=}")
