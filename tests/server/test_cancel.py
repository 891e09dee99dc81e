"""Whoever goes away, in whatever state, gives every block back within two steps."""

import asyncio
import itertools
import random
import time
from typing import Any

import grpc
import pytest
from helpers.running_service import Service, ask, run_service, tokens_of, until
from helpers.served_engines import STALL, solo_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.outputs import EngineStats
from jaxpaged.v1 import admin_pb2
from jaxpaged.v1 import inference_pb2 as pb

LONG, CROWDED = 300, 600
NEIGHBOUR = [9, 9, 9]
_numbers = itertools.count()


class AbortSpy:
    """Asks an engine for its counts right before and right after each abort."""

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
        self.stats: list[tuple[Any, Any]] = []
        abort = llm.engine.abort

        def spied(request_id: str) -> Any:
            before, done, after = llm.engine.stats(), abort(request_id), llm.engine.stats()
            self.stats.append((before, after))
            return done

        monkeypatch.setattr(llm.engine, "abort", spied)

    async def last(self) -> tuple[EngineStats, EngineStats]:
        await until(lambda: self.stats)
        before, after = (asyncio.wrap_future(future) for future in self.stats[-1])
        return await before, await after


def start(service: Service, request: pb.GenerateRequest) -> Any:
    return service.stub.Stream(pb.StreamRequest(request=request))


