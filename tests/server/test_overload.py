"""More load than the engine can take: refused at once, and those that were let in do not notice."""

import asyncio
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest
from helpers.running_service import Service, ask, run_service, tokens_of, until
from helpers.served_engines import long_text, make_llm, solo_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.server import service as service_module
from jaxpaged.v1 import inference_pb2 as pb

CODE = grpc.StatusCode


@pytest.mark.parametrize("where", ["thread", "process"])
def test_ten_times_the_load_is_refused_at_once(where: str):
    llm = make_llm(where, 0.002, max_queued_requests=4)

    async def body(service: Service) -> None:
        async def one(number: int) -> str:
            request = ask([number % 100, number // 100], 20, request_id=f"{number}")
            try:
                answer = await service.stub.Generate(request)
            except grpc.aio.AioRpcError as error:
                assert error.code() is CODE.RESOURCE_EXHAUSTED
                assert "max_queued_requests=4" in (error.details() or "")
                assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ())
                return "refused"
            expected = solo_tokens([number % 100, number // 100], 20)
            assert list(answer.completions[0].token_ids) == expected
            return "served"

        endings = await asyncio.gather(*map(one, range(120)))
        # All come before the first ends: 8 rows and 4 places to wait, and what the engine starts
        # in the meantime.
        assert 12 <= endings.count("served") < 60
        assert service.llm.live.num_queued == 0
        await one(120)

    run_service(llm, body)
    llm.close()


def test_a_full_queue_refuses_before_it_works_on_the_prompt(llm: AsyncLLM):
    """The limit is set for the test: the fixture's front is shared."""

    async def body(service: Service) -> None:
        llm.live.num_queued += llm.config.max_queued_requests
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="wait already"):
                await service.stub.Generate(ask([10**9], 5))  # not even its ids are looked at
            with pytest.raises(grpc.aio.AioRpcError, match="wait already"):
                await service.stub.Generate(ask([1] * 700, 5))  # nor how many they are
        finally:
            llm.live.num_queued -= llm.config.max_queued_requests
        with pytest.raises(grpc.aio.AioRpcError, match="vocabulary"):
            await service.stub.Generate(ask([10**9], 5))
        with pytest.raises(grpc.aio.AioRpcError, match="max_model_len=640"):
            await service.stub.Generate(ask([1] * 700, 5))

    run_service(llm, body)


def test_prompts_that_are_still_tokenised_wait_in_the_queue_too(
    llm: AsyncLLM, may_go: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    """Else a flood of long texts would pile up before the tokenizer, however short the queue."""
    monkeypatch.setattr(llm._intake, "config", replace(llm.config, max_queued_requests=3))

    async def body(service: Service) -> None:
        long = [service.stub.Generate(long_text()) for _ in range(3)]
        await until(lambda: llm.live.num_queued == 3)
        with pytest.raises(grpc.aio.AioRpcError, match="3 requests wait already"):
            await service.stub.Generate(ask([1], 3))
        long[0].cancel()
        await until(lambda: llm.live.num_queued == 2)
        waits = service.stub.Generate(ask([1], 3))
        assert list((await waits).completions[0].token_ids) == solo_tokens([1], 3)
        may_go.set()
        for call in long[1:]:
            assert len((await call).completions[0].token_ids) == 2

    run_service(llm, body)


def test_lists_that_are_too_long_are_refused_before_they_are_copied(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
):
    """A copy of what 64 MiB can hold takes seconds, in which nobody gets an answer."""

    def copies(request: Any) -> Any:
        raise AssertionError("it was copied")

    monkeypatch.setattr(service_module, "prompt_from_proto", copies)
    monkeypatch.setattr(service_module, "params_from_proto", copies)
    many = range(1, 700)
    messages = [{"role": "user"}] * len(many)
    requests = [
        (pb.GenerateRequest(token_ids={"ids": many}), "max_model_len=640"),
        (pb.GenerateRequest(chat={"messages": messages}), "max_model_len=640"),
        (pb.GenerateRequest(sampling={"allowed_token_ids": many}), "at most 260"),
        (pb.GenerateRequest(sampling={"logit_bias": dict.fromkeys(many, 1.0)}), "at most 260"),
        (pb.GenerateRequest(stop={"stop_token_ids": many}), "at most 260"),
        (pb.GenerateRequest(stop={"stop": ["x"] * len(many)}), "at most 16"),
    ]

    async def body(service: Service) -> None:
        stub = service.stub
        calls = [(stub.Generate(request), match) for request, match in requests]
        calls += [
            (stub.Stream(pb.StreamRequest(request=request)).read(), match)
            for request, match in requests
        ]
        tokenize = pb.TokenizeRequest(chat={"messages": messages})
        calls.append((stub.Tokenize(tokenize), "max_model_len=640"))
        for call, match in calls:
            with pytest.raises(grpc.aio.AioRpcError, match=match) as caught:
                await call
            assert caught.value.code() is CODE.INVALID_ARGUMENT

    run_service(llm, body)


async def one_of_many(service: Service, number: int) -> None:
    """Five of eight kinds are answered, unary or streamed; the others are refused or go away."""
    prompt, max_tokens, n = [number % 90, number % 7, 3], 1 + number % 12, 1 + number % 2
    request = ask(prompt, max_tokens, seed=number, n=n)
    kind = ("cancel", "refuse", "stream", "leave", "late", *["generate"] * 3)[number % 8]
    if kind == "refuse":
        request.sampling.top_p = 7
    timeout_s = 0.005 if kind == "late" else None
    tokens: dict[int, list[int]] = {}
    try:
        if kind in ("stream", "leave"):
            call: Any = service.stub.Stream(pb.StreamRequest(request=request))
            if kind == "leave":
                await call.read()
                call.cancel()
            tokens = await tokens_of(call)
        else:
            call = service.stub.Generate(request, timeout=timeout_s)
            if kind == "cancel":
                await asyncio.sleep(0.005)
                call.cancel()
            tokens = {c.index: list(c.token_ids) for c in (await call).completions}
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        assert kind not in ("stream", "generate")
        return
    for index in range(n):
        assert tokens[index] == solo_tokens(prompt, max_tokens, number + index)


def soak(llm: AsyncLLM, num_requests: int) -> None:
    """Mixed requests; nothing is more than before at the end, in either process."""
    engine: Any = llm.engine
    processes = front, engine_process = psutil.Process(), psutil.Process(engine.process_id)

    def resources() -> tuple[int, ...]:
        descriptors = [process.num_fds() for process in processes]
        return *descriptors, engine_process.num_threads(), threading.active_count()

    def memory() -> list[int]:
        return [process.memory_info().rss for process in processes]

    async def body(service: Service) -> None:
        todo = iter(range(num_requests))

        async def client() -> None:
            for number in todo:
                await one_of_many(service, number)

        for number in range(200):  # what is only made once is made now
            await one_of_many(service, number)
        before, memory_before, threads_before = resources(), memory(), front.num_threads()
        await asyncio.gather(*(client() for _ in range(32)))
        await service.idle_stats()

        def grown() -> bool:
            return any(now > then for now, then in zip(resources(), before, strict=True))

        end = time.monotonic() + 20
        while grown() and time.monotonic() < end:
            await asyncio.sleep(0.1)
        assert not grown(), (resources(), before)
        # gRPC's own pool, which Python does not see, has a thread more or less from time to time.
        assert front.num_threads() <= threads_before + 4
        for now, then in zip(memory(), memory_before, strict=True):
            assert now - then < 50 * 2**20

    run_service(llm, body, timeout_s=280)


@pytest.fixture(scope="module")
def fast_llm() -> Generator[AsyncLLM]:
    llm = make_llm("process", 0.0, num_blocks=160)
    yield llm
    llm.close()


def test_soak_of_5000_requests(fast_llm: AsyncLLM):
    soak(fast_llm, 5000)


@pytest.mark.long
def test_soak_of_20000_requests(fast_llm: AsyncLLM):
    soak(fast_llm, 20_000)
