"""The synchronous face for notebooks and scripts: an `AsyncLLM` in an event loop of its own thread.

It works inside a running event loop (Jupyter), and Ctrl-C cancels what runs and leaves the engine
usable.
"""

import asyncio
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Sequence,
)
from functools import partial
from types import TracebackType
from typing import Any, cast

from tqdm.auto import tqdm

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import EngineClosedError, InvalidFieldError
from jaxpaged.outputs import (
    BeamSearchOutput,
    Delta,
    EngineStats,
    ModelInfo,
    RequestOutput,
    Score,
    StreamEvent,
)
from jaxpaged.prompts import as_list, params_of
from jaxpaged.sampling_params import Prompt, SamplingParams
from jaxpaged.text import Tokenizer

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model to ask. Use it as a context manager, or call `close`.

    Args:
      model: folder, `.gguf` file, bundled name or hub id.
      options: the other fields of `EngineConfig`.

    Raises:
      TypeError: there is no such option.
      JaxpagedError: an option is out of range, or the model cannot be loaded.
    """

    def __init__(self, model: str, **options: Any):
        self._llm = AsyncLLM(model, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="jaxpaged-llm", daemon=True
        )
        self._thread.start()
        self._is_closed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._llm.tokenizer

    @property
    def info(self) -> ModelInfo:
        """What is loaded, and how large the engine around it is."""
        return self._llm.info

    def generate(
        self, prompts: Prompts, params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Answers prompts, in their order.

        Args:
          prompts: texts, lists of token ids or `ChatPrompt`s; or one of these alone.
          params: one for all prompts, or one for each.
          use_tqdm: show a progress bar with the tokens per second.

        Raises:
          JaxpagedError: a prompt was refused (then none is answered), or a step failed.
        """
        items = as_list(prompts)
        calls = [
            partial(self._llm.generate, prompt, param)
            for prompt, param in zip(items, params_of(params, len(items)), strict=True)
        ]
        return self._wait(self._run_all("generate", calls, use_tqdm))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta]:
        """The answer to one prompt, piece by piece; closing the iterator aborts the request."""
        return self._iterate(self._llm.stream(prompt, params))

    def stream_events(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StreamEvent]:
        """Everything that happens to a request: see `AsyncLLM.stream_events`."""
        return self._iterate(self._llm.stream_events(prompt, params))

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Answers a conversation, rendered by the model's own chat template.

        Args:
          options: the other fields of `ChatPrompt`.
        """
        return self._wait(self._llm.chat(messages, params, **options))

    def beam_search(
        self,
        prompts: Prompts,
        beam_width: int = 4,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt that a beam search finds, in their order.

        Args:
          beam_width: continuations that live at once, and at most as many hypotheses.
          length_penalty: a hypothesis of n tokens scores its log-probability / n ** penalty.
          options: the other arguments of `AsyncLLM.beam_search`.

        Raises:
          JaxpagedError: a prompt was refused (then none is answered), or a step failed.
        """

        def search(prompt: Prompt) -> Awaitable[BeamSearchOutput]:
            return self._llm.beam_search(prompt, beam_width, max_tokens, length_penalty, **options)

        calls = [partial(search, prompt) for prompt in as_list(prompts)]
        return self._wait(self._run_all("beam search", calls, use_tqdm))

    def score(
        self,
        prompts: Prompts,
        completions: str | list[int] | Sequence[str | list[int]],
        *,
        use_tqdm: bool = True,
    ) -> list[Score]:
        """How likely the model finds each completion after its prompt (teacher-forced).

        Args:
          completions: one for each prompt: texts or lists of token ids; or one of these alone.

        Raises:
          JaxpagedError: a prompt was refused (then none is scored), or a step failed.
        """
        items, wanted = as_list(prompts), as_list(completions)
        if len(items) != len(wanted):
            raise InvalidFieldError(
                "completions", f"completions has {len(wanted)} entries for {len(items)} prompts"
            )
        calls = [
            partial(self._llm.score, prompt, cast(str | list[int], completion))
            for prompt, completion in zip(items, wanted, strict=True)
        ]
        return self._wait(self._run_all("score", calls, use_tqdm))

    def stats(self) -> EngineStats:
        return self._wait(self._llm.stats())

    def reset_prefix_cache(self) -> int:
        """Forgets every unused cached block; returns how many."""
        return self._wait(self._llm.reset_prefix_cache())

    def close(self) -> None:
        """Stops the engine and frees the device's memory. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._llm.close()
            # Calls of other threads get their error before the loop stops.
            asyncio.run_coroutine_threadsafe(_end_of_other_tasks(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _run_all[T](
        self, name: str, calls: Sequence[Callable[[], Awaitable[T]]], use_tqdm: bool
    ) -> list[T]:
        # Half of the queue: a long list waits here instead of being refused there.
        slots = asyncio.Semaphore(max(1, self._llm.config.max_queued_requests // 2))
        start, num_tokens = time.monotonic(), 0

        async def run(call: Callable[[], Awaitable[T]], bar: tqdm) -> T:
            nonlocal num_tokens
            async with slots:
                output = await call()
            if isinstance(output, RequestOutput):
                num_tokens += output.usage.completion_tokens
                speed = num_tokens / (time.monotonic() - start)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
            bar.update()
            return output

        with tqdm(total=len(calls), desc=name, unit="prompt", disable=not use_tqdm) as bar:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(call, bar)) for call in calls]
        return [task.result() for task in tasks]

    def _iterate[T](self, items: AsyncGenerator[T]) -> Generator[T]:
        try:
            while True:
                item = self._wait(_next_or_none(items))
                if item is None:
                    return
                yield item
        finally:
            self._wait(items.aclose())

    def _wait[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop's thread; an interrupt here cancels it there."""
        if self._is_closed:
            coroutine.close()
            raise EngineClosedError("this LLM was closed")
        tasks: list[asyncio.Task[Any] | None] = []
        interrupted = threading.Event()

        async def run() -> T:
            if interrupted.is_set():
                coroutine.close()
                raise asyncio.CancelledError
            tasks.append(asyncio.current_task())
            return await coroutine

        def cancel() -> None:
            for task in tasks:
                if task is not None:
                    task.cancel()

        try:
            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        except BaseException:
            # why not Future.cancel: an interrupt may come before there is a future to hold
            interrupted.set()
            self._loop.call_soon_threadsafe(cancel)
            raise


async def _next_or_none[T](items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)


async def _end_of_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)
