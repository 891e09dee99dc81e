"""The engine's front and the client refuse what is no constraint and no conversation alike."""

import asyncio
from typing import Any

import pytest
from helpers.fronts import scripted_front

from jaxpaged.convert import request_to_proto
from jaxpaged.errors import InvalidFieldError
from jaxpaged.sampling_params import ChatPrompt, Constraint, Prompt, SamplingParams


class Person:
    """A class that describes itself, as pydantic's do."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object"}


MESSAGE = {"role": "user", "content": "hi"}
BAD_CONSTRAINTS: list[tuple[Any, str, str]] = [
    ({"regex": "a"}, "constraint", "constraint={'regex': 'a'} must be a Constraint: one of"),
    ("a+", "constraint", r"constraint='a\+' must be a Constraint: one of Constraint\(json_schema="),
    (
        Constraint(),
        "constraint",
        "exactly one of json_schema, regex, choice, grammar, it sets none",
    ),
    (Constraint(regex="a", grammar="b"), "constraint", "it sets regex, grammar"),
    (
        Constraint(json_schema=Person),  # type: ignore[arg-type]
        "constraint.json_schema",
        r"must be a JSON text or a mapping, not type: give its model_json_schema\(\)$",
    ),
    (Constraint(json_schema=3), "constraint.json_schema", "mapping, not int$"),  # type: ignore[arg-type]
    (Constraint(choice="yes"), "constraint.choice", "a sequence of strings, not str"),
    (Constraint(regex=b"a"), "constraint.regex", "a string, not bytes"),  # type: ignore[arg-type]
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": "hi"}, "messages", "messages='hi' must be a list of mappings"),
    ({"messages": MESSAGE}, "messages", "must be a list of mappings"),
    ({"messages": None}, "messages", "messages=None must be a list"),
    ({"messages": [[MESSAGE]]}, "messages", r"messages\[0\]=\[.* must be a mapping"),
    ({"messages": [MESSAGE, "hi"]}, "messages", r"messages\[1\]='hi' must be a mapping"),
    ({"template_args": [1]}, "template_args", r"template_args=\[1\] must map names"),
    ({"template_args": {1: 2}}, "template_args", "must map names of the template's variables"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "=1 must be true or false"),
]


def check_both_refuse(prompt: Prompt, params: SamplingParams, field: str, line: str) -> None:
    async def ask() -> None:
        front = scripted_front({"p": "fine"})
        try:
            await front.llm.generate(prompt, params)
        finally:
            front.llm.close()

    with pytest.raises(InvalidFieldError, match=line) as in_process:
        asyncio.run(ask())
    with pytest.raises(InvalidFieldError) as in_client:
        request_to_proto(prompt, params)
    assert in_process.value.field == in_client.value.field == field
    assert str(in_process.value) == str(in_client.value)
    assert "\n" not in str(in_client.value)


@pytest.mark.parametrize(("constraint", "field", "line"), BAD_CONSTRAINTS)
def test_no_constraint(constraint: Any, field: str, line: str):
    check_both_refuse("p", SamplingParams(constraint=constraint), field, line)


@pytest.mark.parametrize(("fields", "field", "line"), BAD_CHATS)
def test_no_conversation(fields: dict[str, Any], field: str, line: str):
    chat = ChatPrompt(**{"messages": [MESSAGE], **fields})
    check_both_refuse(chat, SamplingParams(), field, line)
