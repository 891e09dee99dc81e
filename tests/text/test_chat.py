"""Chat templates: the model's own, one BOS, refusals in the template's words."""

from typing import Any

import pytest
from helpers.byte_tokenizer import BOS, TURN, ByteTokenizer

from jaxpaged.errors import InvalidFieldError
from jaxpaged.text import render_chat

MESSAGES = [{"role": "user", "content": "안녕"}]


def text_of(template: str | None, messages: list[Any] = MESSAGES, **options) -> str:
    tokenizer = ByteTokenizer(chat_template=template)
    return tokenizer.decode(render_chat(tokenizer, messages, **options), skip_special_tokens=False)


def test_the_models_own_template():
    tokenizer = ByteTokenizer()
    ids = render_chat(tokenizer, MESSAGES)
    text = "<|turn|>user\n안녕<|end|><|turn|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == TURN  # special tokens are ids, not their spelling
    ids = render_chat(tokenizer, MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|turn|>user\n안녕<|end|>"


@pytest.mark.parametrize("template", ["x", "{{ bos_token }}x"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos(template: str, adds_bos: bool):
    tokenizer = ByteTokenizer(adds_bos=adds_bos, chat_template=template)
    ids = render_chat(tokenizer, MESSAGES)
    assert ids.count(BOS) == (1 if adds_bos or "bos" in template else 0)
    assert ids[-1] == ord("x")


def test_more_variables():
    template = "{% if deep %}deep {% endif %}{{ messages[0].content }}"
    assert text_of(template, template_args={"deep": True}) == "deep 안녕"
    assert text_of(template) == "안녕"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token"])
def test_variables_that_every_template_has_are_not_overridden(name: str):
    with pytest.raises(InvalidFieldError, match=f"must not set {name}: every") as error:
        text_of("x", template_args={"deep": True, name: []})
    assert error.value.field == "template_args"


def test_the_dialect_of_hugging_face():
    template = """{% for m in messages %}
    {%- if loop.index0 == 1 %}{% break %}{% endif %}
{% generation %}{{ m | tojson }}{% endgeneration %}
{% endfor %}{{ strftime_now('%Y') | length }}"""
    text = text_of(template, MESSAGES * 2)
    assert '{"role": "user", "content": "안녕"}' in text
    assert text.endswith("4")
    assert text.count("role") == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{% if %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_the_template_says_is_told(template: str, message: str):
    with pytest.raises(InvalidFieldError, match=message) as error:
        text_of(template)
    assert error.value.field == "chat"


def test_no_template_and_no_messages():
    with pytest.raises(InvalidFieldError, match="chat template, and the model has none"):
        text_of(None)
    with pytest.raises(InvalidFieldError, match="at least one message"):
        text_of("x", [])
