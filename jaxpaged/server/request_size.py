"""Refuses lists that are too long before a copy is made of them.

Copying tens of millions of ids takes gigabytes, and seconds in which the event loop answers nobody.
"""

from jaxpaged.errors import InvalidFieldError
from jaxpaged.outputs import ModelInfo
from jaxpaged.sampling_params import MAX_STOP_STRINGS
from jaxpaged.v1 import inference_pb2 as pb
from jaxpaged.validation import check_prompt_len


def check_size(request: pb.GenerateRequest, info: ModelInfo) -> None:
    """Checks the lists of a request, not what is in them.

    Raises:
      ContextTooLongError: the prompt is longer than the context, whatever its tokens are.
      InvalidFieldError: another list has more entries than there can be different ones.
    """
    check_prompt_size(request, info)
    sampling, stop = request.sampling, request.stop
    for name, num_entries, limit in (
        ("allowed_token_ids", len(sampling.allowed_token_ids), info.vocab_size),
        ("logit_bias", len(sampling.logit_bias), info.vocab_size),
        ("stop_token_ids", len(stop.stop_token_ids), info.vocab_size),
        ("stop", len(stop.stop), MAX_STOP_STRINGS),
    ):
        if num_entries > limit:
            raise InvalidFieldError(
                name, f"{name} has {num_entries} entries: at most {limit} are allowed"
            )


def check_prompt_size(request: pb.GenerateRequest | pb.TokenizeRequest, info: ModelInfo) -> None:
    """Likewise for the prompt alone; every message of a chat has a token at least."""
    check_prompt_len(len(request.chat.messages), info, num_new=0, at_least=True)
    if isinstance(request, pb.GenerateRequest):
        check_prompt_len(len(request.token_ids.ids), info, num_new=0)
