"""Readers that go away, engines that fail or close: nothing leaks and nobody waits for ever."""

import asyncio
import threading

import pytest
from helpers.fronts import ScriptedFront, scripted_front

from jaxpaged.errors import EngineClosedError, EngineFailedError
from jaxpaged.outputs import Delta, Finished, RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams

ANSWERS = {"p": "x" * 200, "prompt of some length, more than a block": "y" * 200, "q": "fine"}
LONG = SamplingParams(max_tokens=150)


async def check_clean(front: ScriptedFront) -> None:
    """Two steps later at the latest nothing is held, and the next request is served."""
    output = await front.llm.generate("q", SamplingParams())
    assert output.completions[0].text == "fine"
    stats = await front.llm.stats()
    assert (stats.running_requests, stats.queued_requests, stats.used_blocks) == (0, 0, 0)
    assert len(front.llm.live) == 0 and front.llm.live.num_queued == 0


def with_front(body, **options) -> None:
    async def run() -> None:
        front = scripted_front(ANSWERS, **options)
        try:
            await asyncio.wait_for(body(front), timeout=20)
        finally:
            front.runner.open.set()
            front.llm.close()

    asyncio.run(run())


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("n", [1, 4, 6])
@pytest.mark.parametrize("stage", ["submitting", "queued", "prefill", "decoding", "ended"])
def test_a_cancelled_call_frees_everything(stage, n, overlap):
    """B56, B57."""

    async def body(front: ScriptedFront) -> None:
        llm, params = front.llm, SamplingParams(max_tokens=150, n=n)
        if stage in ("queued", "prefill", "decoding"):
            front.runner.open.clear()
            front.runner.held_step = 8 if stage == "decoding" else 0
        others = []
        if stage == "queued":
            others = [asyncio.ensure_future(llm.generate("p", LONG)) for _ in range(5)]
            while not front.runner.num_steps:
                await asyncio.sleep(0)
        call = asyncio.ensure_future(
            llm.generate("prompt of some length, more than a block", params)
        )
        if stage != "submitting":
            await asyncio.sleep(0)
        if stage in ("prefill", "decoding"):
            while front.runner.num_steps < max(1, front.runner.held_step):
                await asyncio.sleep(0)
        if stage == "ended":
            await call
        call.cancel()
        for other in others:
            other.cancel()
        if stage != "ended":
            with pytest.raises(asyncio.CancelledError):
                await call
        front.runner.open.set()
        await check_clean(front)

    with_front(body, overlap=overlap, max_num_tokens=16)


@pytest.mark.parametrize("num_taken", [0, 1, 2, 3])
def test_a_closed_stream_frees_everything(num_taken):
    async def body(front: ScriptedFront) -> None:
        events = front.llm.stream_events("p", LONG)
        for _ in range(num_taken):
            await anext(events)
        await events.aclose()
        await check_clean(front)

    with_front(body)


def test_a_deadline_is_a_cancel():
    async def body(front: ScriptedFront) -> None:
        front.runner.open.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await front.llm.generate("p", LONG)
        front.runner.open.set()
        await check_clean(front)

    with_front(body)


def test_abort_wakes_the_reader_and_is_idempotent():
    """B58."""

    async def body(front: ScriptedFront) -> None:
        llm = front.llm
        assert await llm.abort(["unknown"]) == []
        front.runner.open.clear()
        stream = llm.stream_events("p", SamplingParams(max_tokens=150, n=2), request_id="s")
        unary = asyncio.ensure_future(llm.generate("p", LONG, request_id="u"))
        await anext(stream)
        aborting = [asyncio.ensure_future(llm.abort(["s", "u", "other"])) for _ in range(2)]
        await asyncio.sleep(0)
        front.runner.open.set()
        aborted = [await task for task in aborting]
        assert sorted(i for ids in aborted for i in ids) == ["s", "u"], "each told once"
        rest = [event async for event in stream]
        assert isinstance(rest[-1], Finished)
        reasons = [e.finish_reason for e in rest if isinstance(e, Delta) and e.finish_reason]
        assert reasons and set(reasons) == {FinishReason.CANCELLED}
        assert (await unary).completions[0].finish_reason is FinishReason.CANCELLED
        assert await llm.abort(["s", "u"]) == []
        await check_clean(front)

    with_front(body)


