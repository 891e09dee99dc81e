"""Golden continuations: requests made of them, and the comparison that they allow."""

from collections.abc import Sequence
from typing import Any

from helpers.requests import make_request

from jaxpaged.request import EngineRequest

# Where the two best logits are closer than this, another order of additions may change the token.
MIN_MARGIN = 1e-3


def golden_requests(cases: Sequence[dict[str, Any]], **options: Any) -> list[EngineRequest]:
    """Greedy requests named by their place in `cases`, unless `options` say otherwise."""
    return [
        make_request(
            str(i), case["prompt_token_ids"], max_tokens=len(case["output_token_ids"]), **options
        )
        for i, case in enumerate(cases)
    ]


def check_continuation(case: dict[str, Any], tokens: Sequence[int]) -> None:
    """Equal, or first different where the stored margin is too small to tell."""
    expected = case["output_token_ids"]
    assert len(tokens) == len(expected), f"{len(tokens)} tokens, not {len(expected)}"
    for i, (found, token, margin) in enumerate(zip(tokens, expected, case["margins"], strict=True)):
        if found != token:
            prompt_len = len(case["prompt_token_ids"])
            assert margin < MIN_MARGIN, f"{prompt_len=}: token {i} is {found}, not {token}"
            return
