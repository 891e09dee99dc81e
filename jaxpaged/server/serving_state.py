"""What services and health share: the loaded model, and whether it takes requests."""

import asyncio
import logging
from typing import TYPE_CHECKING

from jaxpaged.engine_client import EngineClient
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

    @property
    def engine(self) -> EngineClient | None:
        """None while loading."""
        return None if self._llm is None else self._llm.engine

    @property
    def takes_requests(self) -> bool:
        return self._llm is not None and not self._is_draining

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
