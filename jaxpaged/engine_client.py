"""Drives an engine from elsewhere: one interface, here in a thread of this process (notebooks).

`process_client.py` has the same for an engine in a process of its own (servers).
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from jaxpaged.config import EngineConfig, ResolvedConfig
from jaxpaged.errors import EngineClosedError, JaxpagedError
from jaxpaged.grammar import Vocabulary
from jaxpaged.outputs import BlockState, EngineStats, StepOutputs
from jaxpaged.request import EngineRequest

if TYPE_CHECKING:
    from jaxpaged.engine import Engine

logger = logging.getLogger(__name__)

OnOutputs = Callable[[StepOutputs], None]
OnDied = Callable[[JaxpagedError], None]


class EngineState(Enum):
    READY = "ready"
    RESTARTING = "restarting"  # READY or CLOSED follows
    CLOSED = "closed"  # by us, or given up: nothing runs on it any more


class EngineClient(Protocol):
    """One way to talk to an engine, wherever it runs. No call waits for a step.

    Calls raise EngineClosedError or EngineRestartingError when there is no engine; a future gets
    the same error when its engine goes away before it has answered.

    Attributes:
      config: what the engine decided when it started.
    """

    config: ResolvedConfig

    @property
    def state(self) -> EngineState: ...

    def prepare(self, processor: Any) -> None:
        """Compiles a logits processor, which takes a while; call it in a thread."""
        ...

    def submit(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str) -> "Future[bool]": ...

    def finish_sequence(self, request_id: str, index: int) -> None: ...

    def stats(self) -> "Future[EngineStats]": ...

    def block_states(self) -> "Future[list[BlockState]]": ...

    def reset_prefix_cache(self) -> "Future[int]": ...

    def update_weights(self, checkpoint_path: str) -> "Future[None]": ...

    def close(self) -> None: ...


# Starts an engine for these settings. The callbacks are called in a thread of the client's: the
# first once a step that has something to tell, the second with the error that ends all that runs.
# Without a vocabulary the engine takes no grammars.
StartEngine = Callable[[EngineConfig, Vocabulary | None, OnOutputs, OnDied], EngineClient]


def start_in_thread(
    config: EngineConfig, vocabulary: Vocabulary | None, on_outputs: OnOutputs, on_died: OnDied
) -> EngineClient:
    # why here: a front whose engine is in another process never loads JAX
    from jaxpaged.engine import load_engine

    return ThreadEngineClient(load_engine(config, vocabulary), on_outputs, on_died)


class ThreadEngineClient:
    """Runs the engine's loop in a thread of its own, and every call between two steps of it.

    Args:
      on_outputs: called in that thread, once a step that has something to tell.
      on_died: called in that thread, when the loop broke: nothing more comes then.
    """

    def __init__(self, engine: "Engine", on_outputs: OnOutputs, on_died: OnDied):
        self.config = engine.config
        self._engine = engine
        self._on_outputs = on_outputs
        self._on_died = on_died
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # no call is queued once there is a refusal
        self._refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        return EngineState.READY if self._refusal is None else EngineState.CLOSED

    def prepare(self, processor: Any) -> None:
        self._engine.prepare(processor)

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

    def update_weights(self, checkpoint_path: str) -> "Future[None]":
        return self._ask(lambda: self._engine.update_weights(checkpoint_path))

    def close(self) -> None:
        """Stops the loop after the step under way and frees the device's memory. Idempotent."""
        self._refuse("the engine was closed")
        self._calls.put(lambda: None)  # wakes the thread
        self._thread.join()

    def _ask[T](self, call: Callable[[], T]) -> "Future[T]":
        """Has `call` made by the engine's thread.

        Raises:
          EngineClosedError: the client was closed, or its engine died.
        """
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                if self._refusal is not None:
                    raise EngineClosedError(self._refusal)
                future.set_result(call())
            except JaxpagedError as error:
                future.set_exception(error)
            except Exception as error:
                logger.exception("a call to the engine failed")
                future.set_exception(error)

        with self._lock:
            if self._refusal is not None:
                raise EngineClosedError(self._refusal)
            self._calls.put(answer)
        return future

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refusal = self._refusal or reason

    def _run(self) -> None:
        try:
            self._run_steps()
        except Exception as error:
            logger.exception("the engine died")
            self._refuse(f"the engine died: {type(error).__name__}")
            self._on_died(EngineClosedError(f"the engine died: {type(error).__name__}"))
        while not self._calls.empty():
            self._calls.get()()  # refused
        self._engine.close()

    def _run_steps(self) -> None:
        engine, calls = self._engine, self._calls
        while self._refusal is None:
            if not engine.has_work:
                calls.get()()
            while not calls.empty():
                calls.get()()
            outputs = engine.step()
            if outputs:
                self._on_outputs(outputs)
