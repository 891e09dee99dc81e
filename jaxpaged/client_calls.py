"""What the blocking and the asynchronous client share: requests and errors."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from jaxpaged.convert import fill_prompt
from jaxpaged.errors import InvalidFieldError
from jaxpaged.server.grpc_errors import error_from_rpc
from jaxpaged.v1 import inference_pb2 as pb


@contextmanager
def own_errors() -> Generator[None]:
    try:
        yield
    except grpc.RpcError as rpc_error:
        error = error_from_rpc(rpc_error)
        if error is rpc_error:
            raise
        raise error from rpc_error


def tokenize_request(text: str, add_special_tokens: bool) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    fill_prompt(request, text)
    return request


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    try:
        return pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError("token_ids", f"token_ids: {error}") from error


def need_admin(stub: Any) -> Any:
    if stub is None:
        raise ValueError("admin_address must be given to the client for stats and resets")
    return stub
