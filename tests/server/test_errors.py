"""Every error of the table that exists, as the client sees it; nothing ends as UNKNOWN."""

import random

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from helpers.running_server import Running, with_server

from jaxpaged import errors
from jaxpaged.request import FinishReason
from jaxpaged.server.grpc_errors import error_from_rpc, status_of
from jaxpaged.v1 import admin_pb2
from jaxpaged.v1 import inference_pb2 as pb

CODE = grpc.StatusCode
RAISED = [
    (errors.InvalidFieldError("top_p", "top_p=0"), CODE.INVALID_ARGUMENT, "INVALID_FIELD"),
    (errors.ContextTooLongError("prompt", "long"), CODE.INVALID_ARGUMENT, "CONTEXT_TOO_LONG"),
    (errors.UnsupportedOptionError("logprobs", "no"), CODE.UNIMPLEMENTED, "UNSUPPORTED_OPTION"),
    (errors.ModelNotFoundError("model='x'"), CODE.NOT_FOUND, "MODEL_NOT_FOUND"),
    (errors.DuplicateRequestIdError("twice"), CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    (errors.QueueFullError("1024 wait"), CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (errors.EngineClosedError("closed"), CODE.UNAVAILABLE, "NOT_READY"),
    (errors.RequestCancelledError("aborted"), CODE.ABORTED, "ABORTED_BY_OPERATOR"),
    (errors.QueueTimeoutError("1 s"), CODE.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT"),
    (errors.SlowReaderError("behind"), CODE.RESOURCE_EXHAUSTED, "SLOW_READER"),
    (errors.ServerDrainingError("drains"), CODE.UNAVAILABLE, "SERVER_DRAINING"),
    (errors.EngineRestartingError("died"), CODE.UNAVAILABLE, "ENGINE_RESTARTING"),
    (errors.WeightsChangedError("other"), CODE.ABORTED, "WEIGHTS_CHANGED"),
    (errors.BadTokenError("who"), CODE.UNAUTHENTICATED, "BAD_TOKEN"),
    (errors.AdminOnlyError("no"), CODE.PERMISSION_DENIED, "ADMIN_ONLY"),
    (errors.NonFiniteLogitsError("secret"), CODE.INTERNAL, "NON_FINITE_LOGITS"),
    (errors.EngineFailedError("secret"), CODE.INTERNAL, "BUG"),
    (KeyError("secret"), CODE.INTERNAL, "BUG"),
]


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


def details(error: grpc.aio.AioRpcError) -> tuple[ErrorInfo, dict[str, str]]:
    """The ErrorInfo, and every other detail by its type's name."""
    metadata = dict(error.trailing_metadata() or ())
    found: dict[str, str] = {
        key: value for key, value in metadata.items() if isinstance(value, str)
    }
    info = ErrorInfo()
    raw = metadata["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    status = Status.FromString(raw)
    assert status.code == error.code().value[0] and status.message == error.details()
    for detail in status.details:
        for kind in (BadRequest(), RetryInfo()):
            if detail.Unpack(kind):
                found[type(kind).__name__] = str(kind)
        detail.Unpack(info)
    assert info.domain == "jaxpaged"
    return info, found


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("raised", "code", "reason"), RAISED)
def test_raised_error_becomes_its_status(raised, code, reason, is_stream: bool):
    async def body(running: Running) -> None:
        running.llm.error = raised
        request = pb.GenerateRequest(request_id="id-7", text="x")
        if is_stream:
            running.llm.error_after = 2
            error = await failure(running.stub.Stream(pb.StreamRequest(request=request)))
        else:
            error = await failure(running.stub.Generate(request))
        assert error.code() is code
        info, found = details(error)
        assert info.reason == reason and info.metadata["request_id"] == "id-7"
        assert info.metadata.get("field", "") == getattr(raised, "field", "")
        assert ("BadRequest" in found) == (reason == "INVALID_FIELD")
        can_retry = code in (CODE.RESOURCE_EXHAUSTED, CODE.UNAVAILABLE) and reason != "SLOW_READER"
        assert ("RetryInfo" in found) == can_retry
        has_pushback = can_retry and code is CODE.RESOURCE_EXHAUSTED
        assert ("grpc-retry-pushback-ms" in found) == has_pushback
        message = error.details() or ""
        if code is CODE.INTERNAL:
            assert "secret" not in message and "id-7" in message and "Traceback" not in message
        else:
            assert message == str(raised)
        back = error_from_rpc(error)
        expected = errors.JaxpagedError if reason == "BUG" else type(raised)
        assert type(back) is expected and str(back) == message

    with_server(body)


def test_every_error_class_is_in_the_table():
    classes = [errors.JaxpagedError]
    for error_class in classes:
        classes.extend(error_class.__subclasses__())
    for error_class in classes:
        has_field = issubclass(
            error_class, errors.InvalidFieldError | errors.UnsupportedOptionError
        )
        code, _ = status_of(error_class("f", "m") if has_field else error_class("m"), "id")
        assert (code is CODE.INTERNAL) == (error_class.reason in ("BUG", "NON_FINITE_LOGITS"))


@pytest.mark.parametrize(
    ("request_fields", "code", "field"),
    [
        ({}, CODE.INVALID_ARGUMENT, "prompt"),
        ({"text": "x", "model": "other"}, CODE.NOT_FOUND, ""),
        ({"text": "x", "queue_timeout": {"seconds": -1}}, CODE.INVALID_ARGUMENT, "queue_timeout"),
        ({"text": "x", "request_id": "i" * 257}, CODE.INVALID_ARGUMENT, "request_id"),
        ({"text": "x", "model": "안" * 10**6}, CODE.NOT_FOUND, ""),
    ],
)
def test_requests_refused_by_the_service(request_fields, code, field: str):
    async def body(running: Running) -> None:
        request = pb.GenerateRequest(**request_fields)
        for call in (
            running.stub.Generate(request),
            running.stub.Stream(pb.StreamRequest(request=request)),
        ):
            error = await failure(call)
            assert error.code() is code
            assert details(error)[0].metadata.get("field", "") == field
        assert running.llm.calls == []

    with_server(body)


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_tokens_per_message", 2049), ("heartbeat_interval", {"nanos": 1000})],
)
def test_stream_options_out_of_range_are_refused_by_name(name: str, value):
    async def body(running: Running) -> None:
        source = pb.GenerateRequest(text="x", sampling={"n": 2})
        request = pb.StreamRequest(request=source, options={name: value})
        error = await failure(running.stub.Stream(request))
        assert error.code() is CODE.INVALID_ARGUMENT
        assert details(error)[0].metadata["field"] == name

    with_server(body)


def test_endings_that_are_statuses_on_the_wire():
    async def body(running: Running) -> None:
        for reason, code in (
            (FinishReason.CANCELLED, CODE.ABORTED),
            (FinishReason.ERROR, CODE.INTERNAL),
        ):
            running.llm.finish_reason = reason
            request = pb.GenerateRequest(text="x")
            assert (await failure(running.stub.Generate(request))).code() is code
            stream = running.stub.Stream(pb.StreamRequest(request=request))
            assert (await failure(stream)).code() is code
        assert running.llm.running == set()

    with_server(body)


def test_detokenize_refuses_ids_outside_the_vocabulary_and_models_without_tokenizer():
    async def body(running: Running) -> None:
        error = await failure(running.stub.Detokenize(pb.DetokenizeRequest(token_ids=[300])))
        assert error.code() is CODE.INVALID_ARGUMENT and "vocab_size=300" in (error.details() or "")
        running.llm.tokenizer = None
        error = await failure(running.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])))
        assert error.code() is CODE.UNIMPLEMENTED
        error = await failure(running.stub.Tokenize(pb.TokenizeRequest(text="x")))
        assert error.code() is CODE.UNIMPLEMENTED

    with_server(body)


