"""Whole answers, streamed ones too, and whether two of them are the same."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxpaged.logprobs import PositionLogprobs, TokenLogprob
from jaxpaged.outputs import (
    Accepted,
    Completion,
    Delta,
    Finished,
    PromptLogprobs,
    RequestOutput,
    StreamEvent,
)
from jaxpaged.sampling_params import sequence_seed

# Of log-probabilities: other batch sizes add in another order.
TOLERANCE = 1e-4


async def joined(events: AsyncIterator[StreamEvent]) -> RequestOutput:
    """A stream's events as the unary answer that they must add up to."""
    prompt: list[int] = []
    prompt_logprobs: list[PositionLogprobs] = []
    deltas: dict[int, list[Delta]] = {}
    seed, usage, timing = 0, None, None
    async for event in events:
        match event:
            case Accepted():
                prompt, seed = event.prompt_token_ids, event.seed
            case PromptLogprobs():
                assert event.first_position == len(prompt_logprobs)
                prompt_logprobs += event.logprobs
            case Delta():
                deltas.setdefault(event.index, []).append(event)
            case Finished():
                usage, timing = event.usage, event.timing
    assert usage is not None and timing is not None
    completions = [
        _completion(deltas[index], sequence_seed(seed, index)) for index in sorted(deltas)
    ]
    return RequestOutput("", prompt, completions, usage, timing, prompt_logprobs)


def _completion(deltas: Sequence[Delta], seed: int) -> Completion:
    *others, last = deltas
    assert last.finish_reason is not None
    assert all(delta.finish_reason is None for delta in others)
    return Completion(
        last.index,
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        last.finish_reason,
        last.matched_stop,
        seed,
        [position for delta in deltas for position in delta.logprobs or []],
    )


def check_same(found: RequestOutput, expected: RequestOutput) -> None:
    facts_found, facts_expected = map(facts, found.completions), map(facts, expected.completions)
    for one, other in zip(facts_found, facts_expected, strict=True):
        assert one == other, f"{one}, not {other}"
    check_logprobs(found.prompt_logprobs, expected.prompt_logprobs)
    for one, other in zip(found.completions, expected.completions, strict=True):
        check_logprobs(one.logprobs, other.logprobs)


def facts(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.index,
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.matched_stop,
        completion.seed,
    )


def check_logprobs(
    found: Sequence[PositionLogprobs] | None, expected: Sequence[PositionLogprobs] | None
) -> None:
    """None is told as nothing over gRPC and in streams."""
    found, expected = found or [], expected or []
    assert len(found) == len(expected), f"{len(found)} positions, not {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        _check_chosen(one.chosen, other.chosen)
        _check_best(one.top, other.top)


def _check_chosen(found: TokenLogprob | None, expected: TokenLogprob | None) -> None:
    if found is None or expected is None:
        assert found is expected, f"{found}, not {expected}"
        return
    is_same = found.token_id == expected.token_id and _is_near(found, expected)
    # Of two that are as good as equal, either may be the better one.
    is_same = is_same and abs(found.rank - expected.rank) <= 1
    assert is_same and found.token_bytes == expected.token_bytes, f"{found}, not {expected}"


def _check_best(found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    assert len(found) == len(expected), f"{len(found)} best tokens, not {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        equals = [entry.token_id for entry in expected if _is_near(one, entry)]
        # The last one may have an equal that is not told.
        is_told = one.token_id in equals or other is expected[-1]
        assert is_told and _is_near(one, other) and one.rank == other.rank, f"{one}, not {other}"


def _is_near(one: TokenLogprob, other: TokenLogprob) -> bool:
    return abs(one.logprob - other.logprob) <= TOLERANCE
