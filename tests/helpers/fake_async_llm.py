"""A front without an engine: scripted answers, every call recorded, errors on demand."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine_client import EngineState
from jaxpaged.outputs import (
    Accepted,
    BlockState,
    Completion,
    Delta,
    EngineStats,
    Finished,
    ModelInfo,
    RequestOutput,
    Started,
    StreamEvent,
    Timing,
    Usage,
)
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams, sequence_seed

MODEL_INFO = ModelInfo(
    model="fake",
    weights_version="w1",
    vocab_size=300,
    eos_token_ids=[256, 257],
    bos_token_id=0,
    has_chat_template=True,
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_seqs=8,
    max_queued_requests=1024,
    default_temperature=0.5,
    default_top_k=40,
    default_top_p=0.75,
    default_min_p=0.0,
    default_repetition_penalty=1.0,
)
STATS = EngineStats(
    running_requests=1,
    queued_requests=2,
    total_blocks=64,
    used_blocks=4,
    cached_free_blocks=3,
    used_slots=60,
    block_size=16,
    steps=7,
    preemptions=1,
    compiles_after_warmup=0,
    prompt_tokens=90,
    cached_prompt_tokens=32,
    completion_tokens=11,
)
BLOCKS = [BlockState(0, 0, False), BlockState(2, 16, True), BlockState(1, 5, False)]
ANSWER = ["안", "녕", "", "하세요"]  # one delta each; the third has its text held back
USAGE = Usage(prompt_tokens=3, cached_prompt_tokens=1, completion_tokens=4, preemptions=0)
TIMING = Timing(queued_s=0.25, time_to_first_token_s=0.5, total_s=1.5)


class FakeTokenizer:
    """UTF-8 bytes as ids; BOS is 0."""

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [id_ for id_ in ids if id_ or not skip_special_tokens]
        return bytes(id_ % 256 for id_ in kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class FakeEngineClient:
    """An engine that could always step."""

    state = EngineState.READY
    config = SimpleNamespace(platform="cpu")

    def stats(self) -> Future[EngineStats]:
        future: Future[EngineStats] = Future()
        future.set_result(STATS)
        return future


class FakeLiveRequests:
    """Counts the fake's running requests; there is nothing to end."""

    num_queued = 0
    max_messages_per_s: float | None = None

    def __init__(self, running: set[str]) -> None:
        self._running = running

    def __len__(self) -> int:
        return len(self._running)

    async def wait_empty(self) -> None:
        while self._running:
            await asyncio.sleep(0.01)

    def fail_all(self, error: Exception) -> int:
        return len(self._running)

    def fail_arriving(self, error: Exception) -> int:
        return 0


class FakeAsyncLLM:
    """The calls of AsyncLLM.

    Attributes:
      calls: (prompt, params, request_id) of every Generate and Stream.
      error: raised by the next calls, when set.
      error_after: deltas before `error` is raised in a stream; None: before it is accepted.
      hold: while cleared, a request waits after its first delta.
      texts: what every sequence answers, one delta each.
      matched_stop: what ended the answers.
      options: the other arguments of the last Generate or Stream.
      updates: (checkpoint path, version) of every UpdateWeights.
      ended: request ids whose generator was closed or whose call was cancelled or finished.
    """

    def __init__(self) -> None:
        self.config = EngineConfig("fake")
        self.info = MODEL_INFO
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.calls: list[tuple[Prompt, SamplingParams | None, str | None]] = []
        self.error: Exception | None = None
        self.error_after: int | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.texts = ANSWER
        self.matched_stop: str | int | None = None
        self.finish_reason = FinishReason.MAX_TOKENS
        self.running: set[str] = set()
        self.ended: list[str] = []
        self.closed = False
        self.engine = FakeEngineClient()
        self.live = FakeLiveRequests(self.running)
        self.observer = None
        self.options: dict[str, Any] = {}
        self.updates: list[tuple[str, str]] = []

    def check_queue(self) -> None:
        """There is always room."""

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        text = prompt.messages[0]["content"] if isinstance(prompt, ChatPrompt) else prompt
        assert isinstance(text, str) and self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens)

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
        texts: dict[int, str] = {}
        ids: dict[int, list[int]] = {}
        events = self.stream_events(
            prompt, params, request_id=request_id, queue_timeout_s=queue_timeout_s
        )
        async for event in events:
            if isinstance(event, Accepted) and on_accepted is not None:
                await on_accepted()
            if isinstance(event, Delta):
                texts[event.index] = texts.get(event.index, "") + event.text
                ids.setdefault(event.index, []).extend(event.token_ids)
        seed = params.seed if params and params.seed is not None else 99
        completions = [
            Completion(
                index=index,
                text=texts[index] if return_text else "",
                token_ids=ids[index],
                finish_reason=self.finish_reason,
                matched_stop=self.matched_stop,
                seed=sequence_seed(seed, index),
            )
            for index in sorted(texts)
        ]
        return RequestOutput(request_id or "", [1, 2, 3], completions, USAGE, TIMING)

    async def stream_events(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[StreamEvent]:
        self.options = options
        self.calls.append((prompt, params, request_id))
        if self.error is not None and self.error_after is None:
            raise self.error
        assert request_id is not None
        self.running.add(request_id)
        try:
            seed = params.seed if params and params.seed is not None else 99
            yield Accepted(request_id, [1, 2, 3], seed)
            yield Started(cached_prompt_tokens=1)
            for position, text in enumerate(self.texts):
                if position == self.error_after and self.error is not None:
                    raise self.error
                if position:
                    await self.hold.wait()
                is_last = position == len(self.texts) - 1
                for index in range((params and params.n) or 1):
                    yield Delta(
                        index=index,
                        text=text,
                        token_ids=[10 + position],
                        finish_reason=self.finish_reason if is_last else None,
                        matched_stop=self.matched_stop if is_last else None,
                    )
            yield Finished(USAGE, TIMING)
        finally:
            self.running.remove(request_id)
            self.ended.append(request_id)

    async def abort(self, request_ids: list[str]) -> list[str]:
        return [request_id for request_id in request_ids if request_id in self.running]

    async def stats(self) -> EngineStats:
        return STATS

    async def block_states(self) -> list[BlockState]:
        return BLOCKS

    async def reset_prefix_cache(self) -> int:
        return 3

    async def update_weights(self, checkpoint_path: str, weights_version: str) -> None:
        self.updates.append((checkpoint_path, weights_version))

    def close(self) -> None:
        self.closed = True
