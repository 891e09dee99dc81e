"""The Python gRPC client: the calls of `LLM` and `AsyncLLM` against a server.

Arguments and results are those of the in-process engine, and errors come back as the classes of
jaxpaged/errors.py; what the server did not name stays a `grpc.RpcError`. Never loads JAX.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import grpc
import grpc.aio

from jaxpaged.convert import fill_prompt, request_to_proto
from jaxpaged.convert_outputs import (
    blocks_from_proto,
    event_from_proto,
    info_from_proto,
    output_from_proto,
    stats_from_proto,
)
from jaxpaged.errors import InvalidFieldError
from jaxpaged.outputs import (
    BlockState,
    Delta,
    EngineStats,
    ModelInfo,
    RequestOutput,
    StreamEvent,
)
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams
from jaxpaged.server.grpc_errors import error_from_rpc
from jaxpaged.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from jaxpaged.v1 import inference_pb2 as pb

# The library's default of 4 MiB is too small for long prompts and answers.
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
)


@contextmanager
def _own_errors() -> Generator[None]:
    try:
        yield
    except grpc.RpcError as rpc_error:
        error = error_from_rpc(rpc_error)
        if error is rpc_error:
            raise
        raise error from rpc_error


def _params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidFieldError("params", f"{len(params)=} must equal {num_prompts=}")
    return list(params)


def _tokenize_request(text: str, add_special_tokens: bool) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    fill_prompt(request, text)
    return request


def _detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool) -> Any:
    try:
        return pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError("token_ids", f"token_ids: {error}") from error


def _need_admin(stub: Any) -> Any:
    if stub is None:
        raise ValueError("admin_address must be given to the client for stats and resets")
    return stub


class RemoteTokenizer:
    """The server's tokenizer: what its Generate itself uses."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self._stub = stub

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with _own_errors():
            response = self._stub.Tokenize(_tokenize_request(text, add_special_tokens))
        return list(response.token_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with _own_errors():
            response = self._stub.Detokenize(_detokenize_request(token_ids, skip_special_tokens))
        return response.text


class Client:
    """Blocking calls against the server at `address` ("host:port"); a context manager."""

    def __init__(self, address: str, admin_address: str | None = None) -> None:
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin_channel = None
        self._admin_stub = None
        if admin_address is not None:
            self._admin_channel = grpc.insecure_channel(admin_address, options=_CHANNEL_OPTIONS)
            self._admin_stub = admin_pb2_grpc.AdminServiceStub(self._admin_channel)
        self.tokenizer = RemoteTokenizer(self._stub)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Sends all prompts at once; one error cancels the rest and is raised."""
        if isinstance(prompts, str | ChatPrompt):
            raise InvalidFieldError("prompts", "prompts must be a list of prompts")
        requests = [
            request_to_proto(prompt, of_prompt)
            for prompt, of_prompt in zip(
                prompts, _params_of(params, len(prompts)), strict=True
            )
        ]
        calls = [self._stub.Generate.future(request) for request in requests]
        try:
            with _own_errors():
                return [output_from_proto(call.result()) for call in calls]
        finally:
            for call in calls:
                call.cancel()  # does nothing to one that has ended

    def stream_events(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Generator[StreamEvent]:
        """Closing the generator cancels the request."""
        request = pb.StreamRequest(request=request_to_proto(prompt, params, request_id))
        call = self._stub.Stream(request)
        try:
            with _own_errors():
                for response in call:
                    event = event_from_proto(response)
                    if event is not None:
                        yield event
        finally:
            call.cancel()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta]:
        for event in self.stream_events(prompt, params):
            if isinstance(event, Delta):
                yield event

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> RequestOutput:
        return self.generate([ChatPrompt(messages)], params)[0]

    def model_info(self) -> ModelInfo:
        with _own_errors():
            return info_from_proto(self._stub.GetModelInfo(pb.GetModelInfoRequest()))

    def stats(self) -> EngineStats:
        admin = _need_admin(self._admin_stub)
        with _own_errors():
            response = admin.GetStats(admin_pb2.GetStatsRequest())
        return stats_from_proto(response.stats, self.model_info().block_size)

    def block_states(self) -> list[BlockState]:
        """The pool's blocks by id."""
        with _own_errors():
            response = _need_admin(self._admin_stub).GetStats(
                admin_pb2.GetStatsRequest(include_blocks=True)
            )
        return blocks_from_proto(response.blocks)

    def reset_prefix_cache(self) -> int:
        """The number of cached blocks that were forgotten."""
        with _own_errors():
            request = admin_pb2.ResetPrefixCacheRequest()
            return _need_admin(self._admin_stub).ResetPrefixCache(request).forgotten_blocks

    def close(self) -> None:
        self._channel.close()
        if self._admin_channel is not None:
            self._admin_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AsyncRemoteTokenizer:
    """`RemoteTokenizer` with coroutines."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self._stub: Any = stub

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with _own_errors():
            response = await self._stub.Tokenize(_tokenize_request(text, add_special_tokens))
        return list(response.token_ids)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        request = _detokenize_request(token_ids, skip_special_tokens)
        with _own_errors():
            response = await self._stub.Detokenize(request)
        return response.text


class AsyncClient:
    """The same calls as coroutines and async iterators, inside one event loop."""

    def __init__(self, address: str, admin_address: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin_channel = None
        self._admin_stub: Any = None
        if admin_address is not None:
            self._admin_channel = grpc.aio.insecure_channel(
                admin_address, options=_CHANNEL_OPTIONS
            )
            self._admin_stub = admin_pb2_grpc.AdminServiceStub(self._admin_channel)
        self.tokenizer = AsyncRemoteTokenizer(self._stub)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """One prompt, as `AsyncLLM.generate`; gather several for a batch."""
        with _own_errors():
            request = request_to_proto(prompt, params, request_id)
            return output_from_proto(await self._stub.Generate(request))

    async def stream_events(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[StreamEvent]:
        """Closing the generator cancels the request."""
        request = pb.StreamRequest(request=request_to_proto(prompt, params, request_id))
        call = self._stub.Stream(request)
        try:
            with _own_errors():
                async for response in call:
                    event = event_from_proto(response)
                    if event is not None:
                        yield event
        finally:
            call.cancel()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta]:
        async with contextlib.aclosing(self.stream_events(prompt, params)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event
