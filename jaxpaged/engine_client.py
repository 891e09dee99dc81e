"""Drives an engine from elsewhere. Here: in a thread of this process, for notebooks and servers."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

from jaxpaged.engine import Engine
from jaxpaged.errors import EngineClosedError
from jaxpaged.outputs import BlockState, EngineStats, StepOutputs
from jaxpaged.request import EngineRequest

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """One way to talk to an engine, wherever it runs. No call waits for a step."""

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str) -> "Future[bool]": ...

    def finish_sequence(self, request_id: str, index: int) -> None: ...

    def stats(self) -> "Future[EngineStats]": ...

    def block_states(self) -> "Future[list[BlockState]]": ...

    def reset_prefix_cache(self) -> "Future[int]": ...

    def close(self) -> None: ...


class ThreadEngineClient:
    """Runs the engine's loop in a thread of its own, and every call between two steps of it.

    Args:
      on_outputs: called in that thread, once a step that has something to tell.
    """

    def __init__(self, engine: Engine, on_outputs: Callable[[StepOutputs], None]):
        self._engine = engine
        self._on_outputs = on_outputs
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        self._ask(lambda: self._engine.add(request))

    def abort(self, request_id: str) -> "Future[bool]":
        return self._ask(lambda: self._engine.abort(request_id))

    def finish_sequence(self, request_id: str, index: int) -> None:
        self._ask(lambda: self._engine.finish_sequence(request_id, index))

    def stats(self) -> "Future[EngineStats]":
        return self._ask(self._engine.stats)

    def block_states(self) -> "Future[list[BlockState]]":
        return self._ask(self._engine.block_states)

    def reset_prefix_cache(self) -> "Future[int]":
        return self._ask(self._engine.reset_prefix_cache)

    def close(self) -> None:
        """Stops the loop after the step under way and frees the device's memory. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(lambda: None)  # wakes the thread
            self._thread.join()

    def _ask[T](self, call: Callable[[], T]) -> "Future[T]":
        """Has `call` made by the engine's thread.

        Raises:
          EngineClosedError: the client was closed.
        """
        if self._is_closed:
            raise EngineClosedError("the engine was closed")
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                logger.exception("a call to the engine failed")
                future.set_exception(error)

        self._calls.put(answer)
        return future

    def _run(self) -> None:
        engine, calls = self._engine, self._calls
        while not self._is_closed:
            if not engine.has_work:
                calls.get()()
            while not calls.empty():
                calls.get()()
            outputs = engine.step()
            if outputs:
                self._on_outputs(outputs)
        engine.close()
