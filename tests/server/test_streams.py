"""What a stream promises its reader: acceptance, heartbeats, merging, deadlines, buffers."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from helpers.running_service import EOF, Service, ask, run_service, tokens_of, until
from helpers.served_engines import make_llm, solo_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.v1 import inference_pb2 as pb

CODE = grpc.StatusCode
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def occupy(service: Service) -> list[Any]:
    """Fills all rows with long requests."""
    calls = [service.stub.Stream(pb.StreamRequest(request=ask([row, 7], 300))) for row in range(8)]
    for call in calls:
        while not (await call.read()).HasField("delta"):
            pass
    return calls


def test_generate_tells_acceptance_while_it_waits(llm: AsyncLLM):
    async def body(service: Service) -> None:
        calls = await occupy(service)
        # called as a stream: for a unary call this library shows the metadata only at its end
        async with grpc.aio.insecure_channel(service.address) as channel:
            waiting: Any = channel.unary_stream(
                "/jaxpaged.v1.InferenceService/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )(ask([1], 2, request_id="mine"))
            metadata = await asyncio.wait_for(waiting.initial_metadata(), 10)
            assert dict(metadata)["jaxpaged-request-id"] == "mine"
            assert service.llm.live.num_queued == 1 and not waiting.done()
            for call in calls:
                call.cancel()
            assert len((await waiting.read()).completions[0].token_ids) == 2

    run_service(llm, body)


@pytest.mark.parametrize("is_stream", [False, True])
def test_queue_timeout_ends_only_what_has_not_started(llm: AsyncLLM, is_stream: bool):
    async def body(service: Service) -> None:
        request = ask([1, 2], 100)
        request.queue_timeout.nanos = 150_000_000
        started = service.stub.Generate(request)  # at once: there is room
        assert len((await started).completions[0].token_ids) == 100  # takes longer than that
        calls = await occupy(service)
        stub = service.stub
        call = (
            stub.Stream(pb.StreamRequest(request=request)) if is_stream else stub.Generate(request)
        )
        with pytest.raises(grpc.aio.AioRpcError, match=r"queue_timeout=0\.15 s") as caught:
            await (tokens_of(call) if is_stream else call)
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
        assert "grpc-retry-pushback-ms" in dict(caught.value.trailing_metadata() or ())
        assert service.llm.live.num_queued == 0
        for call in calls:
            call.cancel()

    run_service(llm, body)


def test_heartbeats_tell_the_place_in_the_queue(llm: AsyncLLM):
    async def body(service: Service) -> None:
        calls = await occupy(service)
        options = {"heartbeat_interval": {"nanos": 20_000_000}}
        waiting = [
            service.stub.Stream(pb.StreamRequest(request=ask([place], 30), options=options))
            for place in (1, 2)
        ]
        for place, call in enumerate(waiting, 1):
            assert (await call.read()).HasField("accepted")
            message = await asyncio.wait_for(call.read(), 10)
            assert message.HasField("heartbeat") and message.message_index == 1
            assert message.heartbeat.queue_position == place
        for call in calls:
            call.cancel()
        for place, call in enumerate(waiting, 1):
            tokens, last = [], None
            while (message := await call.read()) is not EOF:
                last = message.WhichOneof("event")
                tokens += message.delta.token_ids
            assert tokens == solo_tokens([place], 30) and last == "finished"

    run_service(llm, body)


def test_min_tokens_per_message_merges_all_but_the_first_and_last(llm: AsyncLLM):
    async def body(service: Service) -> None:
        options = {"min_tokens_per_message": 8}
        request = pb.StreamRequest(request=ask([3], 30, seed=5, n=2), options=options)
        call = service.stub.Stream(request)
        sizes: dict[int, list[int]] = {0: [], 1: []}
        while (message := await call.read()) is not EOF:
            if message.HasField("delta"):
                sizes[message.delta.index].append(len(message.delta.token_ids))
        for of_index in sizes.values():
            assert sum(of_index) == 30 and of_index[0] < 8
            assert all(size >= 8 for size in of_index[1:-1])

    run_service(llm, body)


def test_many_streams_get_fewer_messages_and_all_tokens():
    llm = make_llm("thread", 0.001)

    async def body(service: Service) -> None:
        calls = [service.stub.Stream(pb.StreamRequest(request=ask([row], 60))) for row in range(8)]
        num_messages = 0
        for row, call in enumerate(calls):
            tokens = []
            while (message := await call.read()) is not EOF:
                num_messages += message.HasField("delta")
                tokens += message.delta.token_ids
            assert tokens == solo_tokens([row], 60)
        assert num_messages < 8 * 30

    run_service(llm, body, max_messages_per_s=200)
    llm.close()


def test_a_reader_that_stops_reading_costs_only_itself(llm: AsyncLLM):
    async def body(service: Service) -> None:
        options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(service.address, options=options) as channel:
            call: Any = channel.unary_stream(
                "/jaxpaged.v1.InferenceService/Stream",
                request_serializer=pb.StreamRequest.SerializeToString,
                response_deserializer=pb.StreamResponse.FromString,
            )
            # no flow-control window is so small that these few tokens would fill it: the write
            # that never returns is made here
            slow = call(pb.StreamRequest(request=ask([1], 500, request_id="slow")))
            await until(lambda: "slow" in service.llm.live)
            fast = service.stub.Stream(pb.StreamRequest(request=ask([2], 100)))
            assert await tokens_of(fast) == {0: solo_tokens([2], 100)}
            with pytest.raises(grpc.aio.AioRpcError, match="behind by more than 64") as caught:
                while await slow.read() is not EOF:
                    await asyncio.sleep(0)
            assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
            await service.idle_stats()

    stop_writes_of(llm, "slow", body)


def stop_writes_of(llm: AsyncLLM, request_id: str, body) -> None:
    """Runs `body` while the events of one request are not taken once it has begun."""
    stream_events = llm.stream_events

    async def blocked(*arguments, **options):
        async for event in stream_events(*arguments, **options):
            yield event
            if options["request_id"] == request_id:
                await asyncio.sleep(1.5)

    llm.stream_events = blocked  # type: ignore[method-assign]
    try:
        run_service(llm, body, max_pending_tokens=64)
    finally:
        del llm.stream_events


def test_traceparent_is_in_the_log_and_the_prompt_is_not(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture
):
    async def body(service: Service) -> None:
        request = pb.GenerateRequest(text="a secret prompt", request_id="traced")
        for header in (TRACEPARENT, "not a traceparent\n"):
            await service.stub.Generate(request, metadata=(("traceparent", header.strip()),))

    with caplog.at_level(logging.DEBUG, logger="jaxpaged"):
        run_service(llm, body)
    lines = [line for line in caplog.messages if "'traced'" in line]
    assert f"traceparent={TRACEPARENT} ended=OK" in lines[0]
    assert "traceparent=- ended=OK" in lines[1]
    assert "secret" not in caplog.text
