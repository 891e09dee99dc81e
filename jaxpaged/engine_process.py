"""The engine's side of an engine process: the loop of steps between two ends of a socket.

The process ends when its front says so or is gone, in whatever way it went: no engine outlives its
front.
"""

import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from jaxpaged.engine_messages import (
    Ask,
    Close,
    Connected,
    Failure,
    FinishSequence,
    Ready,
    Reply,
    StartFailed,
    Stepped,
    Submit,
    decode_commands,
    encode,
)
from jaxpaged.errors import JaxpagedError

if TYPE_CHECKING:
    from jaxpaged.engine import Engine

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>

MakeEngine = Callable[[], "Engine"]


def run_engine(
    address: str,
    make_engine: MakeEngine,
    checkpoint_path: str | None,
    log_level: int,
) -> None:
    """What the process does, from its start to its end.

    Args:
      make_engine: loads the model; picklable, for it comes from the front's process.
      checkpoint_path: weights that an earlier engine had taken since its start.
    """
    _end_with_parent(address)
    # A terminal or a supervisor signals all processes; the front says when this one may go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s engine: %(message)s")
    # Its INFO tells of every kind of device that is not here.
    logging.getLogger("jax").setLevel(max(log_level, logging.WARNING))
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set(zmq.LINGER, 1000)
        socket.connect(address)
        socket.send(encode(Connected()))
        try:
            engine = make_engine()
            if checkpoint_path is not None:
                engine.update_weights(checkpoint_path)
        except Exception as error:
            if not isinstance(error, JaxpagedError):
                logger.exception("the engine could not start")
            socket.send(encode(StartFailed(Failure.of(error))))
            return
        # What is loaded stays: looking at all of it for garbage would make a step late.
        gc.collect()
        gc.freeze()
        socket.send(encode(Ready(engine.config)))
        _Loop(engine, socket).run()
        engine.close()


class _Loop:
    """Steps while there is work; commands are read between two steps."""

    def __init__(self, engine: "Engine", socket: zmq.Socket):
        self._engine = engine
        self._socket = socket
        self._replies: list[Reply] = []
        self._is_closing = False

    def run(self) -> None:
        engine = self._engine
        while not self._is_closing:
            if not engine.has_work:
                self._socket.poll()
            self._obey_commands()
            outputs = engine.step()
            if outputs or self._replies:
                self._socket.send(encode(Stepped(outputs, self._replies)))
                self._replies = []

    def _obey_commands(self) -> None:
        while self._socket.poll(0):
            for command in decode_commands(self._socket.recv()):
                match command:
                    case Submit():
                        self._engine.add(command.request)
                    case FinishSequence():
                        self._engine.finish_sequence(command.request_id, command.index)
                    case Ask():
                        self._replies.append(self._answer(command))
                    case Close():
                        self._is_closing = True

    def _answer(self, ask: Ask) -> Reply:
        method = getattr(self._engine, ask.method)
        try:
            value = method() if ask.argument is None else method(ask.argument)
        except Exception as error:
            if not isinstance(error, JaxpagedError):
                logger.exception("a call to the engine failed: %s", ask.method)
            return Reply(ask.call_id, msgspec.Raw(encode(None)), Failure.of(error))
        return Reply(ask.call_id, msgspec.Raw(encode(value)))


def _end_with_parent(address: str) -> None:
    """Ends this process as soon as its parent is gone, a parent killed with SIGKILL included.

    On Linux the kernel does it, even when this process is stuck or stopped. It counts as gone when
    the thread that started this process ends, and that one outlives it.
    """
    parent = parent_process()
    assert parent is not None, "started by multiprocessing"
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        connection.wait([parent.sentinel])
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)  # why not sys.exit: the main thread may be deep in a step

    threading.Thread(target=watch, name="jaxpaged-parent", daemon=True).start()
