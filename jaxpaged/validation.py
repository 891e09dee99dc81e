"""Checks of settings and prompts before anything is queued; sampling_validation.py has the rest.

Each refusal is one line that names the field, the value and the limit.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from jaxpaged.config import EngineConfig, LoadFormat, ResolvedConfig, Scheduling
from jaxpaged.errors import ContextTooLongError, InvalidFieldError
from jaxpaged.field_checks import check_ids, check_int
from jaxpaged.outputs import ModelInfo


def make_engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Checks what can be checked before the model is known.

    Args:
      options: the other fields of `EngineConfig`.

    Raises:
      TypeError: there is no such field.
      InvalidFieldError: a field is out of range.
    """
    if unknown := options.keys() - {field.name for field in fields(EngineConfig)}:
        raise TypeError(
            f"there is no option {min(unknown)!r}: the options are the fields of EngineConfig, "
            "and docs/options.md has a list of names elsewhere"
        )
    config = EngineConfig(model, **options)
    _check_engine_config(config)
    return config


def _check_engine_config(config: EngineConfig) -> None:
    for name in ("max_model_len", "num_blocks", "max_num_seqs", "max_num_tokens"):
        value = getattr(config, name)
        if value is not None:
            check_int(name, value, 1)
    for name in ("block_size", "tensor_parallel", "max_queued_requests"):
        check_int(name, getattr(config, name), 1)
    check_int("seed", config.seed, -(2**63), 2**63 - 1)
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
        check_int("max_num_tokens", config.max_num_tokens, config.max_num_seqs)


def check_prompt(
    token_ids: Sequence[int], config: ResolvedConfig, *, num_new: int = 1
) -> tuple[int, ...]:
    """The prompt's ids as a tuple.

    Args:
      num_new: tokens that must fit behind it: 0 where nothing is generated.

    Raises:
      InvalidFieldError: empty, or an id outside the vocabulary.
      ContextTooLongError: it leaves no room for them.
    """
    if not len(token_ids):
        raise InvalidFieldError("prompt", "the prompt is empty: it must have at least 1 token")
    check_prompt_len(len(token_ids), config, num_new=num_new)
    return tuple(check_ids("prompt", token_ids, config.vocab_size, what="prompt token"))


def check_prompt_len(
    num_tokens: int, config: ResolvedConfig | ModelInfo, *, num_new: int = 1, at_least: bool = False
) -> None:
    """Refuses a prompt that leaves no room for `num_new` tokens.

    Args:
      at_least: `num_tokens` is a lower bound, known before the text was tokenised.
    """
    if num_tokens + num_new > config.max_model_len:
        about, with_one = "at least " if at_least else "", "with one more " if num_new else ""
        raise ContextTooLongError(
            "prompt",
            f"the prompt has {about}{num_tokens} tokens: {with_one}it must fit "
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
