"""Health that tells the truth: SERVING only while a step of the engine could run.

A question to the engine is always open: it is answered between two steps. One that stays open too
long means that the loop of steps is stuck, whatever it is stuck in.
"""

import asyncio
import time
from concurrent.futures import Future

from grpc_health.v1 import health, health_pb2

from jaxpaged.engine_client import EngineState
from jaxpaged.errors import JaxpagedError
from jaxpaged.outputs import EngineStats
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
        self._question: Future[EngineStats] | None = None
        self._asked_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.update()
            await asyncio.sleep(_INTERVAL_S)

    async def update(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._can_step() else statuses.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)

    def _can_step(self) -> bool:
        engine = self._state.engine
        if engine is None:
            return False
        if engine.state is EngineState.CLOSED:
            self.engine_lost.set()
        if engine.state is not EngineState.READY or not self._state.takes_requests:
            self._question = None
            return False
        if self._question is None or self._question.done():
            try:
                self._question = engine.stats()
            except JaxpagedError:  # it went away just now
                return False
            self._asked_s = time.monotonic()
        return time.monotonic() - self._asked_s < self._stall_timeout_s
