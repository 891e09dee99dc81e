"""Runs a coroutine function against a real server on a free loopback port."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio
from helpers.fake_async_llm import FakeAsyncLLM

from jaxpaged.server.config import ServerConfig
from jaxpaged.server.lifecycle import Server
from jaxpaged.v1 import admin_pb2_grpc, inference_pb2_grpc


@dataclass
class Running:
    """A started server and plain stubs for it."""

    server: Server
    llm: FakeAsyncLLM
    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel
    stub: Any
    admin: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def admin_address(self) -> str:
        return f"127.0.0.1:{self.server.admin_port}"


def with_server(
    body: Callable[[Running], Awaitable[None]], *, is_loaded: bool = True, **config: Any
) -> None:
    """Runs `body` in an event loop of its own; the fake front is loaded unless told otherwise."""

    async def run() -> None:
        server = Server(ServerConfig(port=0, admin_port=0, stop_grace_s=0.1, **config))
        await server.start()
        llm = FakeAsyncLLM()
        if is_loaded:
            await server.set_ready(cast(Any, llm))
        try:
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
                grpc.aio.insecure_channel(f"127.0.0.1:{server.admin_port}") as admin_channel,
            ):
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                admin = admin_pb2_grpc.AdminServiceStub(admin_channel)
                await body(Running(server, llm, channel, admin_channel, stub, admin))
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), timeout=60))
