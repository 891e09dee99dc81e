"""What services and health share: the loaded model, and whether it takes requests."""

import asyncio
import logging
from typing import TYPE_CHECKING

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import EngineClosedError, ServerDrainingError

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.live_requests import LiveRequests

_logger = logging.getLogger(__name__)


class ServingState:
    """Loading, serving, draining; used in the server's event loop only."""

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None
        self._is_draining = False
        self._drains: set[asyncio.Task[tuple[int, int]]] = set()

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
        """Takes no more requests, and ends those that run or arrive when the time is over.

        It goes on when the caller is cancelled: the server takes no requests again.

        Returns:
          How many ended by themselves, and how many were ended.
        """
        self._is_draining = True
        if self._llm is None:
            return 0, 0
        task = asyncio.create_task(self._empty(self._llm.live, timeout_s))
        self._drains.add(task)  # the event loop itself would forget it
        task.add_done_callback(self._drains.discard)
        return await asyncio.shield(task)

    async def _empty(self, live: "LiveRequests", timeout_s: float) -> tuple[int, int]:
        num_live = len(live)
        _logger.info("draining: %d requests run, they get %g s", num_live, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await live.wait_empty()
        except TimeoutError:
            error = ServerDrainingError("the server is stopping")
            num_ended = live.fail_all(error) + live.fail_arriving(error)
            return max(0, num_live - num_ended), num_ended
        return num_live, 0
