"""Drives an engine in a process of its own, and starts it again when it dies.

The front and the engine then never wait for each other's interpreter, a crash takes the running
requests but not the server, and the front's process never loads JAX.
"""

import atexit
import contextlib
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq

from jaxpaged.config import EngineConfig, ResolvedConfig
from jaxpaged.engine_client import EngineClient, EngineState, OnDied, OnOutputs
from jaxpaged.engine_mailbox import Mailbox
from jaxpaged.engine_messages import (
    Close,
    Connected,
    FinishSequence,
    Ready,
    StartFailed,
    Submit,
    decode_engine_message,
    encode,
)
from jaxpaged.engine_process import MakeEngine, run_engine
from jaxpaged.errors import (
    EngineClosedError,
    EngineRestartingError,
    JaxpagedError,
    UnsupportedOptionError,
)
from jaxpaged.grammar import Vocabulary
from jaxpaged.outputs import BlockState, EngineStats
from jaxpaged.request import EngineRequest

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0
# An engine that was ready for so long was sound: its end does not count with those before it.
_SOUND_AFTER_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
# The path of a Unix socket has about a hundred characters at most, some systems' TMPDIR has more.
_MAX_TMPDIR_LENGTH = 70
_CPU_NICENESS = 1  # enough for answers in time; more gives the cores to other programs


def start_in_process(
    config: EngineConfig,
    vocabulary: Vocabulary | None,
    on_outputs: OnOutputs,
    on_died: OnDied,
    *,
    max_restarts: int = 3,
) -> EngineClient:
    make_engine = partial(load_engine, config, vocabulary)
    return ProcessEngineClient(make_engine, on_outputs, on_died, max_restarts=max_restarts)


def load_engine(config: EngineConfig, vocabulary: Vocabulary | None) -> Any:
    """Runs in the engine's process: the only one that loads JAX."""
    import jax

    from jaxpaged.engine import load_engine

    engine = load_engine(config, vocabulary)
    if jax.default_backend() == "cpu":
        _let_the_front_go_first()
    return engine


def _let_the_front_go_first() -> None:
    """Lowers the priority of this process: steps on a CPU take every core there is.

    The front needs little, but at once: a refusal or a health check must not wait for a step.
    """
    if sys.platform != "linux":
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + _CPU_NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


