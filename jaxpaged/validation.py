"""Every check of what a user asks for, in one place, before anything is queued.

Each refusal is one line that names the field, the value and the limit.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from jaxpaged.config import EngineConfig, LoadFormat, ResolvedConfig, Scheduling
from jaxpaged.errors import ContextTooLongError, InvalidFieldError, UnsupportedOptionError
from jaxpaged.sampling_params import (
    MAX_N,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    ResolvedParams,
    SamplingParams,
)

# Floats reach the device in 32 bits.
_MAX_FLOAT = 3.4028234e38

_UNSUPPORTED = (
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
)


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets for the options it leaves unset."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """The model's own wishes; values out of range are errors in its file and are refused."""
        values = {
            name: config[name]
            for name in ("temperature", "top_k", "top_p", "min_p")
            if config.get(name) is not None
        }
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        defaults = cls(**values)
        _check_sampling(defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p)
        return defaults


def unsupported_defaults(config: Mapping[str, Any]) -> list[str]:
    """Wishes of a generation config that this build does not honour, as `name=value`."""
    neutral = {"repetition_penalty": 1.0, "min_tokens": 0, "min_new_tokens": 0}
    return [
        f"{name}={config[name]}"
        for name, value in neutral.items()
        if config.get(name) not in (None, value)
    ]


def check_engine_config(config: EngineConfig) -> None:
    """Checks what can be checked before the model is known.

    Raises:
      InvalidFieldError: a field is out of range.
    """
    for name in ("max_model_len", "num_blocks", "max_num_seqs", "max_num_tokens"):
        value = getattr(config, name)
        if value is not None:
            _check_int(name, value, 1)
    for name in ("block_size", "tensor_parallel", "max_queued_requests"):
        _check_int(name, getattr(config, name), 1)
    _check_int("seed", config.seed, -(2**63), 2**63 - 1)
    if not 0 < config.memory_fraction <= 1:
        fraction = config.memory_fraction
        raise InvalidFieldError("memory_fraction", f"memory_fraction={fraction} must be in (0, 1]")
    for name, choices in (("scheduling", Scheduling), ("load_format", LoadFormat)):
        if getattr(config, name) not in get_args(choices):
            raise InvalidFieldError(
                name, f"{name}={getattr(config, name)!r} must be one of {get_args(choices)}"
            )
    if config.generation_config not in ("auto", "none"):
        value = config.generation_config
        raise InvalidFieldError(
            "generation_config", f"generation_config={value!r} must be one of ('auto', 'none')"
        )
    if config.max_num_tokens is not None and config.max_num_seqs is not None:
        _check_int("max_num_tokens", config.max_num_tokens, config.max_num_seqs)


def resolve_params(
    params: SamplingParams,
    config: ResolvedConfig,
    defaults: SamplingDefaults,
    *,
    num_prompt_tokens: int,
    is_chat: bool,
    draw_seed: Callable[[], int],
) -> ResolvedParams:
    """Checks every field and fills in what is unset.

    Raises:
      UnsupportedOptionError: a field is set that this build does not honour.
      InvalidFieldError: a value is out of range.
    """
    for name in _UNSUPPORTED:
        if getattr(params, name) is not None:
            raise UnsupportedOptionError(
                name, f"{name}={getattr(params, name)!r} is not supported by this build"
            )
    room = max(1, config.max_model_len - num_prompt_tokens)
    max_tokens = _or(params.max_tokens, room if is_chat else 16)
    _check_int("max_tokens", max_tokens, 1)
    temperature = _or(params.temperature, defaults.temperature)
    top_k, top_p = _or(params.top_k, defaults.top_k), _or(params.top_p, defaults.top_p)
    min_p = _or(params.min_p, defaults.min_p)
    _check_sampling(temperature, top_k, top_p, min_p)
    n = _or(params.n, 1)
    _check_int("n", n, 1, MAX_N)
    seed = params.seed if params.seed is not None else draw_seed()
    _check_int("seed", seed, -(2**63), 2**63 - 1)
    return ResolvedParams(
        max_tokens=max_tokens,
        temperature=float(temperature),
        # At most a 32-bit number of ids exists: a larger k is off, as is any above the vocabulary.
        top_k=top_k if 0 < top_k < config.vocab_size else 0,
        top_p=float(top_p),
        min_p=float(min_p),
        seed=seed,
        n=n,
        stop=_check_stop(params.stop),
        stop_token_ids=_check_ids("stop_token_ids", params.stop_token_ids or (), config.vocab_size),
        ignore_eos=_check_bool("ignore_eos", params.ignore_eos, False),
        include_stop_string=_check_bool("include_stop_string", params.include_stop_string, False),
        skip_special_tokens=_check_bool("skip_special_tokens", params.skip_special_tokens, True),
        use_prefix_cache=_check_bool("use_prefix_cache", params.use_prefix_cache, True),
        cache_salt=_check_salt(params.cache_salt),
        priority=_check_priority(params.priority, config.scheduling),
    )


