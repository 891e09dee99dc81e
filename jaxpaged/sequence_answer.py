"""One sequence's answer while it grows: text, stop strings, log-probabilities, deltas."""

import time
from dataclasses import dataclass, field

from jaxpaged.logprobs import PositionLogprobs, unpack_logprobs
from jaxpaged.observer import RequestObserver
from jaxpaged.outputs import Completion, Delta, SequenceOutput
from jaxpaged.request import EngineRequest, FinishReason
from jaxpaged.sampling_params import ResolvedParams, sequence_seed
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.stops import StopChecker
from jaxpaged.text.tokenizer import Tokenizer


@dataclass(slots=True)
class SequenceAnswer:
    """What turns a sequence's tokens into text, and what its reader has not taken yet.

    Attributes:
      tokenizer: None: token ids and no text.
      is_new: the reader has something to take.
      was_told: the reader has taken something.
    """

    index: int
    params: ResolvedParams
    tokenizer: Tokenizer | None
    detokenizer: Detokenizer | None
    stops: StopChecker
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    is_new: bool = False
    was_told: bool = False
    last_token_s: float | None = None

    @classmethod
    def of(
        cls, request: EngineRequest, index: int, tokenizer: Tokenizer | None
    ) -> "SequenceAnswer":
        params, prompt = request.params, request.prompt_token_ids
        detokenizer = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        stops = StopChecker(params.stop, include_stop_string=params.include_stop_string)
        return cls(index, params, tokenizer, detokenizer, stops)

    def add(self, output: SequenceOutput) -> bool:
        """Takes new tokens.

        Returns:
          Whether a stop string ended the sequence, which the engine does not know yet.
        """
        self.token_ids.extend(output.token_ids)
        if output.logprobs:
            self.logprobs += unpack_logprobs(output.logprobs, output.token_ids, self.token_bytes)
        self.cumulative_logprob = output.cumulative_logprob
        self.is_new = True
        self.finish_reason = output.finish_reason
        self.matched_stop = output.stop_token_id
        return self._add_text(output) and output.finish_reason is None

    def tell_tokens(self, observer: RequestObserver, num_tokens: int) -> None:
        """Tells when new tokens came, and how long after the last ones."""
        now, last = time.monotonic(), self.last_token_s
        observer.on_tokens(num_tokens, None if last is None else now - last)
        self.last_token_s = now

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id) if self.tokenizer else b""

    def take_delta(self) -> Delta:
        """What is new since the delta before."""
        delta = Delta(
            index=self.index,
            text="".join(self.text),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            logprobs=self.logprobs if self._wants_logprobs else None,
        )
        self.clear()
        self.is_new = False
        self.was_told = True
        return delta

    def clear(self) -> None:
        """Forgets what the reader has not taken."""
        self.text, self.token_ids, self.logprobs = [], [], []

    def completion(self) -> Completion:
        """All of it, where no delta was taken."""
        cumulative_logprob = self.cumulative_logprob
        if self._wants_logprobs:
            cumulative_logprob = sum(at.chosen.logprob for at in self.logprobs if at.chosen)
        return Completion(
            index=self.index,
            text="".join(self.text),
            token_ids=self.token_ids,
            # A sequence that was never forked ended with its request.
            finish_reason=self.finish_reason or FinishReason.CANCELLED,
            matched_stop=self.matched_stop,
            seed=sequence_seed(self.params.seed, self.index),
            logprobs=self.logprobs if self._wants_logprobs else None,
            cumulative_logprob=cumulative_logprob,
        )

    @property
    def _wants_logprobs(self) -> bool:
        # The scheduler asks for those of a beam search.
        return self.params.logprobs is not None and self.params.beam is None

    def _add_text(self, output: SequenceOutput) -> bool:
        """Adds what may be shown; returns whether a stop string ended the sequence."""
        num_unsearched = self.params.min_tokens - self.num_tokens
        self.num_tokens += len(output.token_ids)
        if self.detokenizer is None:
            return False
        token_ids, reason = output.token_ids, output.finish_reason
        # An EOS or stop id is no text, and comes before any stop string.
        ended_by_id = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        token_ids = token_ids[:-1] if ended_by_id else token_ids
        if num_unsearched > 0:
            self.text.append(self.detokenizer.push(token_ids[:num_unsearched]))
            token_ids = token_ids[num_unsearched:]
        text = self.detokenizer.push(token_ids)
        if reason is not None:
            text += self.detokenizer.finish()
        match = self.stops.push(text)
        self.text.append(match.text)
        if match.stop is not None and not ended_by_id:
            self.finish_reason = FinishReason.STOP_STRING
            self.matched_stop = match.stop
            return True
        if reason is not None:
            self.text.append(self.stops.finish())
        return False
