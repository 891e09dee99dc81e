"""Faults that gRPC services of inference engines have had: each must not come back."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
from helpers.running_service import EOF, SERVING, Service, ask, run_service, tokens_of, until
from helpers.served_engines import long_text, solo_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ServerDrainingError
from jaxpaged.server.grpc_errors import error_from_rpc
from jaxpaged.v1 import admin_pb2
from jaxpaged.v1 import inference_pb2 as pb

CODE = grpc.StatusCode


def test_many_streams_hold_up_neither_health_nor_abort(llm: AsyncLLM):
    async def body(service: Service) -> None:
        names = [f"stream {number}" for number in range(40)]
        calls = [
            service.stub.Stream(pb.StreamRequest(request=ask([number], 600, request_id=name)))
            for number, name in enumerate(names)
        ]
        for call in calls:
            assert (await call.read()).HasField("accepted")
        assert await asyncio.wait_for(service.status(), 10) == SERVING
        abort = service.admin.Abort(admin_pb2.AbortRequest(request_ids=names))
        assert set((await asyncio.wait_for(abort, 10)).aborted_request_ids) == set(names)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokens_of(call)
            assert caught.value.code() is CODE.ABORTED

    run_service(llm, body)


def test_a_request_id_is_taken_while_it_runs_and_free_afterwards(llm: AsyncLLM):
    async def body(service: Service) -> None:
        first = service.stub.Stream(pb.StreamRequest(request=ask([1], 300, request_id="same")))
        assert (await first.read()).HasField("accepted")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.Generate(ask([2], 5, request_id="same"))
        assert caught.value.code() is CODE.ALREADY_EXISTS
        tokens = await tokens_of(first)
        assert tokens == {0: solo_tokens([1], 300)}
        answer = await service.stub.Generate(ask([2], 5, request_id="same"))
        assert list(answer.completions[0].token_ids) == solo_tokens([2], 5)

    run_service(llm, body)


def test_a_huge_prompt_is_too_long_and_not_too_large(llm: AsyncLLM):
    async def body(service: Service) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="max_model_len=640") as caught:
            await service.stub.Generate(ask([1] * 1_500_000, 5))
        assert caught.value.code() is CODE.INVALID_ARGUMENT

    run_service(llm, body)


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_usage_and_endings_of_a_stream_are_those_of_the_unary_call(llm: AsyncLLM, max_tokens: int):
    async def body(service: Service) -> None:
        request = ask([3, 1, 4], max_tokens, seed=11, n=2)
        unary = await service.stub.Generate(request)
        # a stop string that ends the second sequence somewhere in the middle
        request.stop.stop.append(unary.completions[1].text[max_tokens // 2 :][:2] or "\0")
        unary = await service.stub.Generate(request)
        endings: dict[int, int] = {}
        texts, ids, finished = {0: "", 1: ""}, {0: [], 1: []}, []
        call = service.stub.Stream(pb.StreamRequest(request=request))
        while (message := await call.read()) is not EOF:
            assert not finished, "something came after the end"
            if message.HasField("delta"):
                delta = message.delta
                assert delta.index not in endings, "a delta after the last one"
                texts[delta.index] += delta.text
                ids[delta.index] += delta.token_ids
                if delta.finish_reason:
                    endings[delta.index] = delta.finish_reason
            elif message.HasField("finished"):
                finished.append(message.finished.usage)
        (usage,) = finished
        assert usage.completion_tokens == unary.usage.completion_tokens
        assert usage.prompt_tokens == unary.usage.prompt_tokens == 3
        for index, completion in enumerate(unary.completions):
            assert texts[index] == completion.text and ids[index] == list(completion.token_ids)
            assert endings[index] == completion.finish_reason

    run_service(llm, body)


@pytest.mark.parametrize("in_time", [True, False])
def test_what_is_still_tokenised_when_the_server_drains_gets_the_grace_time(
    llm: AsyncLLM, may_go: threading.Event, in_time: bool
):
    async def body(service: Service) -> None:
        calls = [
            service.stub.Generate(long_text()),
            service.stub.Stream(pb.StreamRequest(request=long_text())),
        ]
        await until(lambda: llm.live.num_queued == 2)
        timeout = {"seconds": 50} if in_time else {"nanos": 50_000_000}
        drain = service.admin.Drain(admin_pb2.DrainRequest(timeout=timeout))
        answers: list[Any] = [tokens_of(call) if hasattr(call, "read") else call for call in calls]
        if in_time:
            await until(lambda: not service.server._state.takes_requests)
            assert not drain.done()
            may_go.set()
            assert len((await answers[0]).completions[0].token_ids) == 2
            assert len((await answers[1])[0]) == 2
        for answer in [] if in_time else answers:  # the tokenizer has not let them go
            with pytest.raises(grpc.aio.AioRpcError, match="server is stopping") as caught:
                await answer
            assert caught.value.code() is CODE.UNAVAILABLE
            assert isinstance(error_from_rpc(caught.value), ServerDrainingError)
        response = await drain
        may_go.set()
        counts = response.finished_requests, response.aborted_requests
        assert counts == ((2, 0) if in_time else (0, 2))

    run_service(llm, body)


@pytest.mark.long
def test_clients_that_ping_often_keep_their_connection(llm: AsyncLLM):
    async def body(service: Service) -> None:
        options = [
            ("grpc.keepalive_time_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        async with grpc.aio.insecure_channel(service.address, options=options) as channel:
            call: Any = channel.unary_unary(
                "/jaxpaged.v1.InferenceService/GetModelInfo",
                response_deserializer=pb.GetModelInfoResponse.FromString,
            )
            await call(b"")
            states = [channel.get_state()]
            for _ in range(30):
                await asyncio.sleep(1)
                states.append(channel.get_state())
            assert set(states) == {grpc.ChannelConnectivity.READY}

    run_service(llm, body)