def open_stream(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(
        "/jaxpaged.v1.InferenceService/Stream",
        request_serializer=pb.StreamRequest.SerializeToString,
        response_deserializer=pb.StreamResponse.FromString,
    )


def fresh_prompt(num_tokens: int) -> list[int]:
    """One that the prefix cache does not have: the engine is shared."""
    number = next(_numbers)
    return [90 + number // 10, 90 + number % 10, *(i % 100 for i in range(num_tokens - 2))]


async def reach(service: Service, call: Any, state: str) -> None:
    """Reads a stream until its request is in `state`."""
    kind = {"queued": "accepted", "prefilling": "started"}.get(state, "delta")
    while not (await call.read()).HasField(kind):
        pass


async def check_continues(call: Any, prompt: list[int]) -> None:
    """The next tokens of a greedy neighbour are those that it would get alone."""
    whole, tokens = solo_tokens(prompt, CROWDED), []
    while len(tokens) < 5:
        tokens += (await call.read()).delta.token_ids
    places = range(len(whole) - len(tokens) + 1)
    assert any(whole[at : at + len(tokens)] == tokens for at in places)


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
def test_leaving_frees_all_blocks(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, state: str, n: int, how: str
):
    spy = AbortSpy(llm, monkeypatch)

    async def body(service: Service) -> None:
        rows = 8 if state == "queued" else 1
        neighbours = [start(service, ask([*NEIGHBOUR, row], LONG)) for row in range(rows)]
        for neighbour in neighbours:
            await reach(service, neighbour, "decoding")
        prompt = fresh_prompt(300 if state == "prefilling" else 20)  # 64 tokens a step
        if state == "prefilling" and how == "deadline":
            prompt[150] = STALL  # what is told of the first chunk comes before
        request = ask(prompt, LONG, seed=1, n=n)
        async with grpc.aio.insecure_channel(service.address) as channel:
            timeout_s = 0.3 if how == "deadline" else None
            call = open_stream(channel)(pb.StreamRequest(request=request), timeout=timeout_s)
            if how == "deadline":
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await tokens_of(call)
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                await reach(service, call, state)
            if how == "cancel":
                call.cancel()
        before, after = await spy.last()
        assert after.steps - before.steps <= 2
        assert after.running_requests + after.queued_requests == len(neighbours)
        assert len(spy.stats) == 1
        for row, neighbour in enumerate(neighbours):
            await check_continues(neighbour, [*NEIGHBOUR, row])
            neighbour.cancel()

    run_service(llm, body)


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_while_preempted_frees_all_blocks(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, n: int, how: str
):
    spy = AbortSpy(llm, monkeypatch)

    async def body(service: Service) -> None:
        timeout_s = None
        if how == "deadline":
            # Between the first preemption and the neighbours' end, however fast this machine is.
            timeout_s = 1.4 * await seconds_to_preempt(service, n)
            spy.stats.clear()
        begin = (await llm.stats()).preemptions
        neighbours = await crowd(service, n)
        async with grpc.aio.insecure_channel(service.address) as channel:
            request = pb.StreamRequest(request=ask(fresh_prompt(20), CROWDED, n=n))
            last = open_stream(channel)(request, timeout=timeout_s)
            if how == "deadline":
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await tokens_of(last)
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                await preempted(service, begin)
            if how == "cancel":
                last.cancel()
        before, after = await spy.last()
        assert before.preemptions > begin and after.steps - before.steps <= 2
        assert after.running_requests + after.queued_requests == len(neighbours)
        for row, neighbour in enumerate(neighbours):
            await check_continues(neighbour, [*NEIGHBOUR, row])
            neighbour.cancel()

    run_service(llm, body)


async def crowd(service: Service, n: int) -> list[Any]:
    """Decoding rows that leave room for `n` more, but not for all of their tokens.

    160 blocks of 16 hold 2560 tokens; eight rows want 8 * 600. The last to come is the first to go.
    """
    rows = [start(service, ask([*NEIGHBOUR, row], CROWDED)) for row in range(8 - n)]
    for row in rows:
        await reach(service, row, "decoding")
    return rows


async def preempted(service: Service, begin: int) -> None:
    while (await service.llm.stats()).preemptions == begin:
        await asyncio.sleep(0.005)


async def seconds_to_preempt(service: Service, n: int) -> float:
    """From a request's start until something is preempted, with `crowd` around it."""
    begin = (await service.llm.stats()).preemptions
    calls = await crowd(service, n)
    start_s = time.monotonic()
    calls.append(start(service, ask(fresh_prompt(20), CROWDED, n=n)))
    await preempted(service, begin)
    seconds = time.monotonic() - start_s
    for call in calls:
        call.cancel()
    await service.idle_stats()
    return seconds


def test_200_random_cancels_leave_nothing_behind(llm: AsyncLLM):
    rng = random.Random(1)

    async def one(service: Service, number: int) -> None:
        prompt = [rng.randrange(100) for _ in range(rng.randrange(1, 100))]
        request = ask(prompt, rng.randrange(1, 100), seed=number, n=rng.choice((1, 1, 4)))
        is_stream, delay_s = rng.random() < 0.7, rng.random() * 0.4
        call = start(service, request) if is_stream else service.stub.Generate(request)
        reader = asyncio.ensure_future(tokens_of(call) if is_stream else call)
        await asyncio.sleep(delay_s)
        call.cancel()
        await asyncio.wait([reader])

    async def body(service: Service) -> None:
        room = asyncio.Semaphore(40)

        async def one_of_many(number: int) -> None:
            async with room:
                await one(service, number)

        await asyncio.gather(*map(one_of_many, range(200)))
        await service.idle_stats()
        response = await service.stub.Generate(ask([1, 2, 3], 10))
        assert list(response.completions[0].token_ids) == solo_tokens([1, 2, 3], 10)

    run_service(llm, body)


def test_abort_wakes_the_reader_and_is_idempotent(llm: AsyncLLM):
    async def body(service: Service) -> None:
        call = start(service, ask([5, 6], LONG, request_id="mine", n=2))
        await reach(service, call, "decoding")
        abort = admin_pb2.AbortRequest(request_ids=["mine", "never"])
        assert list((await service.admin.Abort(abort)).aborted_request_ids) == ["mine"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokens_of(call)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert list((await service.admin.Abort(abort)).aborted_request_ids) == []
        again = await service.stub.Generate(ask([5, 6], 4, request_id="mine"))
        assert again.request_id == "mine"

    run_service(llm, body)
