"""The gRPC client with coroutines. Import it from `jaxpaged.client`."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self

from jaxpaged.client_calls import (
    detokenize_request,
    need_admin,
    own_errors,
    tokenize_request,
)
from jaxpaged.client_channel import open_async_channel
from jaxpaged.connection import Connection
from jaxpaged.convert import request_to_proto
from jaxpaged.convert_outputs import (
    blocks_from_proto,
    event_from_proto,
    info_from_proto,
    output_from_proto,
    stats_from_proto,
)
from jaxpaged.outputs import BlockState, Delta, EngineStats, ModelInfo, RequestOutput, StreamEvent
from jaxpaged.prompts import check_deltas_only
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams
from jaxpaged.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from jaxpaged.v1 import inference_pb2 as pb


class AsyncRemoteTokenizer:
    """`RemoteTokenizer` with coroutines."""

    def __init__(
        self, stub: inference_pb2_grpc.InferenceServiceStub, options: dict[str, Any]
    ) -> None:
        self._stub: Any = stub
        self._options = options

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with own_errors():
            request = tokenize_request(text, add_special_tokens)
            response = await self._stub.Tokenize(request, **self._options)
        return list(response.token_ids)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        request = detokenize_request(token_ids, skip_special_tokens)
        with own_errors():
            response = await self._stub.Detokenize(request, **self._options)
        return response.text


class AsyncClient:
    """The same calls as coroutines and async iterators, inside one event loop."""

    def __init__(self, address: str, admin_address: str | None = None, **options: Any) -> None:
        connection = Connection(**options)
        self._options = connection.call_options
        self._channel = open_async_channel(address, connection)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin_channel = None
        self._admin_stub: Any = None
        if admin_address is not None:
            self._admin_channel = open_async_channel(admin_address, connection)
            self._admin_stub = admin_pb2_grpc.AdminServiceStub(self._admin_channel)
        self.tokenizer = AsyncRemoteTokenizer(self._stub, self._options)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """One prompt, as `AsyncLLM.generate`; gather several for a batch."""
        with own_errors():
            request = request_to_proto(prompt, params, request_id)
            return output_from_proto(await self._stub.Generate(request, **self._options))

    async def stream_events(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[StreamEvent]:
        """Closing the generator cancels the request."""
        request = pb.StreamRequest(request=request_to_proto(prompt, params, request_id))
        call = self._stub.Stream(request, **self._options)
        try:
            with own_errors():
                async for response in call:
                    event = event_from_proto(response)
                    if event is not None:
                        yield event
        finally:
            call.cancel()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta]:
        """The deltas of `stream_events` alone."""
        check_deltas_only(params)
        async with aclosing(self.stream_events(prompt, params)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answers a conversation; `options` are the other fields of `ChatPrompt`."""
        return await self.generate(ChatPrompt(messages, **options), params)

    async def model_info(self) -> ModelInfo:
        with own_errors():
            request = pb.GetModelInfoRequest()
            return info_from_proto(await self._stub.GetModelInfo(request, **self._options))

    async def stats(self) -> EngineStats:
        admin = need_admin(self._admin_stub)
        with own_errors():
            response = await admin.GetStats(admin_pb2.GetStatsRequest(), **self._options)
        return stats_from_proto(response.stats, (await self.model_info()).block_size)

    async def block_states(self) -> list[BlockState]:
        """The pool's blocks by id."""
        admin = need_admin(self._admin_stub)
        with own_errors():
            response = await admin.GetStats(
                admin_pb2.GetStatsRequest(include_blocks=True), **self._options
            )
        return blocks_from_proto(response.blocks)

    async def reset_prefix_cache(self) -> int:
        """The number of cached blocks that were forgotten."""
        admin = need_admin(self._admin_stub)
        with own_errors():
            request = admin_pb2.ResetPrefixCacheRequest()
            response = await admin.ResetPrefixCache(request, **self._options)
        return response.forgotten_blocks

    async def close(self) -> None:
        await self._channel.close()
        if self._admin_channel is not None:
            await self._admin_channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