def test_unknown_fields_are_refused_not_dropped():
    async def body(running: Running) -> None:
        # Field 15 of SamplingParams, varint 1: kept for structured output.
        sampling = pb.SamplingParams.FromString(b"\x78\x01")
        error = await failure(
            running.stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))
        )
        assert error.code() is CODE.UNIMPLEMENTED
        assert details(error)[0].metadata["field"] == "SamplingParams.15"
        assert running.llm.calls == []

    with_server(body)


def test_bytes_that_do_not_parse_are_an_invalid_argument():
    async def body(running: Running) -> None:
        for method, call in _raw_calls(running).items():
            error = await failure(call(b"\xff\xff\xff"))
            assert error.code() is CODE.INVALID_ARGUMENT, method
            assert details(error)[0].reason == "INVALID_FIELD"

    with_server(body)


def test_random_bytes_never_end_as_unknown_or_internal():
    rng = random.Random(0)
    valid = pb.GenerateRequest(
        text="hi", sampling={"top_p": 0.5, "n": 2}, stop={"stop": ["a"]}, output={"logprobs": 2}
    ).SerializeToString()

    def mutated() -> bytes:
        if rng.random() < 0.5:
            return rng.randbytes(rng.randrange(24))
        data = bytearray(valid)
        data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)

    async def body(running: Running) -> None:
        seen = set()
        calls = _raw_calls(running)
        del calls["/jaxpaged.v1.AdminService/WatchStats"]  # never ends when it is accepted
        del calls["/jaxpaged.v1.AdminService/Drain"]  # nothing is accepted after it
        for method, call in calls.items():
            for _ in range(60):
                data = mutated()
                try:
                    started = call(data)
                    if hasattr(started, "read"):
                        async for _ in started:
                            pass
                    else:
                        await started
                except grpc.aio.AioRpcError as error:
                    assert error.code() not in (CODE.UNKNOWN, CODE.INTERNAL), (method, data)
                    seen.add(error.code())
        assert {CODE.INVALID_ARGUMENT, CODE.UNIMPLEMENTED} <= seen
        await running.stub.Generate(pb.GenerateRequest(text="still serving"))

    with_server(body)


def _raw_calls(running: Running) -> dict:
    """Every RPC of the two services, sending bytes as they are."""
    calls = {}
    for module, channel in ((pb, running.channel), (admin_pb2, running.admin_channel)):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                make = channel.unary_stream if method.server_streaming else channel.unary_unary
                calls[path] = make(path)
    return calls
