"""The front: validates, tokenises, submits; its collectors turn tokens back into text."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxpaged import validation
from jaxpaged.beam_answers import beam_search_output
from jaxpaged.config import EngineConfig
from jaxpaged.engine_client import (
    EngineClient,
    OnDied,
    OnOutputs,
    StartEngine,
    ThreadEngineClient,
    start_in_thread,
)
from jaxpaged.errors import (
    EngineClosedError,
    WeightsChangedError,
)
from jaxpaged.observer import RequestObserver
from jaxpaged.outputs import (
    BeamSearchOutput,
    BlockState,
    Delta,
    EngineStats,
    ModelInfo,
    RequestOutput,
    Score,
    StreamEvent,
)
from jaxpaged.prompts import check_deltas_only
from jaxpaged.request_intake import RequestIntake
from jaxpaged.request_maker import FrontModel
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults, check_beams
from jaxpaged.scoring import score
from jaxpaged.text import Tokenizer

if TYPE_CHECKING:
    from jaxpaged.engine import Engine


class AsyncLLM:
    """A model that answers requests in an asyncio event loop, one loop at a time.

    Args:
      model: folder, `.gguf` file, bundled name or hub id.
      start_engine: in a thread of this process, or `process_client.start_in_process`.
      options: the other fields of `EngineConfig`.

    Attributes:
      observer: told what happens to requests, when set.
      live: the requests under way.
      engine: where they run.
      info: what is loaded, and how large the engine around it is.

    Raises:
      TypeError: there is no such option.
      JaxpagedError: an option is out of range, or the model cannot be loaded.
    """

    def __init__(self, model: str, *, start_engine: StartEngine = start_in_thread, **options: Any):
        config = validation.make_engine_config(model, options)
        front_model = FrontModel.load(config)
        self._set_up(front_model, partial(start_engine, config, front_model.vocabulary))

    @classmethod
    def from_engine(
        cls,
        config: EngineConfig,
        engine: "Engine",
        tokenizer: Tokenizer | None,
        defaults: SamplingDefaults,
        eos_token_ids: frozenset[int],
    ) -> "AsyncLLM":
        """Puts a front before an engine that exists already."""
        model = FrontModel(config, tokenizer, defaults, eos_token_ids, engine.vocabulary)
        return cls.from_client(model, partial(ThreadEngineClient, engine))

    @classmethod
    def from_client(
        cls, model: FrontModel, connect: Callable[[OnOutputs, OnDied], EngineClient]
    ) -> "AsyncLLM":
        """Puts a front before the engine that `connect` makes a client of."""
        llm = cls.__new__(cls)
        llm._set_up(model, connect)
        return llm

    def _set_up(
        self, model: FrontModel, connect: Callable[[OnOutputs, OnDied], EngineClient]
    ) -> None:
        self.config = model.config
        self.tokenizer = model.tokenizer
        self.observer: RequestObserver | None = None
        self._intake = RequestIntake(model, connect)
        self.engine = self._intake.engine
        self.live = self._intake.live
        self.info: ModelInfo = self._intake.maker.model_info("initial")

    # --- requests ------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        return_text: bool = True,
        queue_timeout_s: float | None = None,
        on_accepted: Callable[[], Awaitable[None]] | None = None,
    ) -> RequestOutput:
        """Runs a request to its end. Cancelling the call aborts it and frees its blocks.

        Args:
          queue_timeout_s: give up when it has not started so long after this call.
          on_accepted: awaited once the request is queued.

        Raises:
          JaxpagedError: the request was refused, or a step of the engine failed.
        """
        collector = await self._intake.submit(
            prompt, params, self.observer, request_id, queue_timeout_s, return_text=return_text
        )
        try:
            if on_accepted is not None:
                await on_accepted()
            return await collector.answer()
        finally:
            self.live.forget(collector)

    async def stream_events(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        queue_timeout_s: float | None = None,
        heartbeat_s: float | None = None,
        min_tokens_per_delta: int = 1,
        max_pending_tokens: int | None = None,
    ) -> AsyncGenerator[StreamEvent]:
        """Accepted, Started, deltas, Finished, as they happen.

        Closing the iterator aborts the request and frees its blocks.

        Args:
          queue_timeout_s: give up when it has not started so long after this call.
          heartbeat_s: give a Heartbeat when nothing else was given for so long; None: never.
          min_tokens_per_delta: a sequence's first and last delta may have fewer.
          max_pending_tokens: end the request when its reader leaves more; None: never.

        Raises:
          JaxpagedError: the request was refused, or a step of the engine failed.
        """
        collector = await self._intake.submit(
            prompt, params, self.observer, request_id, queue_timeout_s
        )
        collector.max_pending_tokens = max_pending_tokens
        try:
            position = partial(self.live.queue_position, collector)
            async for event in collector.events(heartbeat_s, min_tokens_per_delta, position):
                yield event
        finally:
            self.live.forget(collector)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[Delta]:
        """The deltas of `stream_events` alone.

        Raises:
          UnsupportedOptionError: `prompt_logprobs` is set: they are no deltas.
        """
        check_deltas_only(params)
        events = self.stream_events(prompt, params, request_id=request_id)
        try:
            async for event in events:
                if isinstance(event, Delta):
                    yield event
        finally:
            await events.aclose()

    async def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Answers a conversation, rendered by the model's own chat template.

        Args:
          options: the other fields of `ChatPrompt`.
        """
        return await self.generate(ChatPrompt(messages, **options), params)

    async def beam_search(
        self,
        prompt: Prompt,
        beam_width: int = 4,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        *,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
    ) -> BeamSearchOutput:
        """The most likely continuations that a beam search finds.

        Args:
          beam_width: continuations that live at once, and at most as many hypotheses.
          length_penalty: a hypothesis of n tokens scores its log-probability / n ** penalty.
          stop_token_ids: end a hypothesis, as the model's EOS ids do unless `ignore_eos`.

        Raises:
          JaxpagedError: the request was refused, or a step of the engine failed.
        """
        check_beams(beam_width, length_penalty)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            repetition_penalty=1.0,
            n=beam_width,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
        )
        collector = await self._intake.submit(
            prompt, params, self.observer, length_penalty=length_penalty
        )
        try:
            return beam_search_output(await collector.answer(), length_penalty)
        finally:
            self.live.forget(collector)

    async def score(self, prompt: Prompt, completion: str | list[int]) -> Score:
        """How likely the model finds a completion; see `scoring.score`."""
        return await score(self, prompt, completion)

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; see `RequestMaker.tokenize`."""
        return await self._intake.maker.tokenize(prompt, add_special_tokens)

    def check_queue(self) -> None:
        """Raises QueueFullError when as many requests wait as may."""
        self._intake.check_queue()

    async def abort(self, request_ids: list[str]) -> list[str]:
        """Aborts requests; returns the ids of those that ran. Unknown ids are no error."""
        ids = [(i, self.live.engine_id(i)) for i in request_ids]
        aborts = [(i, self.engine.abort(engine_id)) for i, engine_id in ids if engine_id]
        return [request_id for request_id, done in aborts if await asyncio.wrap_future(done)]

    # --- the engine ----------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self.engine.stats())

    async def block_states(self) -> list[BlockState]:
        """Every block of the pool, by id; the null block first."""
        return await asyncio.wrap_future(self.engine.block_states())

    async def reset_prefix_cache(self) -> int:
        """Forgets every unused cached block; returns how many."""
        return await asyncio.wrap_future(self.engine.reset_prefix_cache())

    async def update_weights(self, checkpoint_path: str, weights_version: str) -> None:
        """Takes the weights of another checkpoint; what runs then fails with WeightsChangedError.

        Cancelling the call does not stop a change under way: `info` tells the version then.

        Raises:
          JaxpagedError: they cannot be loaded or are of another structure; nothing has changed.
        """
        done = self.engine.update_weights(checkpoint_path)
        # why a callback: it must come before the outputs of the aborts that the update made
        done.add_done_callback(partial(self._on_weights_changed, weights_version))
        await asyncio.shield(asyncio.wrap_future(done))

    def _on_weights_changed(self, weights_version: str, done: Future[None]) -> None:
        """Called in a thread of the client's."""
        if done.exception() is not None:
            return
        self.info = self._intake.maker.model_info(weights_version)
        self._intake.fail_all(
            WeightsChangedError("the weights were replaced while the request ran")
        )

    def close(self) -> None:
        """Stops the engine and frees the device's memory; what runs fails. Idempotent."""
        self.engine.close()
        self._intake.fail_all(EngineClosedError("the engine was closed"))

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()
