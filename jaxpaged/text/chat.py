"""Conversations -> token ids, through the model's own chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpaged.errors import InvalidFieldError
from jaxpaged.text.tokenizer import Tokenizer


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, with exactly one BOS in front if the model wants one.

    Args:
      messages: each with "role" and "content".
      add_generation_prompt: end where the assistant's answer begins.
      template_args: more variables for the template.

    Raises:
      InvalidFieldError: the model has no template, it refuses the messages, or `template_args` has
        a variable that every template gets.
    """
    if tokenizer.chat_template is None:
        raise InvalidFieldError("chat", "chat needs a chat template, and the model has none")
    if not messages:
        raise InvalidFieldError("chat", "chat must have at least one message")
    reserved = {
        **tokenizer.special_tokens,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    taken = sorted(reserved.keys() & (template_args or {}).keys())
    if taken:
        raise InvalidFieldError(
            "template_args", f"template_args must not set {', '.join(taken)}: every template has it"
        )
    variables = {"tools": None, "documents": None, **(template_args or {}), **reserved}
    try:
        text = _compile(tokenizer.chat_template).render(variables)
    # why: a template is a program; what it does with odd messages may raise anything
    except Exception as error:
        raise InvalidFieldError("chat", f"chat: the model's template says: {error}") from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer.adds_bos and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Compiles in the dialect in which Hugging Face's templates are written."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here its content just stands."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance's attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
