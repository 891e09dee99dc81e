"""Whole answers, streamed ones too, and whether two of them are the same."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from jaxpaged.outputs import (
    Accepted,
    Completion,
    Delta,
    Finished,
    PositionLogprobs,
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
    assert list(map(facts, found.completions)) == list(map(facts, expected.completions))
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
    for one, other in zip(found or [], expected or [], strict=True):
        entries, wanted = _entries(one), _entries(other)
        assert [entry[:-1] for entry in entries] == [entry[:-1] for entry in wanted]
        values = [entry[-1] for entry in entries]
        assert values == pytest.approx([entry[-1] for entry in wanted], rel=0, abs=TOLERANCE)


def _entries(position: PositionLogprobs) -> list[tuple[int, int, bytes, float]]:
    chosen = [] if position.chosen is None else [position.chosen]
    return [
        (entry.token_id, entry.rank, entry.token_bytes, entry.logprob)
        for entry in chosen + position.top
    ]
