"""Health that tells the truth: SERVING only while a step of the engine could run."""

import asyncio

from grpc_health.v1 import health, health_pb2

from jaxpaged.server.serving_state import ServingState

_INTERVAL_S = 0.2


class HealthMonitor:
    """Looks at the engine several times a second, and tells every service's status.

    Attributes:
      servicer: answers Check and Watch.
      engine_lost: set once the engine has gone for good.
    """

    def __init__(self, state: ServingState, names: tuple[str, ...], stall_timeout_s: float) -> None:
        self.servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self.engine_lost = asyncio.Event()
        self._state = state
        self._names = names
        self._stall_timeout_s = stall_timeout_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.update()
            await asyncio.sleep(_INTERVAL_S)

    async def update(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        can_step = self._state.can_step(self._stall_timeout_s)
        for name in self._names:
            await self.servicer.set(name, statuses.SERVING if can_step else statuses.NOT_SERVING)
        if self._state.has_lost_engine:
            self.engine_lost.set()
