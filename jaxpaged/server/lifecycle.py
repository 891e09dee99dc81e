"""A server's life: bind both ports, load, serve, stop.

The ports are bound before the model loads, so that a port in use is known at once and health
checks are answered meanwhile (NOT_SERVING; other calls get NOT_READY).
"""

import asyncio
import errno
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxpaged.server.admin import AdminService
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.rpc import service_handler
from jaxpaged.server.service import InferenceService, LoadedModel
from jaxpaged.v1 import admin_pb2, inference_pb2

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
_HEALTH_NAMES = ("", _INFERENCE.full_name, _ADMIN.full_name)
_REFLECTION_NAMES = (health.SERVICE_NAME, reflection.SERVICE_NAME)
# Clients may ping every 10 s and some every 5 s, also without calls; the library's own limit of
# 5 minutes would end their connections during a long prefill.
_MIN_CLIENT_PING_INTERVAL_MS = 4000


class Server:
    """The inference port and the admin port, each with health and reflection.

    Used inside one event loop. `port` and `admin_port` are the bound ones.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._model = LoadedModel()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        inference = InferenceService(self._model, config.max_request_bytes)
        self._inference = self._make_server(_INFERENCE, inference)
        self._admin = self._make_server(_ADMIN, AdminService(self._model))
        self.port = _bind(self._inference, config.host, config.port)
        self.admin_port = _bind(self._admin, config.admin_host, config.admin_port)

    async def start(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._inference.start()
        await self._admin.start()

    async def set_ready(self, llm: "AsyncLLM") -> None:
        """From now on requests go to `llm`, which stays the caller's to close."""
        self._model.set(llm)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Refuses new calls, lets running ones end within the grace time, cancels the rest."""
        await self._health.enter_graceful_shutdown()
        await self._inference.stop(self._config.stop_grace_s)
        await self._admin.stop(None)  # at once: WatchStats never ends by itself

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in _HEALTH_NAMES:
            await self._health.set(name, status)

    def _make_server(self, service, servicer: object) -> grpc.aio.Server:
        config = self._config
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # else two servers share one port without a word
                ("grpc.max_receive_message_length", config.max_request_bytes),
                ("grpc.max_send_message_length", config.max_request_bytes),
                ("grpc.keepalive_time_ms", round(config.keepalive_time_s * 1000)),
                ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
                ("grpc.keepalive_permit_without_calls", 1),
                (
                    "grpc.http2.min_ping_interval_without_data_ms",
                    _MIN_CLIENT_PING_INTERVAL_MS,
                ),
            )
        )
        server.add_generic_rpc_handlers((service_handler(service, servicer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((service.full_name, *_REFLECTION_NAMES), server)
        return server


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Binds and returns the port; OSError with one clear line when that cannot be."""
    address = address_of(host, port)
    _probe(host, port, address)  # gRPC's own message names neither the port nor the cause
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    if not bound:
        raise OSError(f"cannot listen on {address}")
    return bound


def _probe(host: str, port: int, address: str) -> None:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        cause = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise OSError(f"cannot listen on {address}: {cause}") from error


async def serve(
    config: ServerConfig,
    load: Callable[[], "AsyncLLM"],
    announce: Callable[[Server, "AsyncLLM"], None],
) -> None:
    """Serves until SIGINT or SIGTERM. While the model loads these end the process at once.

    Args:
      load: makes the front; runs in a thread, so that health answers meanwhile.
      announce: called once requests are accepted.
    """
    server = Server(config)
    await server.start()
    stopping = asyncio.Event()
    # Nothing is worth saving before the model is loaded, and a load cannot be interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        llm = await asyncio.to_thread(load)
    except Exception:
        await server.stop()
        raise
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        await server.set_ready(llm)
        announce(server, llm)
        await stopping.wait()
        # A second signal does not wait for the running requests.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        await server.stop()
    finally:
        llm.close()