class ProcessEngineClient:
    """An `EngineClient`. One thread owns the socket; every other thread only leaves it commands.

    Args:
      make_engine: makes the engine, there; picklable.
      on_outputs: called in that thread, once a step that has something to tell.
      on_died: called in that thread when the process has ended: what ran on it is lost.
      max_restarts: starts after deaths that follow each other; after one more it stays closed.
      backoff_s: wait before the first restart, doubled for each that follows it.

    Raises:
      JaxpagedError: the engine could not start.
    """

    def __init__(
        self,
        make_engine: MakeEngine,
        on_outputs: OnOutputs,
        on_died: OnDied,
        *,
        max_restarts: int = 3,
        backoff_s: float = 1.0,
    ):
        self._make_engine = make_engine
        self._on_outputs = on_outputs
        self._on_died = on_died
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._spawn = multiprocessing.get_context("spawn")
        self._folder = ""  # of the socket, while an engine's process starts
        self._checkpoint_path: str | None = None
        self._ready_s: float | None = None  # when this process's engine had loaded
        self._mailbox = Mailbox()
        self._closing = threading.Event()
        self._started: Future[ResolvedConfig] = Future()
        self.process_id: int | None = None
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine-io", daemon=True)
        self._thread.start()
        # multiprocessing waits at exit for processes that nobody told to go
        atexit.register(self.close)
        try:
            self.config = self._started.result()
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> EngineState:
        return self._mailbox.state

    def prepare(self, processor: Any) -> None:
        raise UnsupportedOptionError(
            "logits_processor", "logits_processor needs the engine in this process: a thread"
        )

    def submit(self, request: EngineRequest) -> None:
        self._mailbox.post(Submit(request))

    def finish_sequence(self, request_id: str, index: int) -> None:
        self._mailbox.post(FinishSequence(request_id, index))

    def abort(self, request_id: str) -> "Future[bool]":
        return self._mailbox.ask("abort", request_id)

    def stats(self) -> "Future[EngineStats]":
        return self._mailbox.ask("stats")

    def block_states(self) -> "Future[list[BlockState]]":
        return self._mailbox.ask("block_states")

    def reset_prefix_cache(self) -> "Future[int]":
        return self._mailbox.ask("reset_prefix_cache")

    def update_weights(self, checkpoint_path: str) -> "Future[None]":
        return self._mailbox.ask("update_weights", checkpoint_path)

    def close(self) -> None:
        """Ends the engine's process, with force if it does not go by itself. Idempotent."""
        self._closing.set()
        self._mailbox.wake()
        self._thread.join()
        atexit.unregister(self.close)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            logger.exception("the thread that talks to the engine died")
            self._lose(EngineState.CLOSED, EngineClosedError(f"{type(error).__name__}"))
            if not self._started.done():
                self._started.set_exception(error)
        self._mailbox.set_state(EngineState.CLOSED)
        self._mailbox.close()

    def _keep_running(self) -> None:
        """Runs one process after the other, until it is told to stop or too many have died."""
        num_deaths = 0
        while True:
            self._ready_s = None
            error = self._run_process()
            end_s = time.monotonic()
            if self._closing.is_set():
                self._lose(EngineState.CLOSED, EngineClosedError("the engine was closed"))
                return
            if not self._started.done():
                self._started.set_exception(error)
                return
            was_sound = self._ready_s is not None and end_s - self._ready_s > _SOUND_AFTER_S
            num_deaths = 1 if was_sound else num_deaths + 1
            logger.error("%s (%d of %d restarts)", error, num_deaths, self._max_restarts)
            if num_deaths > self._max_restarts:
                self._lose(EngineState.CLOSED, EngineClosedError(f"{error}; it stays down"))
                return
            self._lose(EngineState.RESTARTING, EngineRestartingError(f"{error}; it starts again"))
            self._closing.wait(min(_MAX_BACKOFF_S, self._backoff_s * 2 ** (num_deaths - 1)))

    def _run_process(self) -> JaxpagedError:
        """One process, from its start to its end; returns why it ended."""
        self._folder = _make_folder()
        address = f"ipc://{self._folder}/engine"
        with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
            pair.set(zmq.LINGER, 0)
            pair.set(zmq.SNDHWM, 0)  # never wait for a stuck engine; the queue limit bounds it
            pair.set(zmq.RCVHWM, 0)
            pair.bind(address)
            level = logging.getLogger().getEffectiveLevel()
            process = self._spawn.Process(
                target=run_engine,
                args=(address, self._make_engine, self._checkpoint_path, level),
                name="jaxpaged-engine",
                daemon=True,
            )
            process.start()
            self.process_id = process.pid
            try:
                failure = self._talk(pair, process.sentinel)
            finally:
                self._end(process)
                self._remove_folder()
            if failure is not None:
                return failure
            return JaxpagedError(f"the engine's process ended with code {process.exitcode}")

    def _talk(self, pair: zmq.Socket, sentinel: int) -> JaxpagedError | None:
        """Carries messages until the process has ended or is to be ended."""
        poller = zmq.Poller()
        woken = self._mailbox.woken
        for source in (pair, woken, sentinel):
            poller.register(source, zmq.POLLIN)
        failure = None
        close_at_s = float("inf")
        while time.monotonic() < close_at_s:
            events = dict(poller.poll(1000))
            if pair in events:
                failure = self._take(pair.recv()) or failure
            elif sentinel in events:  # only now: its last messages came first
                break
            if woken.fileno() in events and (commands := self._mailbox.take_commands()):
                pair.send(encode(commands))
            if self._closing.is_set() and close_at_s == float("inf"):
                is_up = self.state is EngineState.READY
                close_at_s = time.monotonic() + (_CLOSE_TIMEOUT_S if is_up else 0)
                pair.send(encode([Close()]))
        return failure

    def _take(self, data: bytes) -> JaxpagedError | None:
        message = decode_engine_message(data)
        match message:
            case Connected():
                self._remove_folder()  # now already: a killed server leaves no files
            case Ready():
                self._ready_s = time.monotonic()
                self._mailbox.set_state(EngineState.READY)
                if not self._started.done():
                    self._started.set_result(message.config)
            case StartFailed():
                return message.failure.error()
            case _:
                for reply in message.replies:
                    ask = self._mailbox.answer(reply)
                    if ask.method == "update_weights" and reply.failure is None:
                        self._checkpoint_path = ask.argument  # for the next process
                if message.outputs:
                    self._on_outputs(message.outputs)
        return None

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _lose(self, state: EngineState, error: JaxpagedError) -> None:
        self._mailbox.lose(state, error)
        self._on_died(error)

    def _end(self, process: Any) -> None:
        process.join(0)
        if process.exitcode is None:
            process.kill()
        process.join()


def _make_folder() -> str:
    """For a socket that only this user can reach."""
    is_short = len(tempfile.gettempdir()) <= _MAX_TMPDIR_LENGTH
    return tempfile.mkdtemp(prefix="jaxpaged-", dir=None if is_short else "/tmp")
