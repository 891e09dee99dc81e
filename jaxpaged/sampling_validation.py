"""Checks of what a user asks for in a request; every option gets its value here.

Each refusal is one line that names the field, the value and the limit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpaged.config import ResolvedConfig
from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.field_checks import (
    MIN_FLOAT,
    check_bool,
    check_float,
    check_ids,
    check_int,
    check_text,
)
from jaxpaged.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    BeamParams,
    ResolvedParams,
    SamplingParams,
)


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets for the options it leaves unset."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """The model's own wishes; values out of range are errors in its file and are refused."""
        values = {
            name: config[name]
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if config.get(name) is not None
        }
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        defaults = cls(**values)
        _check_sampling(defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p)
        _check_repetition(defaults.repetition_penalty)
        return defaults


def unsupported_defaults(config: Mapping[str, Any]) -> list[str]:
    """Wishes of a generation config that this build does not honour, as `name=value`."""
    neutral = {"min_tokens": 0, "min_new_tokens": 0}
    return [
        f"{name}={config[name]}"
        for name, value in neutral.items()
        if config.get(name) not in (None, value)
    ]


def resolve_params(
    params: SamplingParams,
    config: ResolvedConfig,
    defaults: SamplingDefaults,
    *,
    num_prompt_tokens: int,
    is_chat: bool,
    eos_token_ids: frozenset[int],
    draw_seed: Callable[[], int],
) -> ResolvedParams:
    """Checks every field but `constraint`, and fills in what is unset.

    Raises:
      UnsupportedOptionError: a field is set that this build does not honour.
      InvalidFieldError: a value is out of range, or fields do not go together.
    """
    room, vocab_size = max(1, config.max_model_len - num_prompt_tokens), config.vocab_size
    max_tokens = check_int("max_tokens", _or(params.max_tokens, room if is_chat else 16), 0)
    min_tokens = check_int("min_tokens", _or(params.min_tokens, 0), 0)
    if min_tokens > max_tokens:
        raise InvalidFieldError("min_tokens", f"{min_tokens=} must be at most {max_tokens=}")
    temperature = _or(params.temperature, defaults.temperature)
    top_k, top_p = _or(params.top_k, defaults.top_k), _or(params.top_p, defaults.top_p)
    min_p = _or(params.min_p, defaults.min_p)
    _check_sampling(temperature, top_k, top_p, min_p)
    seed = params.seed if params.seed is not None else draw_seed()
    resolved = ResolvedParams(
        # More than fits changes nothing, and could be more than a message carries.
        max_tokens=min(max_tokens, config.max_model_len),
        min_tokens=min(min_tokens, config.max_model_len),
        temperature=float(temperature),
        # At most a 32-bit number of ids exists: a larger k is off, as is any above the vocabulary.
        top_k=int(top_k) if 0 < top_k < vocab_size else 0,
        top_p=float(top_p),
        min_p=float(min_p),
        repetition_penalty=_check_repetition(
            _or(params.repetition_penalty, defaults.repetition_penalty)
        ),
        presence_penalty=_check_penalty("presence_penalty", params.presence_penalty),
        frequency_penalty=_check_penalty("frequency_penalty", params.frequency_penalty),
        seed=check_int("seed", seed, -(2**63), 2**63 - 1),
        n=check_int("n", _or(params.n, 1), 1, MAX_N),
        logit_bias=_check_logit_bias(params.logit_bias, vocab_size),
        allowed_token_ids=_check_allowed(params.allowed_token_ids, vocab_size),
        stop=_check_stop(params.stop),
        stop_token_ids=frozenset(
            check_ids("stop_token_ids", _or(params.stop_token_ids, ()), vocab_size)
        ),
        ignore_eos=check_bool("ignore_eos", params.ignore_eos, False),
        include_stop_string=check_bool("include_stop_string", params.include_stop_string, False),
        logprobs=_check_logprobs("logprobs", params.logprobs),
        prompt_logprobs=_check_logprobs("prompt_logprobs", params.prompt_logprobs),
        skip_special_tokens=check_bool("skip_special_tokens", params.skip_special_tokens, True),
        use_prefix_cache=check_bool("use_prefix_cache", params.use_prefix_cache, True),
        cache_salt=_check_salt(params.cache_salt),
        priority=_check_priority(params.priority, config.scheduling),
        logits_processor=_check_processor(params.logits_processor),
    )
    _check_together(resolved, eos_token_ids)
    return resolved


def _check_together(params: ResolvedParams, eos_token_ids: frozenset[int]) -> None:
    """Refuses options that contradict each other."""
    if params.max_tokens == 0 and (params.prompt_logprobs is None or params.n > 1):
        raise InvalidFieldError(
            "max_tokens",
            f"max_tokens=0 must be at least 1, unless n=1 and prompt_logprobs is set: n={params.n}",
        )
    allowed, ends = params.allowed_token_ids, _end_token_ids(params, eos_token_ids)
    if allowed is not None and params.min_tokens and allowed <= ends:
        raise InvalidFieldError(
            "allowed_token_ids",
            f"allowed_token_ids are all EOS or stop ids, which min_tokens={params.min_tokens} "
            f"forbids: allow at least one other",
        )


