"""What a user may ask of one request, before and after defaults are filled in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request. None means: the model's generation config, else jaxpaged's default.

    Limits and meanings are in docs/options.md; `validation.py` checks them.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    include_stop_string: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    use_prefix_cache: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """The same after `validation.resolve_params`: every field has its value, ids are sets."""

    max_tokens: int
    temperature: float
    top_k: int  # 0 = off
    top_p: float
    min_p: float
    seed: int  # signed 64 bits; sequence i uses seed + i (wrapping)
    n: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_stop_string: bool
    skip_special_tokens: bool
    use_prefix_cache: bool
    cache_salt: str
    priority: int


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, to be rendered by the model's own chat template.

    Attributes:
      messages: dicts with "role" and "content".
      add_generation_prompt: end the text where the assistant's answer begins.
      template_args: extra variables of the template.
    """

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool = True
    template_args: Mapping[str, Any] | None = None


Prompt = str | Sequence[int] | ChatPrompt


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request: seed + index, wrapped to signed 64 bits."""
    return (seed + index + 2**63) % 2**64 - 2**63
