"""One request's answer while it grows: text from token ids, stop strings, deltas for its reader.

Lives in the front's event loop. While the reader is behind, the deltas of one sequence are merged:
a slow reader costs memory in proportion to the answer, and never a message a token.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from jaxpaged.errors import EngineFailedError
from jaxpaged.outputs import (
    Accepted,
    Completion,
    Delta,
    Finished,
    RequestEnded,
    RequestOutput,
    RequestStarted,
    SequenceOutput,
    Started,
    StreamEvent,
    Timing,
    Usage,
)
from jaxpaged.request import EngineRequest, FinishReason
from jaxpaged.sampling_params import sequence_seed
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.stops import StopChecker
from jaxpaged.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _SequenceText:
    """One sequence: what turns its tokens into text, and what the reader has not taken yet."""

    detokenizer: Detokenizer | None
    stops: StopChecker
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    is_new: bool = False


class Collector:
    """Takes the engine's outputs for one request; gives events, or the whole answer at once."""

    def __init__(self, request_id: str, request: EngineRequest, tokenizer: Tokenizer | None):
        """Without a tokenizer the answer has token ids and no text."""
        self.request_id = request_id
        self.request = request
        self.is_started = False
        params = request.params
        self._sequences = [
            _SequenceText(
                tokenizer
                and Detokenizer(
                    tokenizer,
                    request.prompt_token_ids,
                    skip_special_tokens=params.skip_special_tokens,
                ),
                StopChecker(params.stop, include_stop_string=params.include_stop_string),
            )
            for _ in range(params.n)
        ]
        self._changed = asyncio.Event()
        self._ended: RequestEnded | None = None
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0
        self._accepted_s = time.monotonic()
        self._started_s: float | None = None
        self._first_token_s: float | None = None

    # --- from the engine -----------------------------------------------------------------------

    def on_started(self, started: RequestStarted) -> None:
        self.is_started = True
        self._started_s = time.monotonic()
        self._num_cached_tokens = started.num_cached_tokens
        self._changed.set()

    def on_output(self, output: SequenceOutput) -> bool:
        """Takes new tokens.

        Returns:
          Whether a stop string ended the sequence, which the engine does not know yet.
        """
        sequence = self._sequences[output.index]
        if sequence.finish_reason is not None:
            return False  # drawn before the engine heard of the stop string
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._num_completion_tokens += len(output.token_ids)
        sequence.token_ids.extend(output.token_ids)
        sequence.is_new = True
        sequence.finish_reason = output.finish_reason
        sequence.matched_stop = output.stop_token_id
        stopped = self._add_text(sequence, output)
        self._changed.set()
        return stopped and output.finish_reason is None

    def on_ended(self, ended: RequestEnded) -> None:
        self._ended = ended
        self._changed.set()

    def _add_text(self, sequence: _SequenceText, output: SequenceOutput) -> bool:
        """Adds what may be shown; returns whether a stop string ended the sequence."""
        if sequence.detokenizer is None:
            return False
        token_ids, reason = output.token_ids, output.finish_reason
        # An EOS or stop id is no text, and comes before any stop string.
        ended_by_id = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        text = sequence.detokenizer.push(token_ids[:-1] if ended_by_id else token_ids)
        if reason is not None:
            text += sequence.detokenizer.finish()
        match = sequence.stops.push(text)
        sequence.text.append(match.text)
        if match.stop is not None and not ended_by_id:
            sequence.finish_reason = FinishReason.STOP_STRING
            sequence.matched_stop = match.stop
            return True
        if reason is not None:
            sequence.text.append(sequence.stops.finish())
        return False

    # --- to the reader -------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Everything that happens, in the order of the wire contract.

        Raises:
          EngineFailedError: a step of the engine failed.
        """
        prompt_token_ids = list(self.request.prompt_token_ids)
        yield Accepted(self.request_id, prompt_token_ids, self.request.params.seed)
        told_started = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._ended is not None:
                self._raise_error(self._ended)
            if self.is_started and not told_started:
                told_started = True
                yield Started(self._num_cached_tokens)
            for index, sequence in enumerate(self._sequences):
                if sequence.is_new:
                    yield self._take_delta(index, sequence)
            if self._ended is not None and not any(s.is_new for s in self._sequences):
                yield Finished(self._usage(self._ended), self._timing())
                return

    async def answer(self) -> RequestOutput:
        """The whole answer, once all sequences have ended.

        Raises:
          EngineFailedError: a step of the engine failed.
        """
        while self._ended is None:
            await self._changed.wait()
            self._changed.clear()
        self._raise_error(self._ended)
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=list(self.request.prompt_token_ids),
            completions=[self._completion(i, s) for i, s in enumerate(self._sequences)],
            usage=self._usage(self._ended),
            timing=self._timing(),
        )

    def _take_delta(self, index: int, sequence: _SequenceText) -> Delta:
        delta = Delta(
            index=index,
            text="".join(sequence.text),
            token_ids=sequence.token_ids,
            finish_reason=sequence.finish_reason,
            matched_stop=sequence.matched_stop,
        )
        sequence.text, sequence.token_ids, sequence.is_new = [], [], False
        return delta

    def _completion(self, index: int, sequence: _SequenceText) -> Completion:
        return Completion(
            index=index,
            text="".join(sequence.text),
            token_ids=sequence.token_ids,
            # A sequence that was never forked ended with its request.
            finish_reason=sequence.finish_reason or FinishReason.CANCELLED,
            matched_stop=sequence.matched_stop,
            seed=sequence_seed(self.request.params.seed, index),
        )

    def _raise_error(self, ended: RequestEnded) -> None:
        if ended.error is not None:
            raise EngineFailedError(f"request {self.request_id}: {ended.error}")

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
