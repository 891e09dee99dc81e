"""AdminService, health and reflection, and a server that is still loading."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from helpers.fake_async_llm import STATS
from helpers.running_server import Running, with_server

from jaxpaged.server.config import ServerConfig
from jaxpaged.server.lifecycle import Server
from jaxpaged.v1 import admin_pb2
from jaxpaged.v1 import inference_pb2 as pb

NAMES = ("", "jaxpaged.v1.InferenceService", "jaxpaged.v1.AdminService")
SERVING = health_pb2.HealthCheckResponse.SERVING


def test_stats_with_and_without_blocks():
    async def body(running: Running) -> None:
        response = await running.admin.GetStats(admin_pb2.GetStatsRequest())
        for field in admin_pb2.EngineStats.DESCRIPTOR.fields:
            assert getattr(response.stats, field.name) == getattr(STATS, field.name)
        assert len(response.blocks) == 0
        response = await running.admin.GetStats(admin_pb2.GetStatsRequest(include_blocks=True))
        assert [b.references for b in response.blocks] == [0, 2, 1]
        assert [b.used_slots for b in response.blocks] == [0, 16, 5]
        assert [b.cached for b in response.blocks] == [False, True, False]

    with_server(body)


def test_watch_stats_repeats_until_cancelled():
    async def body(running: Running) -> None:
        request = admin_pb2.WatchStatsRequest(interval={"nanos": 20_000_000})
        call = running.admin.WatchStats(request)
        assert [(await call.read()).stats.steps for _ in range(3)] == [STATS.steps] * 3
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="at least"):
            await running.admin.WatchStats(admin_pb2.WatchStatsRequest(interval={})).read()

    with_server(body)


def test_abort_answers_the_ids_that_ran_and_reset_counts_blocks():
    async def body(running: Running) -> None:
        running.llm.running = {"a"}
        request = admin_pb2.AbortRequest(request_ids=["a", "never"])
        assert list((await running.admin.Abort(request)).aborted_request_ids) == ["a"]
        response = await running.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert response.forgotten_blocks == 3

    with_server(body)


def test_update_weights_names_the_version():
    async def body(running: Running) -> None:
        request = admin_pb2.UpdateWeightsRequest(checkpoint_path="/a/b", weights_version="v2")
        assert (await running.admin.UpdateWeights(request)).weights_version == "v2"
        request = admin_pb2.UpdateWeightsRequest(checkpoint_path="/a/b")
        assert (await running.admin.UpdateWeights(request)).weights_version == "b"
        assert running.llm.updates == [("/a/b", "v2"), ("/a/b", "b")]
        for field, request in (
            ("checkpoint_path", admin_pb2.UpdateWeightsRequest()),
            ("checkpoint_path", admin_pb2.UpdateWeightsRequest(checkpoint_path="x" * 5000)),
            (
                "weights_version",
                admin_pb2.UpdateWeightsRequest(checkpoint_path="a", weights_version="v" * 257),
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
                await running.admin.UpdateWeights(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(running.llm.updates) == 2

    with_server(body)


def test_admin_calls_are_not_on_the_inference_port():
    async def body(running: Running) -> None:
        call = running.channel.unary_unary("/jaxpaged.v1.AdminService/GetStats")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    with_server(body)


def test_health_answers_while_streams_run():
    async def body(running: Running) -> None:
        running.llm.hold.clear()
        streams = [running.stub.Stream(pb.StreamRequest(request={"text": "x"})) for _ in range(20)]
        for stream in streams:
            await stream.initial_metadata()
        for channel in (running.channel, running.admin_channel):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name in NAMES:
                request = health_pb2.HealthCheckRequest(service=name)
                assert (await _answer(stub.Check(request))).status == SERVING
        for stream in streams:
            stream.cancel()

    with_server(body)


def test_a_loading_server_is_not_ready_but_answers():
    async def body(running: Running) -> None:
        stub: Any = health_pb2_grpc.HealthStub(running.channel)
        for name in NAMES:
            response = await _answer(stub.Check(health_pb2.HealthCheckRequest(service=name)))
            assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (
            running.stub.Generate(pb.GenerateRequest(text="x")),
            running.stub.GetModelInfo(pb.GetModelInfoRequest()),
            running.admin.GetStats(admin_pb2.GetStatsRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="loading") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    with_server(body, is_loaded=False)


def test_reflection_lists_the_services_and_their_files():
    async def body(running: Running) -> None:
        for channel, name in zip((running.channel, running.admin_channel), NAMES[1:], strict=True):
            make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
            stub = make_stub(channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
            ]
            listed, found = [r async for r in stub.ServerReflectionInfo(iter(requests))]
            services = {s.name for s in listed.list_services_response.service}
            assert {name, "grpc.health.v1.Health"} <= services
            protos = found.file_descriptor_response.file_descriptor_proto
            file = FileDescriptorProto.FromString(protos[0])
            assert file.package == "jaxpaged.v1"

    with_server(body)


def test_a_port_in_use_is_one_clear_line():
    async def body(running: Running) -> None:
        taken = {"port": running.server.port, "admin_port": running.server.admin_port}
        for field, port in taken.items():
            config = replace(ServerConfig(port=0, admin_port=0), **{field: port})
            message = f"^{field}={port}: cannot listen on 127.0.0.1:{port}: .* in use$"
            with pytest.raises(OSError, match=message):
                Server(config)

    with_server(body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("max_request_bytes", -1),
        ("max_pending_tokens", 0),
        ("stop_grace_s", -0.5),
        ("stop_grace_s", float("nan")),
        ("max_engine_restarts", -1),
        ("keepalive_time_s", 0.0),
        ("keepalive_timeout_s", -1.0),
        ("stall_timeout_s", 0.0),
        ("max_messages_per_s", 0.0),
        ("max_request_bytes", 2**31),
        ("keepalive_time_s", 1e7),
        ("keepalive_timeout_s", 1e300),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(str(value))} must be "):
        ServerConfig(**{name: value})


def test_the_largest_settings_are_what_the_library_takes():
    async def body(running: Running) -> None:
        await running.stub.Generate(pb.GenerateRequest(text="x"))

    with_server(body, max_request_bytes=2**31 - 1, keepalive_time_s=2e6, keepalive_timeout_s=2e6)


def test_messages_above_the_limit_are_refused():
    async def body(running: Running) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Generate(pb.GenerateRequest(text="x" * 3000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await running.stub.Generate(pb.GenerateRequest(text="x"))

    with_server(body, max_request_bytes=2000)


@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_above_the_limit_end_their_call_alone(is_stream: bool):
    async def body(running: Running) -> None:
        running.llm.texts = ["x" * 3000]
        request = pb.GenerateRequest(text="x")
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            if is_stream:
                async for _ in running.stub.Stream(pb.StreamRequest(request=request)):
                    pass
            else:
                await running.stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.llm.texts = ["short"]
        answer = await running.stub.Generate(request)
        assert answer.completions[0].text == "short" and running.llm.running == set()

    with_server(body, max_request_bytes=2000)


async def _answer(call):
    return await asyncio.wait_for(call, timeout=10)