def check_beams(beam_width: Any, length_penalty: Any) -> None:
    """Refuses what no engine takes; `resolve_beams` knows the limits of this one."""
    check_int("beam_width", beam_width, 1, MAX_N)
    check_float("length_penalty", length_penalty, lambda x: -10 <= x <= 10, "in [-10, 10]")


def resolve_beams(
    params: ResolvedParams,
    config: ResolvedConfig,
    length_penalty: float,
    eos_token_ids: frozenset[int],
) -> ResolvedParams:
    """The same request as a beam search of `params.n` beams.

    Raises:
      InvalidFieldError: so many beams do not fit this engine.
    """
    ends = _end_token_ids(params, eos_token_ids)
    # A beam's n best continuations that do not end, and all that end.
    most = min(MAX_LOGPROBS - len(ends), config.max_num_seqs)
    if params.n > most:
        raise InvalidFieldError(
            "beam_width",
            f"beam_width={params.n} must be at most {most}: {MAX_LOGPROBS} best tokens less "
            f"{len(ends)} end ids, and max_num_seqs={config.max_num_seqs}",
        )
    beam = BeamParams(float(length_penalty))
    return replace(params, beam=beam, logprobs=params.n + len(ends))


def check_with_constraint(params: ResolvedParams, eos_token_ids: frozenset[int]) -> None:
    """Refuses options that would leave nothing to draw once the text is complete."""
    ends = _end_token_ids(params, eos_token_ids)
    allowed = params.allowed_token_ids
    if allowed is not None and not allowed & ends:
        raise InvalidFieldError(
            "allowed_token_ids",
            "allowed_token_ids with a constraint must hold an EOS or stop id: it could not end",
        )
    if params.min_tokens:
        raise InvalidFieldError(
            "min_tokens", f"min_tokens={params.min_tokens} must be 0 with a constraint"
        )
    if params.ignore_eos and not params.stop_token_ids:
        raise InvalidFieldError(
            "ignore_eos", "ignore_eos=True with a constraint needs stop_token_ids"
        )


def _end_token_ids(params: ResolvedParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids


def _or[T](value: T | None, default: T) -> T:
    return default if value is None else value


def _check_sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    check_float("temperature", temperature, lambda x: x >= 0, ">= 0")
    check_int("top_k", top_k, -1)
    check_float("top_p", top_p, lambda x: 0 < x <= 1, "in (0, 1]")
    check_float("min_p", min_p, lambda x: 0 <= x <= 1, "in [0, 1]")


def _check_repetition(value: float) -> float:
    return check_float("repetition_penalty", value, lambda x: x >= MIN_FLOAT, "> 0")


def _check_penalty(name: str, value: float | None) -> float:
    return check_float(name, _or(value, 0.0), lambda x: -2 <= x <= 2, "in [-2, 2]")


def _check_logprobs(name: str, value: int | None) -> int | None:
    return None if value is None else check_int(name, value, 0, MAX_LOGPROBS)


def _check_logit_bias(logit_bias: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(logit_bias, Mapping | None):
        raise InvalidFieldError(
            "logit_bias", f"logit_bias={logit_bias!r:.80} must map token ids to numbers"
        )
    checked, bias = [], {} if logit_bias is None else logit_bias
    ids = check_ids("logit_bias", bias.keys(), vocab_size, what="logit_bias key")
    for number, value in zip(ids, bias.values(), strict=True):
        value = check_float(f"logit_bias[{number}]", value, field="logit_bias")
        checked.append((number, min(100.0, max(-100.0, value))))
    return tuple(checked)


def _check_allowed(token_ids: Any, vocab_size: int) -> frozenset[int] | None:
    if token_ids is None:
        return None
    allowed = frozenset(check_ids("allowed_token_ids", token_ids, vocab_size))
    if not allowed:
        raise InvalidFieldError("allowed_token_ids", "allowed_token_ids must not be empty")
    return allowed


def _check_processor(processor: Any) -> Any:
    name = "logits_processor"
    if processor is not None and not callable(processor):
        raise InvalidFieldError(name, f"{name}={processor!r:.80} must be a function")
    try:
        hash(processor)  # its program is found by it
    except TypeError as error:
        raise InvalidFieldError(name, f"{name}={processor!r:.80}: {error}") from error
    return processor


def _check_stop(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, Iterable | None):
        raise InvalidFieldError("stop", f"stop={stop!r} must be a string or a list of strings")
    stops = (stop,) if isinstance(stop, str) else () if stop is None else tuple(stop)
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidFieldError(
            "stop", f"stop has {len(stops)} strings: at most {MAX_STOP_STRINGS} are allowed"
        )
    for text in stops:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
            raise InvalidFieldError(
                "stop",
                f"stop={text!r:.80} must be a string of 1 to {MAX_STOP_STRING_LENGTH} characters",
            )
        check_text("stop", text)
    return stops


def _check_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not isinstance(salt, str):
        raise InvalidFieldError("cache_salt", f"cache_salt={salt!r} must be a string")
    check_text("cache_salt", salt)
    return salt


def _check_priority(priority: int | None, scheduling: str) -> int:
    if priority is None:
        return 0
    check_int("priority", priority, -(2**31), 2**31 - 1)
    if scheduling != "priority":
        raise UnsupportedOptionError(
            "priority", f"priority={priority} needs scheduling='priority', this is {scheduling!r}"
        )
    return priority
