"""A server's life: bind all ports, load, serve, drain, stop.

The ports are bound before the model loads, so that a port in use is known at once and health
checks are answered meanwhile (NOT_SERVING; other calls get NOT_READY).
"""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxpaged import frozen_heap
from jaxpaged.grpc_lifetime import keep_grpc_running
from jaxpaged.server.admin import AdminService
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.health import HealthMonitor
from jaxpaged.server.metrics import Metrics, MetricsPage
from jaxpaged.server.ports import bind, channel_options
from jaxpaged.server.rpc import service_handler
from jaxpaged.server.security import (
    TokenInterceptor,
    Tokens,
    check_clear_tokens,
    server_credentials,
)
from jaxpaged.server.service import InferenceService
from jaxpaged.server.serving_state import ServingState
from jaxpaged.v1 import admin_pb2, inference_pb2

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
_HEALTH_NAMES = ("", _INFERENCE.full_name, _ADMIN.full_name)
_REFLECTION_NAMES = (health.SERVICE_NAME, reflection.SERVICE_NAME)
# For the last words of calls that have ended, and for readers that do not read.
_CLOSE_GRACE_S = 1.0
EXIT_ENGINE_LOST = 70
# A message takes a core for 0.1 to 0.2 ms. On a CPU steps want all cores, and wait for each other.
_MESSAGES_PER_S_AND_CORE, _MESSAGES_BESIDE_STEPS, _MAX_MESSAGES_PER_S = 500, 200, 8000


class Server:
    """The inference port and the admin port, each with health and reflection; and the metrics.

    Used inside one event loop. `port`, `admin_port` and `metrics_port` are the bound ones.

    Raises:
      ValueError: the settings contradict each other, or would show tokens to a network.
      OSError: a port or a file cannot be had.
    """

    def __init__(self, config: ServerConfig) -> None:
        check_clear_tokens(config)
        credentials = server_credentials(config)
        self._config = config
        self._state = ServingState()
        self._metrics = Metrics()
        self.health = HealthMonitor(self._state, _HEALTH_NAMES, config.stall_timeout_s)
        self._monitor: asyncio.Task[None] | None = None
        self._metrics_page: MetricsPage | None = None
        self.metrics_port: int | None = None
        users, admins = Tokens(config.token_file), Tokens(config.admin_token_file)
        if users.overlaps(admins):
            raise ValueError(
                "token_file and admin_token_file have a token in common: a user could call "
                "AdminService with it"
            )
        interceptor = partial(TokenInterceptor, users=users, on_failed=self._metrics.on_rejected)
        inference = InferenceService(self._state, config)
        self._inference = self._make_server(
            _INFERENCE, inference, interceptor(allowed=[users, admins]), users
        )
        admin = AdminService(self._state, config.stop_grace_s)
        self._admin = self._make_server(_ADMIN, admin, interceptor(allowed=[admins]), admins)
        self.port = bind(self._inference, "port", config.host, config.port, credentials)
        self.admin_port = bind(
            self._admin, "admin_port", config.admin_host, config.admin_port, credentials
        )

    async def start(self) -> None:
        config = self._config
        if config.metrics_port is not None:
            self.metrics_port, self._metrics_page = self._metrics.start(
                config.metrics_host, config.metrics_port
            )
        await self.health.update()
        await self._inference.start()
        await self._admin.start()

    async def set_ready(self, llm: "AsyncLLM") -> None:
        """From now on requests go to `llm`, which stays the caller's to close."""
        on_cpu = llm.engine.config.platform == "cpu"
        per_core = _MESSAGES_BESIDE_STEPS if on_cpu else _MESSAGES_PER_S_AND_CORE
        llm.live.max_messages_per_s = self._config.max_messages_per_s or min(
            _MAX_MESSAGES_PER_S, per_core * (os.cpu_count() or 1)
        )
        self._state.set_loaded(llm)
        if self._metrics_page is not None:
            self._metrics.watch(llm)
        await self.health.update()
        self._monitor = asyncio.create_task(self.health.run())

    async def stop(self) -> None:
        """Takes no new calls, lets running ones end within the grace time, ends the rest."""
        if self._monitor is not None:
            self._monitor.cancel()
        await self.health.servicer.enter_graceful_shutdown()
        await self._state.drain(self._config.stop_grace_s)
        await self._inference.stop(_CLOSE_GRACE_S)
        await self._admin.stop(None)  # at once: WatchStats never ends by itself
        if self._metrics_page is not None:
            await asyncio.to_thread(self._metrics_page.close)

    def _make_server(
        self, service, servicer: object, interceptor: TokenInterceptor, tokens: Tokens
    ) -> grpc.aio.Server:
        keep_grpc_running()
        server = grpc.aio.server(
            options=channel_options(self._config), interceptors=[interceptor] if tokens else []
        )
        handler = service_handler(service, servicer, self._metrics.on_rejected)
        server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, server)
        reflection.enable_server_reflection((service.full_name, *_REFLECTION_NAMES), server)
        return server


async def serve(
    config: ServerConfig,
    load: Callable[[], "AsyncLLM"],
    announce: Callable[[Server, "AsyncLLM"], None],
) -> int:
    """Serves until SIGINT or SIGTERM, or until the engine is lost; returns the exit code.

    While the model loads, and once the server stops, a signal ends the process at once.

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
    frozen_heap.freeze()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        await server.set_ready(llm)
        announce(server, llm)
        events = (stopping, server.health.engine_lost)
        waiting = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        # A second signal does not wait for the running requests.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        await server.stop()
    finally:
        llm.close()
        frozen_heap.unfreeze()
    return EXIT_ENGINE_LOST if server.health.engine_lost.is_set() else 0
