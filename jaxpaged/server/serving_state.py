"""What services and health share: the loaded model, and whether it takes requests."""

import asyncio
import logging
from typing import TYPE_CHECKING

from jaxpaged.engine_client import EngineState
from jaxpaged.errors import EngineClosedError, ServerDrainingError

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM

_logger = logging.getLogger(__name__)


class ServingState:
    """Loading, serving, draining; used in the server's event loop only."""

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None
        self._is_draining = False

    def set_loaded(self, llm: "AsyncLLM") -> None:
        self._llm = llm

    def get(self) -> "AsyncLLM":
        """The model, also while it takes no new requests.

        Raises:
          EngineClosedError: it is still loading.
        """
        if self._llm is None:
            raise EngineClosedError("the model is still loading")
        return self._llm

    def admit(self) -> "AsyncLLM":
        """The model, for a new request.

        Raises:
          JaxpagedError: no requests are taken now.
        """
        if self._is_draining:
            raise ServerDrainingError("the server is draining: it takes no new requests")
        return self.get()

    def can_step(self, stall_timeout_s: float) -> bool:
        """Whether a request that came now would be run."""
        if self._llm is None or self._is_draining:
            return False
        engine = self._llm.engine
        return engine.state is EngineState.READY and engine.step_age_s < stall_timeout_s

    @property
    def has_lost_engine(self) -> bool:
        """Whether the engine has gone for good."""
        return self._llm is not None and self._llm.engine.state is EngineState.CLOSED

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Takes no more requests, and ends those that run when the time is over.

        Returns:
          How many ended by themselves, and how many were ended.
        """
        self._is_draining = True
        if self._llm is None:
            return 0, 0
        live = self._llm.live
        num_live = len(live)
        _logger.info("draining: %d requests run, they get %g s", num_live, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await live.wait_empty()
        except TimeoutError:
            num_ended = live.fail_all(ServerDrainingError("the server is stopping"))
            return max(0, num_live - num_ended), num_ended
        return num_live, 0
