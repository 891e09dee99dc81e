"""Between the threads of a front and the one that talks to its engine: commands and open calls."""

import contextlib
import socket
import threading
from concurrent.futures import Future
from typing import Any

import msgspec

from jaxpaged.engine_client import EngineState
from jaxpaged.engine_messages import REPLY_TYPES, Ask, Command, Reply
from jaxpaged.errors import EngineClosedError, EngineRestartingError, JaxpagedError


class Mailbox:
    """Any thread leaves commands; the one that `woken` wakes takes them, all at once.

    Attributes:
      state: of the engine; set through `set_state` and `lose`.
      woken: socket that becomes readable when there are commands.
    """

    def __init__(self) -> None:
        self.state = EngineState.RESTARTING
        self._wake, self.woken = socket.socketpair()
        self._lock = threading.Lock()  # of the state, the commands and the calls
        self._commands: list[Command] = []
        self._calls: dict[int, tuple[Ask, Future[Any]]] = {}
        self._num_calls = 0

    # --- any thread ----------------------------------------------------------------------------

    def post(self, command: Command) -> None:
        """Raises JaxpagedError when there is no engine to obey it."""
        with self._lock:
            self._check_ready()
            self._leave(command)

    def ask(self, method: Any, argument: str | None = None) -> Future[Any]:
        """The same for a call that is answered."""
        future: Future[Any] = Future()
        with self._lock:
            self._check_ready()
            self._num_calls += 1
            ask = Ask(self._num_calls, method, argument)
            self._calls[ask.call_id] = (ask, future)
            self._leave(ask)
        return future

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended, and closed it
            self._wake.send(b"\0")

    def _check_ready(self) -> None:
        if self.state is EngineState.RESTARTING:
            raise EngineRestartingError("the engine is starting again")
        if self.state is EngineState.CLOSED:
            raise EngineClosedError("the engine was closed")

    def _leave(self, command: Command) -> None:
        self._commands.append(command)
        if len(self._commands) == 1:
            self.wake()

    # --- the thread that talks to the engine ---------------------------------------------------

    def set_state(self, state: EngineState) -> None:
        with self._lock:
            self.state = state

    def take_commands(self) -> list[Command]:
        """What was left since the last time."""
        self.woken.recv(4096)
        with self._lock:
            commands, self._commands = self._commands, []
        return commands

    def answer(self, reply: Reply) -> Ask:
        """Hands an answer to whoever waits for it; returns what was asked."""
        with self._lock:
            ask, future = self._calls.pop(reply.call_id)
        if future.set_running_or_notify_cancel():
            if reply.failure is not None:
                future.set_exception(reply.failure.error())
            else:
                value_type = REPLY_TYPES[ask.method]
                future.set_result(msgspec.msgpack.decode(reply.value, type=value_type))
        return ask

    def lose(self, state: EngineState, error: JaxpagedError) -> None:
        """The engine is gone, and with it all that was said to it."""
        with self._lock:
            self.state = state
            calls, self._calls = self._calls, {}
            self._commands = []
        for _, future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def close(self) -> None:
        self._wake.close()
        self.woken.close()
