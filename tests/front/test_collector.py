"""A reader that keeps up: one delta a token, and what each of them may show."""

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.requests import make_request

from jaxpaged.collector import Collector
from jaxpaged.errors import EngineFailedError
from jaxpaged.outputs import (
    Accepted,
    Delta,
    Finished,
    Heartbeat,
    PromptLogprobs,
    PromptScored,
    RequestEnded,
    RequestStarted,
    SequenceOutput,
    Started,
    StreamEvent,
)
from jaxpaged.request import EngineRequest, FinishReason


def read_each(token_ids: list[int], **options) -> tuple[list[Delta], Collector]:
    """The deltas of a request whose reader takes each token before the next one comes.

    The engine goes on until its own limit; what it is told of stop strings is not simulated.
    """

    async def run():
        request = make_request("e", [1], max_tokens=len(token_ids), **options)
        collector = Collector("r", request, ByteTokenizer())
        events = collector.events()
        assert isinstance(await anext(events), Accepted)
        collector.on_started(RequestStarted("e", 1, 0))
        assert isinstance(await anext(events), Started)
        deltas: list[Delta] = []
        for i, token_id in enumerate(token_ids):
            is_last = i == len(token_ids) - 1
            reason = FinishReason.MAX_TOKENS if is_last else None
            stopped = collector.on_output(SequenceOutput("e", 0, (token_id,), reason))
            if deltas and deltas[-1].finish_reason is not None:
                assert not stopped, "told once"
                continue
            collector.wake_reader()
            event = await anext(events)
            assert isinstance(event, Delta)
            deltas.append(event)
            assert stopped == (event.finish_reason is FinishReason.STOP_STRING and not is_last)
        collector.on_ended(RequestEnded("e", 0))
        assert isinstance(await anext(events), Finished)
        assert await anext(events, None) is None
        return deltas, collector

    return asyncio.run(run())


@pytest.mark.parametrize("text", ["안녕하세요 반갑습니다", "a😀🚀é", "plain", "👩‍👩‍👧"])
def test_each_delta_is_whole_characters(text):
    deltas, _ = read_each(list(text.encode()))
    assert "".join(delta.text for delta in deltas) == text
    # A character comes with its last byte; until then deltas carry ids alone.
    expected = [part for c in text for part in ["", "", "", c][-len(c.encode()) :]]
    assert [delta.text for delta in deltas] == expected


def test_a_character_cut_off_shows_in_the_last_delta():
    deltas, _ = read_each(list("안녕".encode()[:5]))
    assert [delta.text for delta in deltas] == ["", "", "안", "", "\ufffd"]


@pytest.mark.parametrize("include", [False, True])
def test_no_part_of_a_stop_string_is_shown(include):
    """B45."""
    deltas, _ = read_each(list(b"ABCDEFGHIJK"), stop=("DEFGH",), include_stop_string=include)
    assert [delta.text for delta in deltas] == [*"ABC", "", "", "", "", "DEFGH" * include]
    assert deltas[-1].finish_reason is FinishReason.STOP_STRING
    assert deltas[-1].matched_stop == "DEFGH"


def test_what_only_looked_like_a_stop_string_is_shown():
    deltas, _ = read_each(list(b"ABCDEx"), stop=("DEFGH",))
    assert [delta.text for delta in deltas] == [*"ABC", "", "", "DEx"]
    deltas, _ = read_each(list(b"ABCDE"), stop=("DEFGH",))
    assert [delta.text for delta in deltas] == [*"ABC", "", "DE"]


def test_a_stop_string_may_end_inside_a_token():
    tokenizer = ByteTokenizer()

    async def run():
        collector = Collector("r", make_request("e", [1], stop=("한",), max_tokens=9), tokenizer)
        assert collector.on_output(SequenceOutput("e", 0, tuple("ab한국".encode())))
        collector.on_ended(RequestEnded("e", 0))
        return await collector.answer()

    (completion,) = asyncio.run(run()).completions
    assert (completion.text, completion.matched_stop) == ("ab", "한")


def test_a_reader_that_is_behind_gets_everything_at_once():
    async def run() -> list[StreamEvent]:
        collector = Collector("r", make_request("e", [1], n=2, max_tokens=9), ByteTokenizer())
        for token in b"one":
            collector.on_output(SequenceOutput("e", 0, (token,)))
            collector.on_output(SequenceOutput("e", 1, (token,)))
        collector.on_output(SequenceOutput("e", 0, (33,), FinishReason.MAX_TOKENS))
        collector.on_output(SequenceOutput("e", 1, (63,), FinishReason.MAX_TOKENS))
        collector.on_ended(RequestEnded("e", 0))
        return [event async for event in collector.events()]

    events = asyncio.run(run())
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "one!"), (1, "one?")]
    assert isinstance(events[-1], Finished) and events[-1].usage.completion_tokens == 8


