"""Checks that the engine's front and the client make alike, so that both refuse in the same words.

They need no model; the client imports them without JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.errors import InvalidFieldError
from jaxpaged.sampling_params import ChatPrompt, Constraint

_TYPES: dict[str, tuple[Any, str]] = {
    "json_schema": (str | Mapping, "a JSON text or a mapping"),
    "regex": (str, "a string"),
    "choice": (Sequence, "a sequence of strings"),
    "grammar": (str, "a string"),
}


def check_constraint(constraint: Any) -> str:
    """The name of the one field that is set; its value has the right type.

    Raises:
      InvalidFieldError: it has not, or not exactly one field is set, or it is no Constraint.
    """
    if not isinstance(constraint, Constraint):
        raise InvalidFieldError(
            "constraint",
            f"constraint={constraint!r:.80} must be a Constraint: one of "
            + ", ".join(f"Constraint({name}=...)" for name in _TYPES),
        )
    found = [name for name in _TYPES if getattr(constraint, name) is not None]
    if len(found) != 1:
        raise InvalidFieldError(
            "constraint",
            f"constraint must set exactly one of {', '.join(_TYPES)}, it sets "
            f"{', '.join(found) or 'none'}",
        )
    (name,) = found
    value = getattr(constraint, name)
    kind, wanted = _TYPES[name]
    if not isinstance(value, kind) or (name == "choice" and isinstance(value, str)):
        line = f"constraint.{name} must be {wanted}, not {type(value).__name__}"
        if name == "json_schema" and hasattr(value, "model_json_schema"):
            line += ": give its model_json_schema()"
        raise InvalidFieldError(f"constraint.{name}", line)
    return name


def check_chat(prompt: ChatPrompt) -> None:
    """Checks what every template needs; what a message holds is the template's to judge.

    Raises:
      InvalidFieldError: a field of `prompt` has the wrong type.
    """
    messages, template_args = prompt.messages, prompt.template_args
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidFieldError(
            "messages",
            f"messages={messages!r:.80} must be a list of mappings with role and content",
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidFieldError(
                "messages",
                f"messages[{i}]={message!r:.80} must be a mapping with role and content: "
                f"one call answers one conversation",
            )
    if not isinstance(prompt.add_generation_prompt, bool):
        raise InvalidFieldError(
            "add_generation_prompt",
            f"add_generation_prompt={prompt.add_generation_prompt!r} must be true or false",
        )
    if template_args is None:
        return
    if not isinstance(template_args, Mapping) or not all(isinstance(k, str) for k in template_args):
        raise InvalidFieldError(
            "template_args",
            f"template_args={template_args!r:.80} must map names of the template's variables "
            f"to values",
        )
