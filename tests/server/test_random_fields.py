"""Requests whose every field may hold anything, before a real front: refused or answered."""

import random
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from helpers.running_service import Service, ask, run_service
from helpers.served_engines import solo_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.v1 import inference_pb2 as pb

CODE = grpc.StatusCode
FLOATS = [0.0, 1.0, 0.5, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3.4e38]
TEXTS = ["", "a", "\0", "안녕", "x" * 300, "{", "(", "[a-z]+", '{"type":"string"}', "{{ 7 * 7 }}"]
VALUES: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, 3, 65, 100, 260, 640, 2**31, 2**32 - 1],
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [0, 1, -1, 315_576_000_000, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_FLOAT: FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
    FieldDescriptor.CPPTYPE_ENUM: [0],
}
KINDS: dict[str, type[Message]] = {
    "Generate": pb.GenerateRequest,
    "Stream": pb.StreamRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "GetModelInfo": pb.GetModelInfoRequest,
}


def fill(message: Any, rng: random.Random, share: float, depth: int = 0) -> Any:
    """Sets about `share` of the fields, those of messages inside, too."""
    for field in message.DESCRIPTOR.fields:
        if depth > 6 or (rng.random() > share and field.name != "request"):
            continue
        target, kind = getattr(message, field.name), field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
            for _ in range(rng.randrange(3)):
                at = rng.choice(VALUES[key.cpp_type])
                if value.message_type is None:
                    target[at] = rng.choice(VALUES[value.cpp_type])
                else:
                    fill(target[at], rng, share, depth + 1)
        elif field.is_repeated:
            for _ in range(rng.randrange(4)):
                if kind is None:
                    target.append(rng.choice(VALUES[field.cpp_type]))
                else:
                    fill(target.add(), rng, share, depth + 1)
        elif kind is None:
            setattr(message, field.name, rng.choice(VALUES[field.cpp_type]))
        else:
            target.SetInParent()
            fill(target, rng, share, depth + 1)
    return message


def make_request(rng: random.Random) -> tuple[str, Any]:
    """Most have a prompt and name no other model: they get past the first checks."""
    kind = rng.choice(["Generate", *KINDS])
    request = fill(KINDS[kind](), rng, rng.choice((0.05, 0.12, 0.3)))
    inner = request.request if kind == "Stream" else request
    if rng.random() < 0.9:
        inner.model = ""
    if isinstance(inner, pb.GenerateRequest) and rng.random() < 0.7:
        inner.text = rng.choice(TEXTS)
    return kind, request


def test_random_fields_are_refused_or_answered(llm: AsyncLLM):
    rng = random.Random(5)

    async def body(service: Service) -> None:
        seen = set()
        for _ in range(600):
            kind, request = make_request(rng)
            call = getattr(service.stub, kind)(request, timeout=30)
            try:
                if kind == "Stream":
                    async for _ in call:
                        pass
                else:
                    await call
                seen.add(CODE.OK)
            except grpc.aio.AioRpcError as error:
                seen.add(error.code())
                allowed = (CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.UNIMPLEMENTED)
                is_timeout = error.code() is CODE.RESOURCE_EXHAUSTED  # its queue_timeout
                assert error.code() in allowed or is_timeout, (kind, request, error)
        assert {CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.UNIMPLEMENTED} <= seen
        answer = await service.stub.Generate(ask([1, 2], 9))
        assert list(answer.completions[0].token_ids) == solo_tokens([1, 2], 9)

    run_service(llm, body)
