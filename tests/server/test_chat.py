"""Conversations over gRPC: the model's own template, its arguments, one BOS, its own words."""

import asyncio

import grpc
import pytest
from helpers.byte_tokenizer import BOS, ByteTokenizer
from helpers.fronts import scripted_front
from helpers.running_service import Service, run_service

from jaxpaged.client import AsyncClient, Client
from jaxpaged.errors import InvalidFieldError

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{{ bos_token }}{% if messages[0].role == 'cat' %}{{ raise_exception('no cats here') }}"
    "{% endif %}{{ messages[0].content }}{% if deep %}!{% endif %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
ANSWERS = {"<|bos|>hi:": "plain", "<|bos|>hi!:": "deep", "<|bos|>hi!": "no prompt"}


def run_chat(body) -> None:
    tokenizer = ByteTokenizer(chat_template=TEMPLATE)
    front = scripted_front(ANSWERS, tokenizer=tokenizer)
    tokenizer.adds_bos = True  # only now: the script's prompts have theirs
    run_service(front.llm, body)
    front.llm.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "plain"),
        ({"template_args": {"deep": True}}, "deep"),
        ({"template_args": {"deep": False}}, "plain"),
        ({"template_args": {"deep": True}, "add_generation_prompt": False}, "no prompt"),
    ],
)
def test_options_of_chat(options, text):
    async def body(service: Service) -> None:
        def ask_blocking():
            with Client(service.address) as client:
                return client.chat(MESSAGES, **options)

        async with AsyncClient(service.address) as client:
            outputs = [
                await client.chat(MESSAGES, **options),
                await asyncio.to_thread(ask_blocking),
                await service.llm.chat(MESSAGES, **options),
            ]
        for output in outputs:
            assert output.completions[0].text == text
            assert output.prompt_token_ids.count(BOS) == 1 and output.prompt_token_ids[0] == BOS

    run_chat(body)


def test_the_template_s_own_words():
    async def body(service: Service) -> None:
        async with AsyncClient(service.address) as client:
            for ask in (client.chat, service.llm.chat):
                with pytest.raises(InvalidFieldError, match=r"says: no cats here$") as error:
                    await ask([{"role": "cat", "content": "meow"}])
                assert error.value.field == "chat"
            with pytest.raises(InvalidFieldError) as error:
                await client.chat([{"role": "cat", "content": "meow"}])
            assert isinstance(error.value.__cause__, grpc.aio.AioRpcError)
            assert error.value.__cause__.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(InvalidFieldError, match="at least one message"):
                await client.chat([])
            with pytest.raises(InvalidFieldError, match="template_args"):
                await client.chat(MESSAGES, template_args={"deep": object()})

    run_chat(body)
