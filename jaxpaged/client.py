"""The Python gRPC client: the calls of `LLM` and `AsyncLLM` against a server.

Arguments and results are those of the in-process engine, and errors come back as the classes of
jaxpaged/errors.py; what the server did not name stays a `grpc.RpcError`. Never loads JAX.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self

from jaxpaged.async_client import AsyncClient
from jaxpaged.client_calls import (
    detokenize_request,
    need_admin,
    own_errors,
    tokenize_request,
)
from jaxpaged.client_channel import open_channel
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
from jaxpaged.prompts import as_list, check_deltas_only, params_of
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams
from jaxpaged.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from jaxpaged.v1 import inference_pb2 as pb

__all__ = ["AsyncClient", "Client"]


class RemoteTokenizer:
    """The server's tokenizer: what its Generate itself uses."""

    def __init__(
        self, stub: inference_pb2_grpc.InferenceServiceStub, options: dict[str, Any]
    ) -> None:
        self._stub = stub
        self._options = options

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with own_errors():
            response = self._stub.Tokenize(
                tokenize_request(text, add_special_tokens), **self._options
            )
        return list(response.token_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with own_errors():
            request = detokenize_request(token_ids, skip_special_tokens)
            response = self._stub.Detokenize(request, **self._options)
        return response.text


class Client:
    """Blocking calls against the server at `address` ("host:port"); a context manager.

    Args:
      admin_address: for `stats`, `block_states` and `reset_prefix_cache`.
      options: the fields of `connection.Connection`: TLS, token, deadline, retries.
    """

    def __init__(self, address: str, admin_address: str | None = None, **options: Any) -> None:
        connection = Connection(**options)
        self._options = connection.call_options
        self._channel = open_channel(address, connection)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin_channel = None
        self._admin_stub = None
        if admin_address is not None:
            self._admin_channel = open_channel(admin_address, connection)
            self._admin_stub = admin_pb2_grpc.AdminServiceStub(self._admin_channel)
        self.tokenizer = RemoteTokenizer(self._stub, self._options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Sends all prompts at once; one error cancels the rest and is raised."""
        items = as_list(prompts)
        requests = [
            request_to_proto(prompt, of_prompt)
            for prompt, of_prompt in zip(items, params_of(params, len(items)), strict=True)
        ]
        calls = [self._stub.Generate.future(request, **self._options) for request in requests]
        try:
            with own_errors():
                return [output_from_proto(call.result()) for call in calls]
        finally:
            for call in calls:
                call.cancel()  # does nothing to one that has ended

    def stream_events(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Generator[StreamEvent]:
        """Closing the generator cancels the request."""
        request = pb.StreamRequest(request=request_to_proto(prompt, params, request_id))
        call = self._stub.Stream(request, **self._options)
        try:
            with own_errors():
                for response in call:
                    event = event_from_proto(response)
                    if event is not None:
                        yield event
        finally:
            call.cancel()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta]:
        """The deltas of `stream_events` alone."""
        check_deltas_only(params)
        with closing(self.stream_events(prompt, params)) as events:
            for event in events:
                if isinstance(event, Delta):
                    yield event

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answers a conversation; `options` are the other fields of `ChatPrompt`."""
        return self.generate([ChatPrompt(messages, **options)], params)[0]

    def model_info(self) -> ModelInfo:
        with own_errors():
            request = pb.GetModelInfoRequest()
            return info_from_proto(self._stub.GetModelInfo(request, **self._options))

    def stats(self) -> EngineStats:
        admin = need_admin(self._admin_stub)
        with own_errors():
            response = admin.GetStats(admin_pb2.GetStatsRequest(), **self._options)
        return stats_from_proto(response.stats, self.model_info().block_size)

    def block_states(self) -> list[BlockState]:
        """The pool's blocks by id."""
        with own_errors():
            response = need_admin(self._admin_stub).GetStats(
                admin_pb2.GetStatsRequest(include_blocks=True), **self._options
            )
        return blocks_from_proto(response.blocks)

    def reset_prefix_cache(self) -> int:
        """The number of cached blocks that were forgotten."""
        with own_errors():
            request = admin_pb2.ResetPrefixCacheRequest()
            admin = need_admin(self._admin_stub)
            return admin.ResetPrefixCache(request, **self._options).forgotten_blocks

    def close(self) -> None:
        self._channel.close()
        if self._admin_channel is not None:
            self._admin_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
