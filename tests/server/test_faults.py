"""Faults stay with their request where they can, and with what runs where they cannot."""

import asyncio
import os
import signal
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from helpers.running_service import (
    NOT_SERVING,
    SERVING,
    Service,
    ask,
    run_service,
    serving,
    tokens_of,
    until,
)
from helpers.served_engines import EXIT, NON_FINITE, RAISE, STALL, make_llm, solo_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.engine_client import EngineState
from jaxpaged.v1 import inference_pb2 as pb

CODE = grpc.StatusCode
PROMPTS = [[row, 40, 41] for row in range(4)]


async def failure(call: Any) -> tuple[grpc.StatusCode, str, bool]:
    """A failed call's code and reason, and whether it says when to try again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (tokens_of(call) if hasattr(call, "read") else call)
    raw = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    info, retry = ErrorInfo(), RetryInfo()
    details = Status.FromString(raw).details
    assert details[0].Unpack(info)
    return caught.value.code(), info.reason, any(detail.Unpack(retry) for detail in details)


def stream(service: Service, request: pb.GenerateRequest) -> Any:
    return service.stub.Stream(pb.StreamRequest(request=request))


async def start_neighbours(service: Service) -> list[Any]:
    calls = [stream(service, ask(prompt, 300)) for prompt in PROMPTS]
    for call in calls:
        while not (await call.read()).HasField("started"):
            pass
    return calls


async def check_healthy(service: Service) -> None:
    """Later requests are served, and equal their solo runs."""
    await service.idle_stats()
    answers = [service.stub.Generate(ask(prompt, 20)) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, await asyncio.gather(*answers), strict=True):
        assert list(answer.completions[0].token_ids) == solo_tokens(prompt, 20)


@pytest.mark.parametrize("is_stream", [False, True])
def test_non_finite_logits_fail_that_request_alone(llm: AsyncLLM, is_stream: bool):
    async def body(service: Service) -> None:
        neighbours = await start_neighbours(service)
        bad = ask([NON_FINITE, 1], 20)
        call = stream(service, bad) if is_stream else service.stub.Generate(bad)
        assert await failure(call) == (CODE.INTERNAL, "NON_FINITE_LOGITS", False)
        for prompt, call in zip(PROMPTS, neighbours, strict=True):
            assert await tokens_of(call) == {0: solo_tokens(prompt, 300)}
        await check_healthy(service)

    run_service(llm, body)


def test_a_step_that_raises_fails_what_runs_and_nothing_later(llm: AsyncLLM):
    async def body(service: Service) -> None:
        neighbours = await start_neighbours(service)
        calls = [*neighbours, service.stub.Generate(ask([RAISE], 4))]
        for ending in await asyncio.gather(*map(failure, calls)):
            assert ending == (CODE.INTERNAL, "BUG", False)
        assert await service.status() == SERVING
        await check_healthy(service)

    run_service(llm, body)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_dead_engine_process_is_started_again(process_llm: AsyncLLM, how: str):
    async def body(service: Service) -> None:
        engine: Any = service.llm.engine
        neighbours = await start_neighbours(service)
        health = service.health.Watch(_health_request())
        assert (await health.read()).status == SERVING
        if how == "kill":
            os.kill(engine.process_id, signal.SIGKILL)
        else:
            neighbours.append(service.stub.Generate(ask([EXIT], 4)))
        for ending in await asyncio.gather(*map(failure, neighbours)):
            assert ending == (CODE.UNAVAILABLE, "ENGINE_RESTARTING", True)
        refused = service.stub.Generate(ask([1], 4))
        assert await failure(refused) == (CODE.UNAVAILABLE, "ENGINE_RESTARTING", True)
        for status in (NOT_SERVING, SERVING):
            assert (await asyncio.wait_for(health.read(), 20)).status == status
        await check_healthy(service)

    run_service(process_llm, body)


def test_a_stall_shows_in_health_and_passes(llm: AsyncLLM):
    async def body(service: Service) -> None:
        health = service.health.Watch(_health_request())
        assert (await health.read()).status == SERVING
        stalled = service.stub.Generate(ask([STALL], 3))
        assert (await asyncio.wait_for(health.read(), 20)).status == NOT_SERVING
        assert not stalled.done(), "health told only after the stall"
        assert (await asyncio.wait_for(health.read(), 20)).status == SERVING
        assert list((await stalled).completions[0].token_ids) == solo_tokens([STALL], 3)

    run_service(llm, body, stall_timeout_s=0.5)


def test_an_engine_that_keeps_dying_stays_down():
    llm = make_llm("process", max_restarts=1)

    async def body(service: Service) -> None:
        endings = []
        for _ in range(2):
            endings.append((await failure(service.stub.Generate(ask([EXIT], 4))))[1])
            await until(lambda: llm.engine.state is not EngineState.RESTARTING)
        assert endings == ["ENGINE_RESTARTING", "NOT_READY"]
        await until(service.server.health.engine_lost.is_set)
        assert await service.status() == NOT_SERVING
        code, reason, _ = await failure(service.stub.Generate(ask([1], 4)))
        assert (code, reason) == (CODE.UNAVAILABLE, "NOT_READY")

    async def run() -> None:
        async with serving(llm) as service:
            await body(service)

    asyncio.run(asyncio.wait_for(run(), 60))
    llm.close()


def _health_request() -> Any:
    return health_pb2.HealthCheckRequest(service="jaxpaged.v1.InferenceService")