def test_prompt_logprobs_that_come_while_others_are_read_precede_the_rest():
    def score(position: int) -> PromptScored:
        return PromptScored("e", position, 1, struct.pack("=fi", -1.0, 1))

    async def run() -> list[StreamEvent]:
        request = make_request("e", [1, 2, 3], prompt_logprobs=0)
        collector = Collector("r", request, ByteTokenizer())
        collector.on_started(RequestStarted("e", 3, 0))
        collector.on_scored(score(1))
        events = []
        async for event in collector.events():
            events.append(event)
            if isinstance(event, PromptLogprobs) and event.first_position == 0:
                collector.on_scored(score(2))
                collector.on_output(SequenceOutput("e", 0, (65,), FinishReason.MAX_TOKENS))
                collector.on_ended(RequestEnded("e", 0))
        return events

    events = asyncio.run(run())
    kinds = [Accepted, Started, PromptLogprobs, PromptLogprobs, Delta, Finished]
    assert [type(event) for event in events] == kinds
    told = [(e.first_position, len(e.logprobs)) for e in events if isinstance(e, PromptLogprobs)]
    assert told == [(0, 2), (2, 1)]


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_failure_wakes_the_reader(kind):
    async def run():
        collector = Collector("r", make_request("e", [1]), ByteTokenizer())

        async def read() -> None:
            if kind == "unary":
                await collector.answer()
            async for _ in collector.events():
                pass

        waiting = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        collector.on_ended(RequestEnded("e", 0, "the engine broke"))
        with pytest.raises(EngineFailedError, match="request r: the engine broke"):
            await waiting

    asyncio.run(run())


def stream_of(request: EngineRequest, **options) -> tuple[Collector, AsyncIterator[StreamEvent]]:
    """A collector whose request has started, and the events that its reader takes."""
    collector = Collector("r", request, ByteTokenizer())
    collector.on_started(RequestStarted("e", 1, 0))
    return collector, collector.events(**options)


@pytest.mark.parametrize("heartbeat_s", [0.02, 1000.0])
def test_tokens_that_are_held_back_do_not_put_off_heartbeats(heartbeat_s: float):
    async def run() -> StreamEvent:
        request = make_request("e", [1], max_tokens=10**6)
        collector, events = stream_of(request, heartbeat_s=heartbeat_s, min_tokens_per_delta=5000)
        assert [type(await anext(events)) for _ in range(2)] == [Accepted, Started]
        collector.on_output(SequenceOutput("e", 0, (65,)))
        assert isinstance(await anext(events), Delta)  # a first token is not held back
        reading = asyncio.ensure_future(anext(events))
        while not reading.done():
            await asyncio.sleep(0.001)  # a twentieth of the interval between two wakes
            collector.on_output(SequenceOutput("e", 0, (65,) * 10))
            collector.wake_reader()
        return await reading

    expected = Heartbeat if heartbeat_s < 1 else Delta
    assert isinstance(asyncio.run(run()), expected)


@pytest.mark.parametrize("is_reading", [True, False])
def test_only_what_the_reader_could_take_counts_as_its_delay(is_reading: bool):
    """Nobody wakes the reader, as in a pause of the front's, and tokens come in one turn."""

    async def run() -> None:
        request = make_request("e", [1], n=2, max_tokens=100)
        collector, events = stream_of(request)
        collector.max_pending_tokens = 8
        assert [type(await anext(events)) for _ in range(2)] == [Accepted, Started]
        reading = None
        if is_reading:
            reading = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
        for _ in range(20):
            collector.on_output(SequenceOutput("e", 0, (65,)))
        assert collector.is_behind is not is_reading
        if reading is not None:
            delta = await reading
            assert isinstance(delta, Delta) and len(delta.token_ids) == 20

    asyncio.run(run())


def test_a_buffer_that_fills_wakes_its_reader():
    async def run() -> list[int]:
        collector, events = stream_of(make_request("e", [1], max_tokens=100))
        collector.max_pending_tokens = 8
        assert [type(await anext(events)) for _ in range(2)] == [Accepted, Started]
        sizes: list[int] = []
        reading = asyncio.ensure_future(anext(events))
        for _ in range(21):
            await asyncio.sleep(0)
            collector.on_output(SequenceOutput("e", 0, (65,)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if reading.done():
                delta = reading.result()
                assert isinstance(delta, Delta)
                sizes.append(len(delta.token_ids))
                reading = asyncio.ensure_future(anext(events))
        reading.cancel()
        return sizes

    assert asyncio.run(run()) == [1, 5, 5, 5, 5]