def test_a_stop_string_ends_a_sequence_for_the_engine_too():
    async def body(front: ScriptedFront) -> None:
        front.runner.open.clear()
        front.runner.held_step = 20
        params = SamplingParams(max_tokens=150, stop="xxx")
        call = asyncio.ensure_future(front.llm.generate("p", params))
        while front.runner.num_steps < 20 and not call.done():  # done: the stop was told early
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the outputs of the steps before are taken, the stop is told
        front.runner.open.set()
        assert (await call).completions[0].token_ids == list(b"xxx")
        assert (await front.llm.stats()).steps < 30
        await check_clean(front)

    with_front(body)


# --- a broken engine ---------------------------------------------------------------------------


def test_a_failed_step_is_told_and_the_front_goes_on():
    """B81."""

    async def body(front: ScriptedFront) -> None:
        llm, collect = front.llm, front.runner.collect

        def fail_once(handle):
            front.runner.collect = collect
            front.runner.num_steps = front.engine.scheduler.num_steps
            raise RuntimeError("injected")

        front.runner.collect = fail_once
        calls = [llm.generate("p", LONG) for _ in range(7)]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, EngineFailedError)
        assert "a step of the engine failed: RuntimeError" in str(first)
        # The others ran with it, or came right after it.
        assert all(
            isinstance(other, EngineFailedError)
            or (isinstance(other, RequestOutput) and other.completions[0].text == "x" * 150)
            for other in others
        )
        await check_clean(front)

    with_front(body)


def test_a_dead_engine_fails_everybody_and_refuses_the_rest():
    async def body(front: ScriptedFront) -> None:
        llm = front.llm
        front.runner.open.clear()
        running = [asyncio.ensure_future(llm.generate("p", LONG)) for _ in range(6)]
        await asyncio.sleep(0)
        asking = asyncio.ensure_future(llm.stats())
        await asyncio.sleep(0)
        front.runner.is_broken = True
        front.runner.open.set()
        answers = await asyncio.gather(*running, return_exceptions=True)
        assert {type(answer) for answer in answers} == {EngineClosedError}
        assert "the engine died: RuntimeError" in str(answers[0])
        await asyncio.gather(asking, return_exceptions=True)
        for call in (llm.generate("q", SamplingParams()), llm.stats(), llm.reset_prefix_cache()):
            with pytest.raises(EngineClosedError, match="the engine died"):
                await call
        llm.close()
        assert front.runner.is_closed

    with_front(body)


def test_a_cancelled_question_does_not_kill_the_engine():
    async def body(front: ScriptedFront) -> None:
        front.runner.open.clear()
        running = asyncio.ensure_future(front.llm.generate("p", LONG))
        while not front.runner.num_steps:
            await asyncio.sleep(0)
        asking = asyncio.ensure_future(front.llm.stats())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        front.runner.open.set()
        assert (await running).completions[0].text == "x" * 150
        await check_clean(front)

    with_front(body)


def test_close_fails_what_runs_and_is_idempotent():
    async def body(front: ScriptedFront) -> None:
        llm = front.llm
        front.runner.open.clear()
        front.runner.held_step = 5
        calls: list[asyncio.Future] = [
            asyncio.ensure_future(llm.generate("p", LONG)) for _ in range(6)
        ]
        while front.runner.num_steps < 5:
            await asyncio.sleep(0)
        calls.append(asyncio.ensure_future(llm.stats()))
        await asyncio.sleep(0)
        threading.Timer(0.05, front.runner.open.set).start()
        llm.close()
        llm.close()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers[:-1]} == {EngineClosedError}
        assert "the engine was closed" in str(answers[0])
        assert front.runner.is_closed
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            await llm.generate("q", SamplingParams())
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            await llm.stats()

    with_front(body)


def test_a_front_serves_one_loop_after_the_other():
    front = scripted_front(ANSWERS)
    for _ in range(2):
        output = asyncio.run(front.llm.generate("q", SamplingParams()))
        assert output.completions[0].text == "fine"

    async def leave() -> None:
        events = front.llm.stream_events("p", LONG)
        await anext(events)
        await events.aclose()

    asyncio.run(leave())
    asyncio.run(check_clean(front))
    front.llm.close()


def test_a_loop_cannot_take_over_what_another_runs():
    async def body(front: ScriptedFront) -> None:
        front.runner.open.clear()
        call = asyncio.ensure_future(front.llm.generate("p", LONG))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another event loop are still running"):
            await asyncio.to_thread(asyncio.run, front.llm.generate("q", SamplingParams()))
        front.runner.open.set()
        await call
        await check_clean(front)

    with_front(body)
