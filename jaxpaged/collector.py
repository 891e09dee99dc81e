"""One request's answer while it grows: text from token ids, stop strings, deltas for its reader.

Lives in the front's event loop. While the reader is behind, the deltas of one sequence are merged:
a slow reader costs memory in proportion to the answer, and never a message a token.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

from jaxpaged.errors import EngineFailedError, JaxpagedError
from jaxpaged.logprobs import PositionLogprobs, unpack_logprobs
from jaxpaged.observer import RequestObserver
from jaxpaged.outputs import (
    Accepted,
    Finished,
    Heartbeat,
    PromptLogprobs,
    PromptScored,
    RequestEnded,
    RequestOutput,
    RequestStarted,
    SequenceOutput,
    Started,
    StreamEvent,
    Timing,
    Usage,
)
from jaxpaged.request import EngineRequest
from jaxpaged.sequence_answer import SequenceAnswer
from jaxpaged.text.tokenizer import Tokenizer

# Positions of a prompt in one event: with 20 tokens each, well under what clients take.
_MAX_POSITIONS = 1024


class Collector:
    """Takes the engine's outputs for one request; gives events, or the whole answer at once."""

    def __init__(
        self,
        request_id: str,
        request: EngineRequest,
        tokenizer: Tokenizer | None,
        observer: RequestObserver | None = None,
    ):
        """Without a tokenizer the answer has token ids and no text."""
        self.request_id = request_id
        self.request = request
        self.is_started = False
        self.max_pending_tokens: int | None = None
        self.is_streamed = False  # its reader wants deltas, not only the end
        self._was_start_told = False
        self._is_reader_waiting = False  # it has taken all that was due to it
        self._min_tokens_per_delta = 1
        self._observer = observer
        # Nothing precedes the first token of a prompt.
        self._prompt_logprobs = [PositionLogprobs(None)]
        self._num_prompt_logprobs_told = 0
        self._sequences = [
            SequenceAnswer.of(request, index, tokenizer) for index in range(request.params.n)
        ]
        self._changed = asyncio.Event()
        self._ended: RequestEnded | None = None
        self._error: JaxpagedError | None = None
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0
        self._accepted_s = time.monotonic()
        self._started_s: float | None = None
        self._first_token_s: float | None = None

    # --- from the engine -----------------------------------------------------------------------

    def on_started(self, started: RequestStarted) -> None:
        self.is_started = True
        self._started_s = time.monotonic()
        if self._observer is not None:
            self._observer.on_started(self._started_s - self._accepted_s)
        self._num_cached_tokens = started.num_cached_tokens
        self._changed.set()

    def on_scored(self, scored: PromptScored) -> None:
        """Takes log-probabilities of prompt tokens; they come in order."""
        assert scored.first_position == len(self._prompt_logprobs)
        token_ids = self.request.prompt_token_ids[scored.first_position :]
        token_ids = token_ids[: scored.num_positions]
        unpacked = unpack_logprobs(scored.logprobs, token_ids, self._sequences[0].token_bytes)
        self._prompt_logprobs += unpacked
        self._changed.set()

    def on_output(self, output: SequenceOutput) -> bool:
        """Takes new tokens; `wake_reader` must follow, at once or after some more of them.

        Returns:
          Whether a stop string ended the sequence, which the engine does not know yet.
        """
        sequence = self._sequences[output.index]
        if sequence.finish_reason is not None:
            return False  # drawn before the engine heard of the stop string
        if output.token_ids:
            self._time_tokens(sequence, len(output.token_ids))
        self._num_completion_tokens += len(output.token_ids)
        stopped = sequence.add(output)
        if self._observer is not None and sequence.finish_reason is not None:
            self._observer.on_sequence_ended(sequence.finish_reason)
        # A first token goes at once, others when the front sees fit or before they are too many.
        is_urgent = not sequence.was_told or self._is_filling(sequence)
        if self.is_streamed and is_urgent and self._is_due(sequence):
            self.wake_reader()
        return stopped

    def on_ended(self, ended: RequestEnded) -> None:
        self._ended = ended
        if ended.error is not None:
            self._error = EngineFailedError(f"request {self.request_id}: {ended.error}")
        elif self._observer is not None:
            self._observer.on_ended(self._timing())
        self._changed.set()

    def fail(self, error: JaxpagedError) -> None:
        """Nothing more comes from the engine; the reader gets `error`, and nothing before it."""
        self._error = error
        for sequence in self._sequences:
            sequence.clear()
        self._changed.set()

    def wake_reader(self) -> None:
        self._changed.set()

    @property
    def num_due_deltas(self) -> int:
        """How many deltas the reader would take if it were woken now."""
        return sum(self._is_due(sequence) for sequence in self._sequences)

    @property
    def is_behind(self) -> bool:
        """Whether the reader has left more tokens than it may; none where it waits for more."""
        limit = self.max_pending_tokens
        if limit is None or self._is_reader_waiting:
            return False
        return sum(len(sequence.token_ids) for sequence in self._sequences) > limit

    def _is_filling(self, sequence: SequenceAnswer) -> bool:
        """Whether it has more than half of its share of what may be pending."""
        limit = self.max_pending_tokens
        return limit is not None and 2 * len(sequence.token_ids) * len(self._sequences) > limit

    def _time_tokens(self, sequence: SequenceAnswer, num_tokens: int) -> None:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
            if self._observer is not None:
                self._observer.on_first_token(self._first_token_s - self._accepted_s)
        if self._observer is not None:
            sequence.tell_tokens(self._observer, num_tokens)

    # --- to the reader -------------------------------------------------------------------------

    async def events(
        self,
        heartbeat_s: float | None = None,
        min_tokens_per_delta: int = 1,
        queue_position: Callable[[], int] = lambda: 0,
    ) -> AsyncIterator[StreamEvent]:
        """Everything that happens, in the order of the wire contract.

        Raises:
          JaxpagedError: the request failed, or was ended by `fail`.
        """
        prompt_token_ids = list(self.request.prompt_token_ids)
        self.is_streamed = True
        self._min_tokens_per_delta = min_tokens_per_delta
        yield Accepted(self.request_id, prompt_token_ids, self.request.params.seed)
        loop = asyncio.get_running_loop()
        told_s = loop.time()
        while True:
            heartbeat_at = None if heartbeat_s is None else told_s + heartbeat_s
            if not await self._wait_for_change(heartbeat_at):
                yield Heartbeat(queue_position())
                told_s = loop.time()
                continue
            self._raise_error()
            for event in self._due_events():
                yield event
                told_s = loop.time()
            if self._ended is not None and not any(s.is_new for s in self._sequences):
                self._raise_error()
                yield Finished(self._usage(self._ended), self._timing())
                return

    def _due_events(self) -> Iterator[StreamEvent]:
        """What the reader can take now; more of it, and the end, may come while it takes some."""
        if self.is_started and not self._was_start_told:
            self._was_start_told = True
            yield Started(self._num_cached_tokens)
        while self.is_started and self._has_new_prompt_logprobs:
            yield self._take_prompt_logprobs()
        for sequence in self._sequences:
            if self._is_due(sequence):
                yield sequence.take_delta()

    async def answer(self) -> RequestOutput:
        """The whole answer, once all sequences have ended.

        Raises:
          JaxpagedError: the request failed, or was ended by `fail`.
        """
        while self._ended is None:
            self._raise_error()
            await self._wait_for_change(None)
        self._raise_error()
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=list(self.request.prompt_token_ids),
            completions=[sequence.completion() for sequence in self._sequences],
            usage=self._usage(self._ended),
            timing=self._timing(),
            prompt_logprobs=self._prompt_logprobs if self._wants_prompt_logprobs else None,
            block_saving=self._ended.block_saving,
        )

    async def _wait_for_change(self, until_s: float | None) -> bool:
        """False when nothing has happened until then, in the loop's time."""
        self._is_reader_waiting = True
        try:
            if until_s is None or self._changed.is_set():
                await self._changed.wait()
            else:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._is_reader_waiting = False
        self._changed.clear()
        return True

    def _is_due(self, sequence: SequenceAnswer) -> bool:
        """Whether there is a delta to give: a first and a last one at once, others when large."""
        if not sequence.is_new:
            return False
        is_edge = not sequence.was_told or sequence.finish_reason or self._ended is not None
        return bool(is_edge) or len(sequence.token_ids) >= self._min_tokens_per_delta

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None

    @property
    def _has_new_prompt_logprobs(self) -> bool:
        is_new = self._num_prompt_logprobs_told < len(self._prompt_logprobs)
        return self._wants_prompt_logprobs and is_new

    def _take_prompt_logprobs(self) -> PromptLogprobs:
        first = self._num_prompt_logprobs_told
        logprobs = self._prompt_logprobs[first : first + _MAX_POSITIONS]
        self._num_prompt_logprobs_told += len(logprobs)
        return PromptLogprobs(first, logprobs)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _usage(self, ended: RequestEnded) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_prompt_tokens=self._num_cached_tokens,
            completion_tokens=self._num_completion_tokens,
            preemptions=ended.num_preemptions,
        )

    def _timing(self) -> Timing:
        now = time.monotonic()
        return Timing(
            queued_s=(self._started_s or now) - self._accepted_s,
            time_to_first_token_s=(self._first_token_s or now) - self._accepted_s,
            total_s=now - self._accepted_s,
        )
