"""Errors <-> gRPC statuses, in both directions, from the one table of the wire contract."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from jaxpaged import errors

_DOMAIN = "jaxpaged"
# All metadata of a call must stay below 8 KiB, and the message is in it up to three times.
_MAX_MESSAGE_BYTES = 1000
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Row:
    """One reason: its code, the error that a client raises for it, and when to try again."""

    code: grpc.StatusCode
    error: type[errors.JaxpagedError]
    retry_after_s: float | None = None
    pushback: bool = False


_TABLE = {
    "INVALID_FIELD": _Row(grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidFieldError),
    "CONTEXT_TOO_LONG": _Row(grpc.StatusCode.INVALID_ARGUMENT, errors.ContextTooLongError),
    "UNSUPPORTED_OPTION": _Row(grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedOptionError),
    "MODEL_NOT_FOUND": _Row(grpc.StatusCode.NOT_FOUND, errors.ModelNotFoundError),
    "DUPLICATE_REQUEST_ID": _Row(grpc.StatusCode.ALREADY_EXISTS, errors.DuplicateRequestIdError),
    "QUEUE_FULL": _Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QueueFullError, retry_after_s=1, pushback=True
    ),
    "QUEUE_TIMEOUT": _Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.QueueTimeoutError,
        retry_after_s=1,
        pushback=True,
    ),
    "SLOW_READER": _Row(grpc.StatusCode.RESOURCE_EXHAUSTED, errors.SlowReaderError),
    "SERVER_DRAINING": _Row(
        grpc.StatusCode.UNAVAILABLE, errors.ServerDrainingError, retry_after_s=1
    ),
    "ENGINE_RESTARTING": _Row(
        grpc.StatusCode.UNAVAILABLE, errors.EngineRestartingError, retry_after_s=5
    ),
    "NOT_READY": _Row(grpc.StatusCode.UNAVAILABLE, errors.EngineClosedError, retry_after_s=1),
    "ABORTED_BY_OPERATOR": _Row(grpc.StatusCode.ABORTED, errors.RequestCancelledError),
    "WEIGHTS_CHANGED": _Row(grpc.StatusCode.ABORTED, errors.WeightsChangedError),
    "BAD_TOKEN": _Row(grpc.StatusCode.UNAUTHENTICATED, errors.BadTokenError),
    "ADMIN_ONLY": _Row(grpc.StatusCode.PERMISSION_DENIED, errors.AdminOnlyError),
    "NON_FINITE_LOGITS": _Row(grpc.StatusCode.INTERNAL, errors.NonFiniteLogitsError),
    "BUG": _Row(grpc.StatusCode.INTERNAL, errors.JaxpagedError),
}


# --- server ------------------------------------------------------------------------------------


def status_of(error: Exception, request_id: str) -> tuple[grpc.StatusCode, Status]:
    """The status that tells a client about `error`; faults of ours tell only the request id."""
    reason = reason_of(error)
    row = _TABLE[reason]
    message = str(error).encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    if row.code is grpc.StatusCode.INTERNAL:
        _logger.error("request %s failed", request_id, exc_info=error)
        message = f"{reason}: the server could not finish {request_id=}"
    metadata = {"request_id": request_id}
    if isinstance(error, errors.InvalidFieldError | errors.UnsupportedOptionError):
        metadata["field"] = error.field
    details: list[Message] = [ErrorInfo(reason=reason, domain=_DOMAIN, metadata=metadata)]
    if isinstance(error, errors.InvalidFieldError) and reason == "INVALID_FIELD":
        violation = BadRequest.FieldViolation(field=error.field, description=message)
        details.append(BadRequest(field_violations=[violation]))
    if row.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(row.retry_after_s * 1000))
        details.append(RetryInfo(retry_delay=delay))
    status = Status(code=row.code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return row.code, status


async def abort(context: grpc.aio.ServicerContext, error: Exception, request_id: str) -> None:
    """Ends the call with the status of `error`; raises grpc.aio.AbortError, always."""
    code, status = status_of(error, request_id)
    trailing: list[tuple[str, str | bytes]] = [(_DETAILS_KEY, status.SerializeToString())]
    row = _TABLE[reason_of(error)]
    if row.pushback and row.retry_after_s is not None:
        trailing.append((_PUSHBACK_KEY, str(round(row.retry_after_s * 1000))))
    await context.abort(code, status.message, tuple(trailing))


def reason_of(error: Exception) -> str:
    """The word of the table for an error; every error has one."""
    return error.reason if isinstance(error, errors.JaxpagedError) else "BUG"


# --- client ------------------------------------------------------------------------------------


def error_from_rpc(rpc_error: grpc.RpcError) -> Exception:
    """The error of jaxpaged/errors.py that the server meant, else `rpc_error` itself."""
    info = _error_info(rpc_error.trailing_metadata() or ())  # type: ignore[attr-defined]
    row = _TABLE.get(info.reason) if info is not None else None
    if info is None or row is None:
        return rpc_error
    message = rpc_error.details() or ""  # type: ignore[attr-defined]
    if issubclass(row.error, errors.InvalidFieldError | errors.UnsupportedOptionError):
        return row.error(info.metadata["field"], message)
    return row.error(message)


def _error_info(metadata: Sequence[tuple[str, str | bytes]]) -> ErrorInfo | None:
    for key, value in metadata:
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            details: Sequence[Any] = Status.FromString(value).details
        except DecodeError:  # a proxy's own bytes: the status code still tells something
            return None
        for detail in details:
            info = ErrorInfo()
            if detail.Unpack(info) and info.domain == _DOMAIN:
                return info
    return None
