"""What a user may ask of one request, before and after defaults are filled in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_CHOICE_BYTES = 65536  # of all choices of a constraint
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Constraint:
    """What the whole generated text must match; exactly one field is set.

    Attributes:
      json_schema: a JSON schema, as JSON text or as the object itself; `{}` is any JSON value.
      regex: a regular expression for the whole text.
      choice: the text is one of these.
      grammar: a context-free grammar in Lark's notation, as llguidance reads it.
    """

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None


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
    constraint: Constraint | None = None
    logits_processor: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A beam search: the request's n sequences are its beams, then its best hypotheses.

    Attributes:
      length_penalty: a hypothesis scores its summed log-probability / length ** length_penalty.
    """

    length_penalty: float


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """The same after `validation.resolve_params`: every field has its value, ids are sets.

    Attributes:
      top_k: 0 = off.
      seed: signed 64 bits; sequence i uses seed + i (wrapping).
      logit_bias: (id, value) pairs, the values clamped already.
      allowed_token_ids: None = all.
      logprobs: how many best tokens are told beside the drawn one; None = nothing is told.
      prompt_logprobs: the same for the prompt's tokens.
      grammar: what the output must match, in the form that `jaxpaged.grammar` made of the user's
        constraint; empty = anything.
      logits_processor: (logits, state) -> logits, a pure JAX function.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_string: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    use_prefix_cache: bool = True
    cache_salt: str = ""
    priority: int = 0
    grammar: str = ""
    beam: BeamParams | None = None
    logits_processor: Any = None

    @property
    def needs_token_texts(self) -> bool:
        """Whether tokens become text even where nobody wants the text."""
        return bool(self.stop) or (self.logprobs, self.prompt_logprobs) != (None, None)

    @property
    def adjusts_logits(self) -> bool:
        """Whether the logits change before a token is drawn, other than by a grammar."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.allowed_token_ids is not None
            or self.logits_processor is not None
        )


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
