"""Every field there is, obeyed or refused by name, in process and over gRPC alike.

A field that is new in SamplingParams or in the contract fails here until there is an entry that
shows its effect on an answer (option_effects.py, and below for what only the wire has).
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from helpers.byte_tokenizer import CHAT_TEMPLATE, ByteTokenizer
from helpers.engines import fresh_engine
from helpers.every_field import CONSTRAINTS, ask_in_process, ask_over_grpc, request_of
from helpers.option_effects import EOS, GREEDY, OBEYED, PROMPT, TOKENS, H
from helpers.running_service import EOF, Service, ask, run_service
from helpers.served_engines import make_llm

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import EngineConfig
from jaxpaged.convert import request_to_proto
from jaxpaged.errors import UnsupportedOptionError
from jaxpaged.grammar import Vocabulary
from jaxpaged.runner.runner import Runner
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.v1 import inference_pb2 as pb

# A value that would have an effect.
REFUSED: dict[str, Any] = {"priority": 1}
# Functions do not travel.
IN_PROCESS_ONLY = {"logits_processor"}
MODEL = "tiny"
TEMPLATE = CHAT_TEMPLATE + "{{ ending }}"


@pytest.fixture(scope="module")
def llm(tiny_runner: Callable[[str], Runner]) -> Generator[AsyncLLM]:
    """A front before a real model, whose tokens are bytes."""
    runner = tiny_runner("tiny_llama")
    tokenizer = ByteTokenizer(chat_template=TEMPLATE)
    tokenizer.special_token_ids |= {H}
    tokenizer.eos_token_ids = frozenset({EOS})
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    engine = fresh_engine(runner, model=MODEL, vocabulary=vocabulary)
    llm = AsyncLLM.from_engine(
        EngineConfig(MODEL), engine, tokenizer, SamplingDefaults(), tokenizer.eos_token_ids
    )
    with patch.object(runner, "close"):  # the session's other tests go on with it
        yield llm
        llm.close()


# --- options -----------------------------------------------------------------------------------


def test_every_option_has_an_entry():
    names = {field.name for field in fields(SamplingParams)} - {"constraint"} | set(CONSTRAINTS)
    assert names == OBEYED.keys() | REFUSED.keys()
    assert not OBEYED.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", OBEYED)
def test_option_is_obeyed_in_process(name, llm):
    async def run():
        await llm.reset_prefix_cache()
        await OBEYED[name](ask_in_process(llm))
        assert (await llm.stats()).used_blocks == 0

    asyncio.run(run())


@pytest.mark.parametrize("name", [name for name in OBEYED if name not in IN_PROCESS_ONLY])
def test_option_is_obeyed_over_grpc(name, llm):
    async def body(service: Service) -> None:
        await llm.reset_prefix_cache()
        await OBEYED[name](ask_over_grpc(service))

    run_service(llm, body)


@pytest.mark.parametrize("name", REFUSED)
def test_option_is_refused_by_name(name, llm):
    async def body(service: Service) -> None:
        options = {name: REFUSED[name]}
        with pytest.raises(UnsupportedOptionError, match=f"^{name}=") as error:
            await llm.generate(PROMPT, SamplingParams(**options))
        assert error.value.field == name
        with pytest.raises(grpc.aio.AioRpcError, match=f"{name}=") as refused:
            await service.stub.Generate(request_of(PROMPT, options))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run_service(llm, body)


@pytest.mark.parametrize("name", sorted(IN_PROCESS_ONLY))
def test_client_refuses_what_does_not_travel(name):
    with pytest.raises(UnsupportedOptionError, match=f"^{name} cannot be sent") as error:
        request_to_proto("x", replace(SamplingParams(), **{name: lambda logits, state: logits}))
    assert error.value.field == name


# --- what only the wire has --------------------------------------------------------------------

Observe = Callable[[Service], Awaitable[None]]
ON_THE_WIRE: dict[str, Observe] = {}


def shows(*names: str) -> Callable[[Observe], Observe]:
    """Puts a function into the table under each "Message.field" that it observes."""

    def put(observe: Observe) -> Observe:
        ON_THE_WIRE.update(dict.fromkeys(names, observe))
        return observe

    return put


@shows("GenerateRequest.token_ids", "TokenIds.ids", "OutputOptions.prompt_token_ids")
async def _token_ids(service: Service) -> None:
    for is_on in (False, True):
        response = await service.stub.Generate(
            request_of(PROMPT, GREEDY | {"prompt_token_ids": is_on})
        )
        assert list(response.completions[0].token_ids) == TOKENS
        assert list(response.prompt_token_ids) == PROMPT * is_on


@shows("GenerateRequest.text")
async def _text(service: Service) -> None:
    request = pb.GenerateRequest(text="abc", output={"prompt_token_ids": True})
    assert bytes((await service.stub.Generate(request)).prompt_token_ids) == b"abc"


@shows(
    "GenerateRequest.chat",
    "ChatMessages.messages",
    "ChatMessages.add_generation_prompt",
    "ChatMessages.template_args",
    "ChatMessage.role",
    "ChatMessage.content",
)
async def _chat(service: Service) -> None:
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "add_generation_prompt": False,
        "template_args": {"ending": "the end"},
    }
    request = pb.GenerateRequest(
        chat=chat, sampling={"max_tokens": 1}, output={"prompt_token_ids": True}
    )
    for is_on in (False, True):
        request.chat.add_generation_prompt = is_on
        rendered = "<|turn|>user\nhi<|end|>" + "<|turn|>assistant\n" * is_on + "the end"
        wanted = ByteTokenizer().encode(rendered)
        assert list((await service.stub.Generate(request)).prompt_token_ids) == wanted


@shows("OutputOptions.text", "OutputOptions.token_ids")
async def _output_parts(service: Service) -> None:
    for text in (False, True):
        for token_ids in (False, True):
            request = request_of(PROMPT, GREEDY)
            request.output.text, request.output.token_ids = text, token_ids
            (completion,) = (await service.stub.Generate(request)).completions
            assert bool(completion.text) == text and bool(completion.token_ids) == token_ids


@shows("GenerateRequest.request_id", "GenerateRequest.model")
async def _names(service: Service) -> None:
    request = request_of(PROMPT, {"max_tokens": 1})
    request.request_id, request.model = "mine", MODEL
    assert (await service.stub.Generate(request)).request_id == "mine"
    request.model = "another"
    with pytest.raises(grpc.aio.AioRpcError, match="another") as refused:
        await service.stub.Generate(request)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("observe", dict.fromkeys(ON_THE_WIRE.values()), ids=lambda f: f.__name__)
def test_field_of_the_wire_is_obeyed(observe, llm):
    run_service(llm, observe)


@shows("GenerateRequest.queue_timeout")
async def _queue_timeout(service: Service) -> None:
    request = ask([1], 30)
    request.queue_timeout.FromMilliseconds(20)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.stub.Generate(request)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@shows("StreamOptions.heartbeat_interval")
async def _heartbeat_interval(service: Service) -> None:
    options = {"heartbeat_interval": {"nanos": 20_000_000}}
    call = service.stub.Stream(pb.StreamRequest(request=ask([1], 30), options=options))
    assert (await call.read()).HasField("accepted")
    assert (await call.read()).HasField("heartbeat")
    call.cancel()


@shows("StreamOptions.min_tokens_per_message", "StreamRequest.request", "StreamRequest.options")
async def _min_tokens_per_message(service: Service) -> None:
    for least in (1, 8):
        options = {"min_tokens_per_message": least}
        call = service.stub.Stream(pb.StreamRequest(request=ask([3], 60), options=options))
        sizes = []
        while (message := await call.read()) is not EOF:
            sizes.append(len(message.delta.token_ids))
        sizes = [size for size in sizes if size]
        assert sum(sizes) == 60 and (min(sizes[1:-1]) >= 8) == (least == 8)


@pytest.mark.parametrize("observe", [_queue_timeout, _heartbeat_interval])
def test_field_for_those_who_wait_is_obeyed(observe):
    """One row, and it is taken."""
    llm = make_llm("thread", 0.003, max_num_seqs=1)

    async def body(service: Service) -> None:
        running = service.stub.Stream(pb.StreamRequest(request=ask([7], 600)))
        while not (await running.read()).HasField("delta"):
            pass
        await observe(service)
        running.cancel()

    run_service(llm, body)
    llm.close()


def test_least_size_of_a_message_is_obeyed():
    llm = make_llm("thread", 0.003)
    run_service(llm, _min_tokens_per_message)
    llm.close()


def test_every_field_of_the_wire_has_an_entry():
    """All messages of a request, as far down as they go; what an option consists of is its own."""
    options = OBEYED.keys() | REFUSED.keys()
    # They only hold others.
    parts = {f"GenerateRequest.{name}" for name in ("sampling", "stop", "output", "cache")}
    of_options, others = set(), set()
    todo: list[Any] = [pb.StreamRequest.DESCRIPTOR]
    for message in todo:
        for field in message.fields:
            name, inner = f"{message.name}.{field.name}", field.message_type
            if field.name in options and name not in parts:
                of_options.add(field.name)
                continue
            others.add(name)
            if inner and inner.file.package == "jaxpaged.v1" and inner not in todo:
                todo.append(inner)
    assert others == ON_THE_WIRE.keys() | parts
    assert of_options == options - IN_PROCESS_ONLY
