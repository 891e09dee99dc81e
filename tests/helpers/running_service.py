"""A whole service on loopback: a real front, an engine on the fake runner, real gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.outputs import EngineStats
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.lifecycle import Server
from jaxpaged.v1 import admin_pb2_grpc, inference_pb2_grpc
from jaxpaged.v1 import inference_pb2 as pb

EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Service:
    """A started service, and plain stubs for it."""

    server: Server
    llm: AsyncLLM
    stub: Any
    admin: Any
    health: Any

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def status(self, name: str = "") -> int:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=name))).status

    async def idle_stats(self) -> EngineStats:
        """Once nothing runs any more; every block must be back then."""
        await until(lambda: len(self.llm.live) == 0)
        while (stats := await self.llm.stats()).running_requests or stats.queued_requests:
            await asyncio.sleep(0.01)
        assert stats.used_blocks == 0 and self.llm.live.num_queued == 0
        return stats


@asynccontextmanager
async def serving(llm: AsyncLLM, **config: Any) -> AsyncGenerator[Service]:
    # Messages: enough not to merge tokens while a test reads; the default depends on the machine.
    own = {"stop_grace_s": 0.1, "port": 0, "admin_port": 0, "max_messages_per_s": 2000.0}
    config = own | config
    server = Server(ServerConfig(**config))
    await server.start()
    await server.set_ready(llm)
    try:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.admin_port}") as admin_channel,
        ):
            yield Service(
                server,
                llm,
                inference_pb2_grpc.InferenceServiceStub(channel),
                admin_pb2_grpc.AdminServiceStub(admin_channel),
                health_pb2_grpc.HealthStub(channel),
            )
    finally:
        await server.stop()


def run_service(
    llm: AsyncLLM, body: Callable[[Service], Awaitable[None]], timeout_s: float = 60, **config: Any
) -> None:
    """Runs `body` against a service before `llm`; afterwards every block must be back."""

    async def run() -> None:
        async with serving(llm, **config) as service:
            await body(service)
            await service.idle_stats()

    asyncio.run(asyncio.wait_for(run(), timeout_s))


async def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def ask(
    prompt: list[int], max_tokens: int, *, request_id: str = "", seed: int | None = None, n: int = 1
) -> pb.GenerateRequest:
    """A request of token ids, greedy without a seed."""
    request = pb.GenerateRequest(request_id=request_id, token_ids={"ids": prompt})
    request.sampling.max_tokens = max_tokens
    request.sampling.n = n
    request.sampling.temperature = 0 if seed is None else 1
    if seed is not None:
        request.sampling.seed = seed
    return request


async def tokens_of(call: Any) -> dict[int, list[int]]:
    """Reads a stream to its end: token ids by index."""
    tokens: dict[int, list[int]] = {}
    while (message := await call.read()) is not EOF:
        if message.HasField("delta"):
            tokens.setdefault(message.delta.index, []).extend(message.delta.token_ids)
    return tokens
