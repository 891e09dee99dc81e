"""Protobuf messages <-> our dataclasses, in both directions. Used by the server and the client.

On the wire an unset optional field means the server's default and zero means zero; here unset is
None. Nothing is judged here but what protobuf cannot carry: `validation.py` checks the values.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.front_checks import check_chat, check_constraint
from jaxpaged.prompts import token_ids_of
from jaxpaged.sampling_params import ChatPrompt, Constraint, Prompt, SamplingParams
from jaxpaged.v1 import inference_pb2 as pb

# Where each field of SamplingParams lives in GenerateRequest; "" is the request itself.
_OPTIONAL_FIELDS = {
    "max_tokens": "sampling",
    "min_tokens": "sampling",
    "temperature": "sampling",
    "top_k": "sampling",
    "top_p": "sampling",
    "min_p": "sampling",
    "seed": "sampling",
    "n": "sampling",
    "repetition_penalty": "sampling",
    "presence_penalty": "sampling",
    "frequency_penalty": "sampling",
    "ignore_eos": "stop",
    "include_stop_string": "stop",
    "logprobs": "output",
    "prompt_logprobs": "output",
    "skip_special_tokens": "output",
    "use_prefix_cache": "cache",
    "priority": "",
}
_REPEATED_FIELDS = {
    "allowed_token_ids": "sampling",
    "stop": "stop",
    "stop_token_ids": "stop",
}


# --- requests, read by the server --------------------------------------------------------------


def params_from_proto(request: pb.GenerateRequest) -> SamplingParams:
    """Every option that is set, supported or not; those that are not stay None."""
    values: dict[str, Any] = {}
    for name, place in _OPTIONAL_FIELDS.items():
        message = getattr(request, place) if place else request
        if message.HasField(name):
            values[name] = getattr(message, name)
    for name, place in _REPEATED_FIELDS.items():
        values[name] = list(getattr(getattr(request, place), name)) or None
    values["logit_bias"] = dict(request.sampling.logit_bias) or None
    values["cache_salt"] = request.cache.cache_salt or None
    values["constraint"] = _constraint_from_proto(request.sampling)
    return SamplingParams(**values)


def _constraint_from_proto(sampling: pb.SamplingParams) -> Constraint | None:
    kind = sampling.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choice":
        return Constraint(choice=list(sampling.choice.choices))
    return Constraint(**{kind: getattr(sampling, kind)})


def prompt_from_proto(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    """The one prompt of a request.

    Raises:
      InvalidFieldError: none is set.
    """
    oneof = request.DESCRIPTOR.oneofs[0]
    kind = request.WhichOneof(oneof.name)
    if kind is None:
        choices = ", ".join(field.name for field in oneof.fields)
        raise InvalidFieldError(oneof.name, f"{oneof.name}: one of {choices} must be set")
    if kind == "chat":
        return _chat_from_proto(request.chat)
    value = getattr(request, kind)
    return value if kind == "text" else list(value.ids)


def _chat_from_proto(chat: pb.ChatMessages) -> ChatPrompt:
    generation_prompt = (
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    )
    return ChatPrompt(
        messages=[{"role": message.role, "content": message.content} for message in chat.messages],
        add_generation_prompt=generation_prompt,
        template_args=_plain_struct(chat.template_args) if chat.HasField("template_args") else None,
    )


def _plain_struct(struct: Struct) -> dict[str, Any]:
    return {key: _plain_value(value) for key, value in struct.fields.items()}


def _plain_value(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    content = getattr(value, kind)
    if isinstance(content, Struct):
        return _plain_struct(content)
    if isinstance(content, ListValue):
        return [_plain_value(item) for item in content.values]
    # A Struct has only doubles, but templates count with integers.
    return int(content) if isinstance(content, float) and content.is_integer() else content


# --- requests, written by the client -----------------------------------------------------------


def request_to_proto(
    prompt: Prompt, params: SamplingParams | None, request_id: str | None = None
) -> pb.GenerateRequest:
    """A request for the loaded model that also returns the prompt's ids, as `LLM` does.

    Raises:
      InvalidFieldError: a value that the wire cannot carry.
      UnsupportedOptionError: an option that it cannot carry.
    """
    request = pb.GenerateRequest(request_id=request_id or "")
    request.output.prompt_token_ids = True
    fill_prompt(request, prompt)
    params = params or SamplingParams()
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        # The wire would read an empty list as unset.
        raise InvalidFieldError("allowed_token_ids", "allowed_token_ids must not be empty")
    for name, place in _OPTIONAL_FIELDS.items():
        value = getattr(params, name)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0  # -1 also means off in Python; the wire is unsigned
        try:
            setattr(getattr(request, place) if place else request, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidFieldError(name, f"{name}={value!r}: {error}") from error
    for name, place in _REPEATED_FIELDS.items():
        values = getattr(params, name)
        _extend(getattr(getattr(request, place), name), name, _listed(values))
    _fill_mapping(request.sampling.logit_bias, params.logit_bias or {})
    if params.cache_salt:
        request.cache.cache_salt = params.cache_salt
    if params.constraint is not None:
        _fill_constraint(request.sampling, params.constraint)
    if params.logits_processor is not None:
        raise UnsupportedOptionError(
            "logits_processor", "logits_processor cannot be sent to a server: it is a function"
        )
    return request


def _fill_constraint(sampling: pb.SamplingParams, constraint: Constraint) -> None:
    name = check_constraint(constraint)
    value = getattr(constraint, name)
    try:
        if name == "choice":
            # An empty list is sent too, for the server to refuse.
            sampling.choice.SetInParent()
            sampling.choice.choices.extend(value)
        else:
            text = json.dumps(dict(value)) if isinstance(value, Mapping) else value
            setattr(sampling, name, text)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(f"constraint.{name}", f"constraint.{name}: {error}") from error


def fill_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    """Sets the field of `request` that holds a prompt of this kind."""
    if isinstance(prompt, ChatPrompt):
        request.chat.CopyFrom(_chat_to_proto(prompt))
    elif isinstance(prompt, str):
        try:
            request.text = prompt
        except ValueError as error:  # a lone surrogate is no text
            raise InvalidFieldError("text", f"text: {error}") from error
    elif isinstance(request, pb.GenerateRequest):
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "token_ids", token_ids_of(prompt))
    else:
        raise InvalidFieldError("text", "only text and conversations can be tokenized")


def _chat_to_proto(prompt: ChatPrompt) -> pb.ChatMessages:
    check_chat(prompt)
    chat = pb.ChatMessages(add_generation_prompt=prompt.add_generation_prompt)
    for i, message in enumerate(prompt.messages):
        unknown = sorted(message.keys() - {"role", "content"})
        if unknown:
            raise InvalidFieldError("messages", f"messages: keys {unknown} cannot be sent")
        if isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str):
            raise InvalidFieldError(
                "messages", f"messages[{i}]: content in parts cannot be sent: give one string"
            )
        try:
            chat.messages.add(role=message.get("role"), content=message.get("content"))
        except (TypeError, ValueError) as error:
            raise InvalidFieldError("messages", f"messages: {error}") from error
    if prompt.template_args is not None:
        try:
            chat.template_args.update(prompt.template_args)
        except (TypeError, ValueError) as error:
            raise InvalidFieldError("template_args", f"template_args: {error}") from error
    return chat


def _listed(values: str | Sequence[Any] | None) -> Sequence[Any]:
    if values is None:
        return []
    return [values] if isinstance(values, str) else values


def _extend(target: Any, name: str, values: Sequence[Any]) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(name, f"{name}: {error}") from error


def _fill_mapping(target: Any, values: Mapping[int, float]) -> None:
    try:
        target.update(values)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError("logit_bias", f"logit_bias: {error}") from error


# --- both --------------------------------------------------------------------------------------


def duration_to_proto(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def duration_from_proto(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
