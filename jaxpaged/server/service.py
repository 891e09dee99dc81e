"""InferenceService: each RPC is one call of the front."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import jaxpaged
from jaxpaged.convert import params_from_proto, prompt_from_proto
from jaxpaged.convert_outputs import event_to_proto, info_to_proto, output_to_proto, wants
from jaxpaged.errors import (
    EngineClosedError,
    InvalidFieldError,
    ModelNotFoundError,
    UnsupportedOptionError,
)
from jaxpaged.outputs import Accepted
from jaxpaged.sampling_params import MAX_N
from jaxpaged.server.rpc import Call
from jaxpaged.v1 import inference_pb2 as pb
from jaxpaged.validation import check_request_id

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.text.tokenizer import Tokenizer


class LoadedModel:
    """Holds the front once it is loaded; shared by the two services."""

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None

    def set(self, llm: "AsyncLLM") -> None:
        self._llm = llm

    def get(self) -> "AsyncLLM":
        if self._llm is None:
            raise EngineClosedError("the model is still loading")
        return self._llm


class InferenceService:
    """Methods named and ordered as in inference.proto; `rpc.py` makes handlers of them."""

    def __init__(self, model: LoadedModel, max_request_bytes: int) -> None:
        self._model = model
        self._max_request_bytes = max_request_bytes
        self._started_at = datetime.now(UTC)

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        llm = self._admit(request, call)
        output = await llm.generate(
            prompt_from_proto(request),
            params_from_proto(request),
            request_id=call.request_id,
            return_text=wants(request.output, "text"),
        )
        return output_to_proto(output, llm.info, request.output)

    async def Stream(
        self, request: pb.StreamRequest, call: Call
    ) -> AsyncGenerator[pb.StreamResponse]:
        for name in ("min_tokens_per_message", "heartbeat_interval"):
            if request.options.HasField(name):
                raise UnsupportedOptionError(name, f"{name} is not supported by this build")
        source = request.request
        llm = self._admit(source, call)
        events = llm.stream_events(
            prompt_from_proto(source), params_from_proto(source), request_id=call.request_id
        )
        message_index = 0
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Accepted):
                    await call.context.send_initial_metadata(())
                message = event_to_proto(event, llm.info, source.output)
                if message is None:
                    continue
                message.message_index = message_index
                message_index += 1
                yield message

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        llm = self._loaded(request.model)
        tokenizer = _tokenizer(llm)
        add_special_tokens = (
            request.add_special_tokens if request.HasField("add_special_tokens") else True
        )
        token_ids = await llm.tokenize(
            prompt_from_proto(request), add_special_tokens=add_special_tokens
        )
        return pb.TokenizeResponse(
            token_ids=token_ids, token_bytes=[tokenizer.token_bytes(id_) for id_ in token_ids]
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        llm = self._loaded(request.model)
        tokenizer = _tokenizer(llm)
        for token_id in request.token_ids:
            if token_id >= llm.info.vocab_size:
                raise InvalidFieldError(
                    "token_ids", f"{token_id=} must be below vocab_size={llm.info.vocab_size}"
                )
        skip_special_tokens = (
            request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        )
        # In a thread: 64 MiB of ids would hold up every stream.
        text = await asyncio.to_thread(
            tokenizer.decode, list(request.token_ids), skip_special_tokens=skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, call: Call
    ) -> pb.GetModelInfoResponse:
        response = info_to_proto(self._loaded(request.model).info)
        response.server_version = jaxpaged.__version__
        response.started_at.FromDatetime(self._started_at)
        response.max_n = MAX_N
        response.max_logprobs = 0  # refused until they are honoured
        response.max_request_bytes = self._max_request_bytes
        return response

    def _admit(self, request: pb.GenerateRequest, call: Call) -> "AsyncLLM":
        """Checks what only the wire has, and settles the request id."""
        call.request_id = check_request_id(request.request_id)
        llm = self._loaded(request.model)
        if request.HasField("queue_timeout"):
            raise UnsupportedOptionError(
                "queue_timeout", "queue_timeout is not supported by this build"
            )
        return llm

    def _loaded(self, model: str) -> "AsyncLLM":
        llm = self._model.get()
        if model not in ("", llm.info.model):
            raise ModelNotFoundError(f"{model=} is not loaded; this server has {llm.info.model!r}")
        return llm


def _tokenizer(llm: "AsyncLLM") -> "Tokenizer":
    if llm.tokenizer is None:
        raise UnsupportedOptionError("text", "the loaded model has no tokenizer")
    return llm.tokenizer
