"""InferenceService: each RPC is one call of the front."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import Message

import jaxpaged
from jaxpaged.convert import duration_from_proto, params_from_proto, prompt_from_proto
from jaxpaged.convert_outputs import event_to_proto, info_to_proto, output_to_proto, wants
from jaxpaged.errors import (
    InvalidFieldError,
    ModelNotFoundError,
    UnsupportedOptionError,
)
from jaxpaged.outputs import Accepted
from jaxpaged.sampling_params import MAX_LOGPROBS, MAX_N, Prompt, SamplingParams
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.request_size import check_prompt_size, check_size
from jaxpaged.server.rpc import Call
from jaxpaged.server.serving_state import ServingState
from jaxpaged.v1 import inference_pb2 as pb
from jaxpaged.validation import check_request_id

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.text.tokenizer import Tokenizer


_MIN_HEARTBEAT_S = 0.01
_LARGE_BYTES = 2**18
_REQUEST_ID_KEY = "jaxpaged-request-id"


class InferenceService:
    """Methods named and ordered as in inference.proto; `rpc.py` makes handlers of them."""

    def __init__(self, state: ServingState, config: ServerConfig) -> None:
        self._state = state
        self._config = config
        self._started_at = datetime.now(UTC)

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        llm, prompt, params = await self._take(request, call)
        output = await llm.generate(
            prompt,
            params,
            request_id=call.request_id,
            return_text=wants(request.output, "text"),
            queue_timeout_s=_seconds(request, "queue_timeout"),
            on_accepted=partial(self._tell_accepted, call),
        )
        return output_to_proto(output, llm.info, request.output)

    async def Stream(
        self, request: pb.StreamRequest, call: Call
    ) -> AsyncGenerator[pb.StreamResponse]:
        source = request.request
        llm, prompt, params = await self._take(source, call)
        events = llm.stream_events(
            prompt,
            params,
            request_id=call.request_id,
            queue_timeout_s=_seconds(source, "queue_timeout"),
            heartbeat_s=_seconds(request.options, "heartbeat_interval", _MIN_HEARTBEAT_S),
            min_tokens_per_delta=self._min_tokens(request.options, params.n or 1),
            max_pending_tokens=self._config.max_pending_tokens,
        )
        message_index = 0
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Accepted):
                    await self._tell_accepted(call)
                message = event_to_proto(event, llm.info, source.output)
                if message is None:
                    continue
                message.message_index = message_index
                message_index += 1
                yield message

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        llm = self._loaded(request.model)
        check_prompt_size(request, llm.info)
        tokenizer = _tokenizer(llm)
        add_special_tokens = (
            request.add_special_tokens if request.HasField("add_special_tokens") else True
        )
        prompt = await _read(prompt_from_proto, request)
        token_ids = await llm.tokenize(prompt, add_special_tokens=add_special_tokens)
        return pb.TokenizeResponse(
            token_ids=token_ids, token_bytes=[tokenizer.token_bytes(id_) for id_ in token_ids]
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        llm = self._loaded(request.model)
        tokenizer = _tokenizer(llm)
        limit = llm.info.max_model_len
        if len(request.token_ids) > limit:
            raise InvalidFieldError(
                "token_ids", f"{len(request.token_ids)} token_ids: at most {limit} at once"
            )
        for token_id in request.token_ids:
            if token_id >= llm.info.vocab_size:
                raise InvalidFieldError(
                    "token_ids", f"{token_id=} must be below vocab_size={llm.info.vocab_size}"
                )
        skip_special_tokens = (
            request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        )
        text = tokenizer.decode(list(request.token_ids), skip_special_tokens=skip_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, call: Call
    ) -> pb.GetModelInfoResponse:
        response = info_to_proto(self._loaded(request.model).info)
        response.server_version = jaxpaged.__version__
        response.started_at.FromDatetime(self._started_at)
        response.max_n = MAX_N
        response.max_logprobs = MAX_LOGPROBS
        response.max_request_bytes = self._config.max_request_bytes
        return response

    async def _take(
        self, request: pb.GenerateRequest, call: Call
    ) -> tuple["AsyncLLM", Prompt, SamplingParams]:
        """The model, and what it is asked for."""
        llm = self._admit(request, call)
        prompt, params = await _read(_prompt_and_params, request)
        self._state.admit()  # again: a large request took its time, and a drain may have begun
        return llm, prompt, params

    def _admit(self, request: pb.GenerateRequest, call: Call) -> "AsyncLLM":
        """Checks what only the wire has, and settles the request id."""
        call.request_id = check_request_id(request.request_id)
        self._state.admit().check_queue()  # before any work: a refusal must cost next to nothing
        llm = self._loaded(request.model)
        check_size(request, llm.info)
        return llm

    async def _tell_accepted(self, call: Call) -> None:
        """Initial metadata: the client knows before any token that the request is queued."""
        await call.context.send_initial_metadata(((_REQUEST_ID_KEY, call.request_id),))

    def _min_tokens(self, options: pb.StreamOptions, n: int) -> int:
        """Pending tokens of n sequences must never pass for those of a slow reader."""
        value, limit = options.min_tokens_per_message, self._config.max_pending_tokens // n
        if value > limit:
            raise InvalidFieldError(
                "min_tokens_per_message",
                f"min_tokens_per_message={value} must be at most {limit} (max_pending_tokens / n)",
            )
        return value

    def _loaded(self, model: str) -> "AsyncLLM":
        llm = self._state.get()
        if model not in ("", llm.info.model):
            raise ModelNotFoundError(f"{model=} is not loaded; this server has {llm.info.model!r}")
        return llm


def _prompt_and_params(request: pb.GenerateRequest) -> tuple[Prompt, SamplingParams]:
    return prompt_from_proto(request), params_from_proto(request)


async def _read[M: Message, T](convert: Callable[[M], T], message: M) -> T:
    """`convert(message)`; in a thread when it is large, for the event loop has other calls."""
    if message.ByteSize() <= _LARGE_BYTES:
        return convert(message)
    return await asyncio.to_thread(convert, message)


def _seconds(message: Message, name: str, minimum: float = 0.0) -> float | None:
    """A duration; None when it is not set."""
    if not message.HasField(name):
        return None
    seconds = duration_from_proto(getattr(message, name))
    if seconds < minimum:
        raise InvalidFieldError(name, f"{name}={seconds:g} s must be at least {minimum:g} s")
    return seconds


def _tokenizer(llm: "AsyncLLM") -> "Tokenizer":
    if llm.tokenizer is None:
        raise UnsupportedOptionError("text", "the loaded model has no tokenizer")
    return llm.tokenizer
