"""The requests under way in a front: who reads which answer, and how many still wait to start.

Used in the front's event loop only. A message to a reader costs far more than a token, so there is
a limit to the messages in a second. Where the engine is faster than that, each has several tokens:
many streams cannot slow the engine down.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from jaxpaged.collector import Collector
from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import (
    EngineClosedError,
    EngineRestartingError,
    JaxpagedError,
    QueueTimeoutError,
    SlowReaderError,
)
from jaxpaged.outputs import StepOutputs


@dataclass(eq=False)
class Arrival:
    """A request that is being made: its text tokenised, its constraint compiled.

    Attributes:
      queue_timeout_s: how long after its arrival it must have started; None: never.
      deadline_s: when that is, on the event loop's clock.
      timeout: abandons the making then, or earlier where `error` says why.
    """

    queue_timeout_s: float | None
    deadline_s: float | None
    timeout: asyncio.Timeout
    error: JaxpagedError | None = None


class LiveRequests:
    """The arriving requests, and collectors by the engine's id and by the user's until `forget`.

    Attributes:
      num_queued: requests that the engine has not scheduled yet, or not even got.
      max_messages_per_s: deltas that readers of streams are woken for, all together; None: at
        every step. First tokens, ends and what would overfill a buffer go at once, uncounted.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._arrivals: set[Arrival] = set()
        self._collectors: dict[str, Collector] = {}  # by the engine's id; the engine has them still
        self._by_user_id: dict[str, Collector] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by the engine's id, until started
        self._emptied = asyncio.Event()
        self._emptied.set()
        self.num_queued = 0
        self.max_messages_per_s: float | None = None
        self._sleeping: dict[str, Collector] = {}  # their readers have tokens to read
        self._next_wake_s = 0.0
        self._is_wake_due = False

    def __len__(self) -> int:
        return len(self._by_user_id) + len(self._arrivals)

    def __contains__(self, user_id: str) -> bool:
        return user_id in self._by_user_id

    @contextlib.asynccontextmanager
    async def arriving(self, queue_timeout_s: float | None) -> AsyncGenerator[Arrival]:
        """While a request is made: a long text waits for its tokens as others for a row.

        Raises:
          QueueTimeoutError: its time was over before it was made.
          JaxpagedError: that of `fail_arriving`.
        """
        deadline_s = None
        if queue_timeout_s is not None:
            deadline_s = asyncio.get_running_loop().time() + queue_timeout_s
        arrival = Arrival(queue_timeout_s, deadline_s, asyncio.timeout_at(deadline_s))
        try:
            async with arrival.timeout:
                self._arrivals.add(arrival)
                self._tell_not_empty()
                self.num_queued += 1
                try:
                    yield arrival
                finally:
                    self._arrivals.discard(arrival)
                    self.num_queued -= 1
                    self._tell_if_empty()
        except TimeoutError:
            if not arrival.timeout.expired():
                raise
            raise arrival.error or _queue_timeout_error(queue_timeout_s) from None
        if arrival.error is not None:  # it was made just then
            raise arrival.error

    def add(self, collector: Collector, arrival: Arrival) -> None:
        """The request was made, and the engine has it: nothing was awaited since."""
        engine_id = collector.request.request_id
        self._collectors[engine_id] = collector
        self._by_user_id[collector.request_id] = collector
        self._tell_not_empty()
        self.num_queued += 1
        if arrival.deadline_s is not None:
            self._timers[engine_id] = asyncio.get_running_loop().call_at(
                arrival.deadline_s,
                self.fail,
                collector,
                _queue_timeout_error(arrival.queue_timeout_s),
            )

    def forget(self, collector: Collector) -> None:
        """The reader is gone: aborts what still runs, and takes no more outputs."""
        self._leave_engine(collector)
        self._by_user_id.pop(collector.request_id, None)
        self._tell_if_empty()

    def forget_all(self) -> None:
        for collector in list(self._by_user_id.values()):
            self.forget(collector)

    def engine_id(self, user_id: str) -> str | None:
        """None when no such request is under way in the engine."""
        collector = self._by_user_id.get(user_id)
        if collector is None or collector.request.request_id not in self._collectors:
            return None
        return collector.request.request_id

    def queue_position(self, collector: Collector) -> int:
        """1 for the next to start; 0 once started."""
        if collector.is_started:
            return 0
        order = (collector.request.params.priority, int(collector.request.request_id))
        return 1 + sum(
            (other.request.params.priority, int(engine_id)) < order
            for engine_id, other in self._collectors.items()
            if not other.is_started
        )

    def fail(self, collector: Collector, error: JaxpagedError) -> None:
        """Ends one request for its reader, and in the engine."""
        if self._leave_engine(collector):
            collector.fail(error)

    def fail_all(self, error: JaxpagedError) -> int:
        """Ends what the engine has; returns how many requests that were."""
        collectors = list(self._collectors.values())
        for collector in collectors:
            self.fail(collector, error)
        return len(collectors)

    def fail_arriving(self, error: JaxpagedError) -> int:
        """Ends what is still being made; returns how many requests that were."""
        arrivals = [arrival for arrival in self._arrivals if not arrival.timeout.expired()]
        for arrival in arrivals:
            arrival.error = error
            arrival.timeout.reschedule(asyncio.get_running_loop().time())
        return len(arrivals)

    async def wait_empty(self) -> None:
        """Until every reader has got its answer, or is gone, and nobody arrives."""
        while len(self):  # again: one that has arrived is no arrival any more, but a collector
            await self._emptied.wait()

    def deliver(self, outputs: StepOutputs) -> None:
        """Hands out what one step of the engine told."""
        collectors = self._collectors
        for started in outputs.started:
            collector = collectors.get(started.request_id)
            if collector is not None:
                self._leave_queue(collector)
                collector.on_started(started)
        for scored in outputs.scored:
            if (collector := collectors.get(scored.request_id)) is not None:
                collector.on_scored(scored)
        for output in outputs.sequences:
            collector = collectors.get(output.request_id)
            if collector is None:
                continue
            if collector.on_output(output):
                with contextlib.suppress(EngineClosedError, EngineRestartingError):
                    self._client.finish_sequence(output.request_id, output.index)
            if collector.is_streamed:
                self._sleeping[output.request_id] = collector
            if collector.is_behind:
                limit = collector.max_pending_tokens
                self.fail(
                    collector, SlowReaderError(f"the reader is behind by more than {limit} tokens")
                )
        for ended in outputs.ended:
            collector = collectors.pop(ended.request_id, None)
            if collector is not None:
                self._leave_queue(collector)
                collector.on_ended(ended)
                self._sleeping.pop(ended.request_id, None)
        if self._sleeping and not self._is_wake_due:
            loop = asyncio.get_running_loop()
            if self.max_messages_per_s is None or loop.time() >= self._next_wake_s:
                self._wake_readers()
            else:
                self._is_wake_due = True
                loop.call_at(self._next_wake_s, self._wake_readers)

    def _leave_engine(self, collector: Collector) -> bool:
        """Aborts a request in the engine; False if it has ended there already."""
        engine_id = collector.request.request_id
        if self._collectors.pop(engine_id, None) is None:
            return False
        self._leave_queue(collector)
        # An engine that is gone has no request to abort.
        with contextlib.suppress(EngineClosedError, EngineRestartingError):
            self._client.abort(engine_id)
        return True

    def _wake_readers(self) -> None:
        sleeping, self._sleeping = self._sleeping, {}
        self._is_wake_due = False
        num_messages = 0
        for collector in sleeping.values():
            if num_due := collector.num_due_deltas:
                num_messages += num_due
                collector.wake_reader()
        if self.max_messages_per_s is not None:
            pause_s = num_messages / self.max_messages_per_s
            self._next_wake_s = asyncio.get_running_loop().time() + pause_s

    def _leave_queue(self, collector: Collector) -> None:
        """It starts now, or ended without a start; does nothing to one that has started."""
        if not collector.is_started:
            self.num_queued -= 1
            timer = self._timers.pop(collector.request.request_id, None)
            if timer is not None:
                timer.cancel()

    def _tell_not_empty(self) -> None:
        if self._emptied.is_set():
            self._emptied = asyncio.Event()  # another: one belongs to the event loop it was used in

    def _tell_if_empty(self) -> None:
        if not len(self):
            self._emptied.set()


def _queue_timeout_error(queue_timeout_s: float | None) -> QueueTimeoutError:
    return QueueTimeoutError(f"not started within queue_timeout={queue_timeout_s:g} s")


def call_soon[T](
    loop: asyncio.AbstractEventLoop, callback: Callable[[T], object], value: T
) -> None:
    """From any thread; does nothing when the loop was closed, for nobody waits there then."""
    with contextlib.suppress(RuntimeError):  # why no check before: it may close in between
        loop.call_soon_threadsafe(callback, value)
