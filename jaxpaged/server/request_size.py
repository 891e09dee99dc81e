"""Refuses lists that are too long before a copy is made of them.

Copying tens of millions of ids takes gigabytes, and seconds in which the event loop answers nobody.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct

from jaxpaged.errors import InvalidFieldError
from jaxpaged.outputs import ModelInfo
from jaxpaged.sampling_params import MAX_CHOICE_BYTES, MAX_STOP_STRINGS
from jaxpaged.v1 import inference_pb2 as pb
from jaxpaged.validation import check_prompt_len

MAX_TEMPLATE_VALUES = 32768


def check_size(request: pb.GenerateRequest, info: ModelInfo) -> None:
    """Checks the lists of a request, not what is in them.

    Raises:
      ContextTooLongError: the prompt is longer than the context, whatever its tokens are.
      InvalidFieldError: another list has more entries than can be valid.
    """
    check_prompt_size(request, info)
    sampling, stop = request.sampling, request.stop
    for name, num_entries, limit in (
        ("allowed_token_ids", len(sampling.allowed_token_ids), info.vocab_size),
        ("logit_bias", len(sampling.logit_bias), info.vocab_size),
        ("stop_token_ids", len(stop.stop_token_ids), info.vocab_size),
        ("stop", len(stop.stop), MAX_STOP_STRINGS),
        # Each has a byte at least.
        ("constraint.choice", len(sampling.choice.choices), MAX_CHOICE_BYTES),
    ):
        if num_entries > limit:
            raise InvalidFieldError(
                name, f"{name} has {num_entries} entries: at most {limit} are allowed"
            )


def check_prompt_size(request: pb.GenerateRequest | pb.TokenizeRequest, info: ModelInfo) -> None:
    """Likewise for the prompt alone; every message of a chat has a token at least."""
    check_prompt_len(len(request.chat.messages), info, num_new=0, at_least=True)
    _check_template_args(request.chat.template_args)
    if isinstance(request, pb.GenerateRequest):
        check_prompt_len(len(request.token_ids.ids), info, num_new=0)


def _check_template_args(template_args: Struct) -> None:
    """Counts values, those inside others too; a list is counted before it is looked through."""
    num_values = 0
    pending: list[Any] = [template_args.fields]
    while pending:
        inside = pending.pop()
        num_values += len(inside)
        if num_values > MAX_TEMPLATE_VALUES:
            raise InvalidFieldError(
                "template_args",
                f"template_args has at least {num_values} values, lists and mappings inside it "
                f"counted: at most {MAX_TEMPLATE_VALUES} are allowed",
            )
        for value in inside.values() if isinstance(inside, Mapping) else inside:
            kind = value.WhichOneof("kind")
            if kind == "struct_value":
                pending.append(value.struct_value.fields)
            elif kind == "list_value":
                pending.append(value.list_value.values)
