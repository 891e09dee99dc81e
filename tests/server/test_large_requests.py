"""Requests of very many small parts are refused by count, and hold the event loop for no walk."""

import asyncio
import threading
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from helpers.fake_async_llm import MODEL_INFO
from helpers.running_server import Running, with_server

from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.sampling_params import MAX_CHOICE_BYTES
from jaxpaged.server import parsing, service
from jaxpaged.server.parsing import Refused, parse_request
from jaxpaged.server.request_size import MAX_TEMPLATE_VALUES, check_size
from jaxpaged.v1 import admin_pb2
from jaxpaged.v1 import inference_pb2 as pb

UNKNOWN = b"\xa0\x06\x01"  # field 100, a varint
MANY = 100_000


def many_messages(count: int = MANY) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat={"messages": [pb.ChatMessage()] * count})


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that were searched, one by one, for unknown fields."""
    names: list[str] = []
    unknown_fields_of = parsing.UnknownFieldSet

    def look(message: Any) -> Any:
        names.append(message.DESCRIPTOR.name)
        return unknown_fields_of(message)

    monkeypatch.setattr(parsing, "UnknownFieldSet", look)
    return names


def refusal(message_class: Any, data: bytes) -> Any:
    refused = parse_request(message_class, data)
    assert isinstance(refused, Refused)
    return refused.error


def test_messages_without_unknown_fields_are_not_walked(looked_at: list[str]):
    request = many_messages()
    assert parse_request(pb.GenerateRequest, request.SerializeToString()) == request
    assert looked_at == []


def test_an_unknown_field_is_named_wherever_it_is(looked_at: list[str]):
    inner = pb.ChatMessages(messages=[pb.ChatMessage(role="a"), pb.ChatMessage.FromString(UNKNOWN)])
    source = pb.GenerateRequest(chat=inner)
    for request, name in (
        (pb.GetModelInfoRequest.FromString(UNKNOWN), "GetModelInfoRequest.100"),
        (source, "ChatMessage.100"),
        (pb.StreamRequest(request=source), "ChatMessage.100"),
    ):
        error = refusal(type(request), request.SerializeToString())
        assert isinstance(error, UnsupportedOptionError) and error.field == name
        assert str(error) == f"field number {name} is not known to this build"
    assert looked_at.count("ChatMessage") == 4


def test_many_unknown_fields_are_refused_by_their_size(looked_at: list[str]):
    error = refusal(pb.GenerateRequest, UNKNOWN * MANY)
    assert isinstance(error, UnsupportedOptionError) and error.field == "GenerateRequest"
    assert "GenerateRequest has 300000 bytes of fields that are not known" in str(error)
    assert looked_at == []


def test_the_search_for_a_number_ends(looked_at: list[str]):
    request = many_messages()
    request.chat.messages.append(pb.ChatMessage.FromString(UNKNOWN))
    error = refusal(pb.GenerateRequest, request.SerializeToString())
    assert "GenerateRequest has 3 bytes of fields that are not known" in str(error)
    assert 0 < len(looked_at) < 1000


def test_an_unknown_field_of_a_template_argument_is_refused():
    args = Struct.FromString(UNKNOWN)
    request = pb.GenerateRequest(chat={"messages": [{"role": "a"}], "template_args": args})
    error = refusal(pb.GenerateRequest, request.SerializeToString())
    assert isinstance(error, UnsupportedOptionError) and error.field == "GenerateRequest"


def with_args(**args: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(chat={"messages": [{"role": "a"}]})
    request.chat.template_args.update(args)
    return request


@pytest.mark.parametrize("shape", ["list", "mapping", "lists"])
@pytest.mark.parametrize("excess", [0, 1])
def test_values_of_template_args_are_counted(shape: str, excess: int):
    count = MAX_TEMPLATE_VALUES + excess
    args: dict[str, Any] = {
        "list": {"x": [0] * (count - 1)},
        "mapping": {f"x{i}": i for i in range(count)},
        "lists": {"x": [[0, 0]] * 10 + [[]] * (count - 31)},
    }[shape]
    request = with_args(**args)
    if not excess:
        check_size(request, MODEL_INFO)
        return
    with pytest.raises(InvalidFieldError, match=f"at most {MAX_TEMPLATE_VALUES}") as caught:
        check_size(request, MODEL_INFO)
    assert caught.value.field == "template_args"


async def invalid_field(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


def test_lists_are_counted_before_they_are_copied(monkeypatch: pytest.MonkeyPatch):
    copied: list[Any] = []
    for name in ("prompt_from_proto", "params_from_proto"):
        monkeypatch.setattr(service, name, copied.append)

    async def body(running: Running) -> None:
        generate = running.stub.Generate
        assert "at least 100000 tokens" in await invalid_field(generate(many_messages()))
        choices = {"choices": [""] * (MAX_CHOICE_BYTES + 1)}
        request = pb.GenerateRequest(text="x", sampling={"choice": choices})
        assert "constraint.choice has 65537 entries" in await invalid_field(generate(request))
        request = with_args(x=[0] * MAX_TEMPLATE_VALUES)
        assert "template_args has at least" in await invalid_field(generate(request))
        tokenize = running.stub.Tokenize(pb.TokenizeRequest(chat=request.chat))
        assert "template_args has at least" in await invalid_field(tokenize)
        abort = running.admin.Abort(admin_pb2.AbortRequest(request_ids=[""] * MANY))
        assert "100000 request_ids: at most 65536" in await invalid_field(abort)
        assert copied == [] and running.llm.calls == []

    with_server(body)


@pytest.mark.parametrize(("num_bytes", "elsewhere"), [(10, False), (2**18 + 1, True)])
def test_a_large_request_is_read_outside_the_event_loop(
    num_bytes: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
):
    read_in: list[int] = []
    had_its_turn: list[bool] = []
    prompt_from_proto = service.prompt_from_proto

    async def body(running: Running) -> None:
        loop, turn = asyncio.get_running_loop(), threading.Event()

        def read(request: Any) -> Any:
            read_in.append(threading.get_ident())
            loop.call_soon_threadsafe(turn.set)
            had_its_turn.append(turn.wait(20 if elsewhere else 0.01))
            return prompt_from_proto(request)

        monkeypatch.setattr(service, "prompt_from_proto", read)
        await running.stub.Generate(pb.GenerateRequest(text="x" * num_bytes))
        assert (read_in != [threading.get_ident()]) is elsewhere
        assert had_its_turn == [elsewhere]

    with_server(body)
