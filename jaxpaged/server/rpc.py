"""Turns a service object into gRPC handlers: parsing, errors as statuses, streams that close.

The object has one method per RPC, named as in the proto file: `async (request, call) -> response`,
or an async generator of responses. A method raises errors; it never meets a status code.

Every call leaves one line in the log: its id, its W3C `traceparent` and how it ended; no prompts.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxpaged.server import grpc_errors
from jaxpaged.server.parsing import Refused, parse_request
from jaxpaged.validation import check_request_id

_logger = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

OnFailed = Callable[[str], None]


@dataclass(slots=True)
class Call:
    """One RPC. `request_id` is made here and replaced when the client chose one."""

    context: grpc.aio.ServicerContext
    method: str
    on_failed: OnFailed
    request_id: str = field(default_factory=lambda: check_request_id(None))
    start_s: float = field(default_factory=time.monotonic)

    async def fail(self, error: Exception) -> None:
        """Ends the call with the status of `error`."""
        reason = grpc_errors.reason_of(error)
        self.log(reason)
        self.on_failed(reason)
        await grpc_errors.abort(self.context, error, self.request_id)

    def log(self, ending: str) -> None:
        _logger.info(
            "%s request_id=%r traceparent=%s ended=%s seconds=%.3f",
            self.method,
            self.request_id,
            self._traceparent(),
            ending,
            time.monotonic() - self.start_s,
        )

    def _traceparent(self) -> str:
        for key, value in self.context.invocation_metadata() or ():
            if key == "traceparent" and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
                return value
        return "-"


UnaryMethod = Callable[[Message, Call], Awaitable[Message]]
StreamMethod = Callable[[Message, Call], AsyncGenerator[Message]]


def service_handler(
    service: ServiceDescriptor, servicer: object, on_failed: OnFailed
) -> grpc.GenericRpcHandler:
    """Handlers for every RPC of `service`, answered by the methods of `servicer`.

    Args:
      on_failed: told the reason of every call that ends with an error.
    """
    handlers = {}
    for method in service.methods:
        parse = partial(parse_request, GetMessageClass(method.input_type))
        function = getattr(servicer, method.name)
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _stream(function, method.name, on_failed), parse, _serialize
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _unary(function, method.name, on_failed), parse, _serialize
            )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _checked(request: Message | Refused) -> Message:
    if isinstance(request, Refused):
        raise request.error
    return request


def _unary(method: UnaryMethod, name: str, on_failed: OnFailed) -> Callable:
    async def answer(
        request: Message | Refused, context: grpc.aio.ServicerContext
    ) -> Message | None:
        call = Call(context, name, on_failed)
        try:
            response = await method(_checked(request), call)
        except asyncio.CancelledError:
            call.log("CANCELLED")
            raise
        except Exception as error:
            return await call.fail(error)
        call.log("OK")
        return response

    return answer


def _stream(method: StreamMethod, name: str, on_failed: OnFailed) -> Callable:
    async def answer(request: Message | Refused, context: grpc.aio.ServicerContext) -> None:
        call = Call(context, name, on_failed)
        try:
            # Written here rather than yielded to gRPC, which would leave the generator of a
            # cancelled call, and so its request, to the garbage collector.
            async with aclosing(method(_checked(request), call)) as messages:
                async for message in messages:
                    await context.write(message)
        except asyncio.CancelledError:
            call.log("CANCELLED")
            raise
        except Exception as error:
            await call.fail(error)
        else:
            call.log("OK")

    return answer
