"""The front: validates, tokenises, submits; its collectors turn tokens back into text."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

from jaxpaged import checkpoint, validation
from jaxpaged.checkpoint.locate import home_folder
from jaxpaged.collector import Collector
from jaxpaged.config import EngineConfig, ResolvedConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_client import EngineClient, ThreadEngineClient
from jaxpaged.errors import (
    DuplicateRequestIdError,
    EngineClosedError,
    InvalidFieldError,
    QueueFullError,
)
from jaxpaged.outputs import (
    BlockState,
    Delta,
    EngineStats,
    ModelInfo,
    RequestEnded,
    RequestOutput,
    StepOutputs,
    StreamEvent,
)
from jaxpaged.request import EngineRequest
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams
from jaxpaged.text import Tokenizer, load_tokenizer, render_chat
from jaxpaged.validation import SamplingDefaults

logger = logging.getLogger(__name__)

# Longer texts are tokenised in a thread, so that other streams go on meanwhile.
_THREAD_TEXT_LENGTH = 4096


class AsyncLLM:
    """A model that answers requests in an asyncio event loop, one loop at a time.

    Args:
      model: folder, `.gguf` file, bundled name or hub id.
      options: the other fields of `EngineConfig`.

    Raises:
      JaxpagedError: an option is out of range, or the model cannot be loaded.
    """

    def __init__(self, model: str, **options: Any):
        config = EngineConfig(model, **options)
        validation.check_engine_config(config)
        located = checkpoint.locate(config.model, config.load_format)
        wishes = located.generation_config if config.generation_config == "auto" else {}
        for wish in validation.unsupported_defaults(wishes):
            logger.warning("the model's generation config asks for %s: not supported yet", wish)
        tokenizer = load_tokenizer(located)
        self._set_up(
            config,
            Engine.start(config, located, home_folder()),
            tokenizer,
            SamplingDefaults.from_generation_config(wishes),
            tokenizer.eos_token_ids
            if tokenizer
            else checkpoint.eos_token_ids(located.config, located.generation_config),
        )

    @classmethod
    def from_engine(
        cls,
        config: EngineConfig,
        engine: Engine,
        tokenizer: Tokenizer | None,
        defaults: SamplingDefaults,
        eos_token_ids: frozenset[int],
    ) -> "AsyncLLM":
        """Puts a front before an engine that exists already."""
        llm = cls.__new__(cls)
        llm._set_up(config, engine, tokenizer, defaults, eos_token_ids)
        return llm

    def _set_up(
        self,
        config: EngineConfig,
        engine: Engine,
        tokenizer: Tokenizer | None,
        defaults: SamplingDefaults,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._resolved: ResolvedConfig = engine.config
        self._defaults = defaults
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(config.seed)
        self._num_requests = 0
        self._collectors: dict[str, Collector] = {}  # by the engine's id
        self._engine_ids: dict[str, str] = {}  # by the user's id
        self._num_queued = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: EngineClient = ThreadEngineClient(engine, self._on_outputs, self._on_died)

    @property
    def info(self) -> ModelInfo:
        """What is loaded, and how large the engine around it is."""
        config, defaults = self._resolved, self._defaults
        return ModelInfo(
            model=config.model,
            weights_version="initial",
            vocab_size=config.vocab_size,
            eos_token_ids=sorted(self._eos_token_ids),
            bos_token_id=self.tokenizer.bos_token_id if self.tokenizer else None,
            has_chat_template=self.tokenizer is not None and self.tokenizer.has_chat_template,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_queued_requests=self.config.max_queued_requests,
            default_temperature=defaults.temperature,
            default_top_k=defaults.top_k,
            default_top_p=defaults.top_p,
            default_min_p=defaults.min_p,
        )

    # --- requests ------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        return_text: bool = True,
    ) -> RequestOutput:
        """Runs a request to its end. Cancelling the call aborts it and frees its blocks.

        Raises:
          JaxpagedError: the request was refused, or a step of the engine failed.
        """
        collector = await self._submit(prompt, params, request_id, return_text)
        try:
            return await collector.answer()
        finally:
            self._forget(collector)

    async def stream_events(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[StreamEvent]:
        """Accepted, Started, deltas, Finished, as they happen.

        Closing the iterator aborts the request and frees its blocks.

        Raises:
          JaxpagedError: the request was refused, or a step of the engine failed.
        """
        collector = await self._submit(prompt, params, request_id, return_text=True)
        try:
            async for event in collector.events():
                yield event
        finally:
            self._forget(collector)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[Delta]:
        """The deltas of `stream_events` alone."""
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

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids that `generate` would use for this prompt."""
        if not isinstance(prompt, str | ChatPrompt):
            return list(prompt)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidFieldError("prompt", "the model has no tokenizer: give token ids")
        if isinstance(prompt, ChatPrompt):
            return await asyncio.to_thread(
                render_chat,
                tokenizer,
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                template_args=prompt.template_args,
            )
        if len(prompt) <= _THREAD_TEXT_LENGTH:
            return tokenizer.encode(prompt, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens)

    async def abort(self, request_ids: list[str]) -> list[str]:
        """Aborts requests; returns the ids of those that ran. Unknown ids are no error."""
        running = [(i, self._engine_ids[i]) for i in request_ids if i in self._engine_ids]
        return [
            request_id
            for request_id, engine_id in running
            if await asyncio.wrap_future(self._client.abort(engine_id))
        ]

    # --- the engine ----------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self._client.stats())

    async def block_states(self) -> list[BlockState]:
        """Every block of the pool, by id; the null block first."""
        return await asyncio.wrap_future(self._client.block_states())

    async def reset_prefix_cache(self) -> int:
        """Forgets every unused cached block; returns how many."""
        return await asyncio.wrap_future(self._client.reset_prefix_cache())

    def close(self) -> None:
        """Stops the engine and frees the device's memory; what runs fails. Idempotent."""
        self._client.close()
        self._on_died("the engine was closed")

    # --- inside --------------------------------------------------------------------------------

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        return_text: bool,
    ) -> Collector:
        """Checks everything, then hands the request to the engine."""
        self._enter_loop()
        request_id = validation.check_request_id(request_id)
        if isinstance(prompt, str):
            await self._check_text_length(prompt)
        token_ids = validation.check_prompt(await self.tokenize(prompt), self._resolved)
        resolved = validation.resolve_params(
            params or SamplingParams(),
            self._resolved,
            self._defaults,
            num_prompt_tokens=len(token_ids),
            is_chat=isinstance(prompt, ChatPrompt),
            draw_seed=lambda: self._seeds.getrandbits(64) - 2**63,
        )
        if resolved.stop and self.tokenizer is None:
            raise InvalidFieldError("stop", f"stop={resolved.stop} needs a tokenizer: none here")
        # why only now: nothing below waits, so that no two calls can pass the checks together
        if request_id in self._engine_ids:
            raise DuplicateRequestIdError(f"request_id={request_id!r} is running already")
        if self._num_queued >= self.config.max_queued_requests:
            raise QueueFullError(
                f"{self._num_queued} requests wait already: "
                f"max_queued_requests={self.config.max_queued_requests}"
            )
        self._num_requests += 1
        request = EngineRequest(
            request_id=f"{self._num_requests}",
            prompt_token_ids=token_ids,
            params=resolved,
            eos_token_ids=frozenset() if resolved.ignore_eos else self._eos_token_ids,
        )
        needs_text = return_text or resolved.stop
        collector = Collector(request_id, request, self.tokenizer if needs_text else None)
        self._client.submit(request)
        self._collectors[request.request_id] = collector
        self._engine_ids[request_id] = request.request_id
        self._num_queued += 1
        return collector

    async def _check_text_length(self, text: str) -> None:
        """Refuses a text that is too long whatever its tokens are, without tokenising it."""
        tokenizer = self.tokenizer
        if tokenizer is None or len(text) <= 16 * self._resolved.max_model_len:
            return
        longest = await asyncio.to_thread(tokenizer.max_token_bytes)
        validation.check_prompt_len(len(text) // longest, self._resolved, at_least=True)

    def _forget(self, collector: Collector) -> None:
        """The reader is gone: aborts what still runs, and takes no more outputs."""
        engine_id = collector.request.request_id
        if self._collectors.pop(engine_id, None) is not None:
            self._num_queued -= not collector.is_started
            with contextlib.suppress(EngineClosedError):
                self._client.abort(engine_id)
        self._engine_ids.pop(collector.request_id, None)

    def _fail_all(self, error: str) -> None:
        for engine_id in list(self._collectors):
            self._deliver(StepOutputs(ended=[RequestEnded(engine_id, 0, error)]))

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._collectors and self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("requests of another event loop are still running")
            for collector in list(self._collectors.values()):
                self._forget(collector)
            self._loop = loop

    def _on_outputs(self, outputs: StepOutputs) -> None:
        """Called in the engine's thread."""
        assert self._loop is not None
        _call_soon(self._loop, self._deliver, outputs)

    def _on_died(self, error: str) -> None:
        """Nothing more comes from the engine. Called in any thread."""
        if self._loop is not None:
            _call_soon(self._loop, self._fail_all, error)

    def _deliver(self, outputs: StepOutputs) -> None:
        collectors = self._collectors
        for started in outputs.started:
            collector = collectors.get(started.request_id)
            if collector is not None:
                self._num_queued -= 1
                collector.on_started(started)
        for output in outputs.sequences:
            collector = collectors.get(output.request_id)
            if collector is not None and collector.on_output(output):
                self._client.finish_sequence(output.request_id, output.index)
        for ended in outputs.ended:
            collector = collectors.pop(ended.request_id, None)
            if collector is not None:
                self._num_queued -= not collector.is_started
                collector.on_ended(ended)


def _call_soon[T](loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], value: T) -> None:
    """From any thread; does nothing when the loop was closed, for nobody waits there then."""
    with contextlib.suppress(RuntimeError):  # why no check before: it may close in between
        loop.call_soon_threadsafe(callback, value)