def check_prompt(token_ids: Sequence[int], config: ResolvedConfig) -> tuple[int, ...]:
    """The prompt's ids as a tuple.

    Raises:
      InvalidFieldError: empty, or an id outside the vocabulary.
      ContextTooLongError: it leaves no room for one token.
    """
    if not len(token_ids):
        raise InvalidFieldError("prompt", "the prompt is empty: it must have at least 1 token")
    check_prompt_len(len(token_ids), config)
    for position, token_id in enumerate(token_ids):
        _check_id(f"prompt token {position}", token_id, config.vocab_size, field="prompt")
    return tuple(map(int, token_ids))


def check_prompt_len(num_tokens: int, config: ResolvedConfig, *, at_least: bool = False) -> None:
    """Refuses a prompt that leaves no room for one token.

    Args:
      at_least: `num_tokens` is a lower bound, known before the text was tokenised.
    """
    if num_tokens >= config.max_model_len:
        about = "at least " if at_least else ""
        raise ContextTooLongError(
            "prompt",
            f"the prompt has {about}{num_tokens} tokens: with one more it must fit "
            f"max_model_len={config.max_model_len}",
        )


def check_request_id(request_id: str | None) -> str:
    """The id, or a new one when it is None or empty."""
    if request_id:
        if len(request_id) > 256:
            raise InvalidFieldError(
                "request_id", f"request_id of {len(request_id)} characters: at most 256 are allowed"
            )
        # It travels in headers and in logs.
        if not (request_id.isascii() and request_id.isprintable()):
            raise InvalidFieldError(
                "request_id", f"request_id={request_id!a} must be printable ASCII"
            )
        return request_id
    return f"request-{secrets.token_hex(8)}"


def _or[T](value: T | None, default: T) -> T:
    return default if value is None else value


def _check_sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    _check_float("temperature", temperature, lambda x: x >= 0, ">= 0")
    _check_int("top_k", top_k, -1)
    _check_float("top_p", top_p, lambda x: 0 < x <= 1, "in (0, 1]")
    _check_float("min_p", min_p, lambda x: 0 <= x <= 1, "in [0, 1]")


def _check_float(name: str, value: Any, is_ok: Callable[[float], bool], limit: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not asked `math.isfinite`: that fails on an integer above every float.
    if not (is_number and abs(value) <= _MAX_FLOAT and is_ok(value)):
        raise InvalidFieldError(name, f"{name}={value!r} must be a finite number {limit}")


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidFieldError(name, f"{name}={value!r} must be an integer {limit}")


def _check_bool(name: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidFieldError(name, f"{name}={value!r} must be true or false")
    return value


def _check_id(what: str, token_id: Any, vocab_size: int, *, field: str) -> int:
    try:
        number = token_id.__index__()  # numpy's integers too
    except (AttributeError, TypeError):  # an array has the method, and refuses
        raise InvalidFieldError(field, f"{what} is {token_id!r}, not an integer") from None
    if not 0 <= number < vocab_size:
        raise InvalidFieldError(
            field, f"{what} is {number}: ids are 0 to {vocab_size - 1} in this model's vocabulary"
        )
    return number


def _check_ids(name: str, token_ids: Any, vocab_size: int) -> frozenset[int]:
    if not isinstance(token_ids, Iterable):
        raise InvalidFieldError(name, f"{name}={token_ids!r} must be a list of token ids")
    return frozenset(
        _check_id(f"{name}[{i}]", token_id, vocab_size, field=name)
        for i, token_id in enumerate(token_ids)
    )


def _check_stop(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, Iterable | None):
        raise InvalidFieldError("stop", f"stop={stop!r} must be a string or a list of strings")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
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
    return stops


def _check_salt(salt: str | None) -> str:
    if salt is not None and not isinstance(salt, str):
        raise InvalidFieldError("cache_salt", f"cache_salt={salt!r} must be a string")
    return salt or ""


def _check_priority(priority: int | None, scheduling: str) -> int:
    if priority is None:
        return 0
    _check_int("priority", priority, -(2**31), 2**31 - 1)
    if scheduling != "priority":
        raise UnsupportedOptionError(
            "priority", f"priority={priority} needs scheduling='priority', this is {scheduling!r}"
        )
    return priority
