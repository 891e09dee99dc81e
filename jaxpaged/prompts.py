"""What users pass as prompts and params: one or many, told apart in one place."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt alone is a list of one; a list of numbers is one prompt.

    Raises:
      InvalidFieldError: neither a prompt nor a list of them.
    """
    if isinstance(prompts, str | ChatPrompt):
        return [prompts]
    if isinstance(prompts, Mapping | bytes | SamplingParams) or not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    items = list(prompts)
    # NumPy's integers are Integral, its arrays are not.
    if items and all(isinstance(item, Integral) for item in items):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def token_ids_of(prompt: Any) -> list[int]:
    """The ids of a prompt that is neither text nor a conversation.

    Raises:
      InvalidFieldError: it is no list of anything.
    """
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
        raise _no_prompt(prompt)
    return list(prompt)


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    """One for all prompts, or one for each.

    Raises:
      InvalidFieldError: not as many as prompts, or something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    is_list = isinstance(params, Sequence) and not isinstance(params, str)
    if not is_list or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidFieldError(
            "params", f"params={params!r:.80} must be SamplingParams, or a list of them"
        )
    if len(params) != num_prompts:
        raise InvalidFieldError(
            "params", f"params has {len(params)} entries for {num_prompts} prompts"
        )
    return list(params)


def check_deltas_only(params: SamplingParams | None) -> None:
    """Refuses what a stream of deltas would drop."""
    if params is not None and params.prompt_logprobs is not None:
        raise UnsupportedOptionError(
            "prompt_logprobs",
            f"prompt_logprobs={params.prompt_logprobs} comes with stream_events or generate, not "
            f"with stream",
        )


def _no_prompt(value: Any) -> InvalidFieldError:
    return InvalidFieldError(
        "prompt",
        f"prompt={value!r:.80} must be a text, a list of token ids or a ChatPrompt, or a list of "
        f"these",
    )
