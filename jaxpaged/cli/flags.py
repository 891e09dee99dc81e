"""Flags that commands share: the fields of EngineConfig and of SamplingParams."""

import argparse
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxpaged.config import EngineConfig
from jaxpaged.errors import InvalidFieldError
from jaxpaged.sampling_params import ChatPrompt, Constraint, Prompt, SamplingParams

_ENGINE_HELP = {
    "dtype": "float32, bfloat16 or float16; default: the checkpoint's, float32 on the CPU",
    "max_model_len": "tokens of prompt and output together; default: the model's, or what fits",
    "block_size": "tokens a block of the KV pool holds",
    "num_blocks": "blocks of the KV pool; default: what the memory fraction leaves",
    "memory_fraction": "share of the device's memory for weights, pool and temporaries",
    "max_num_seqs": "sequences that run at once; default: 256, 8 on the CPU",
    "max_num_tokens": "token budget of a step; default: 8192, 512 on the CPU",
    "enable_prefix_caching": "reuse blocks of earlier prompts that begin alike",
    "load_format": "auto, or random: seeded random weights from config.json alone",
    "generation_config": "auto: sampling defaults come from the model; none: from jaxpaged",
    "attention_impl": "attention: xla, hopper, tpu or reference; default: the platform's own",
    "tensor_parallel": "devices that share each layer",
    "scheduling": "order of waiting requests",
    "overlap": "schedule a step before the tokens of the one before are read",
    "seed": "of random weights, and of the seeds of unseeded requests",
    "max_queued_requests": "requests that may wait; more are refused at once",
}
_SAMPLING_HELP = {
    "max_tokens": "tokens to generate; default: 16, in a chat the rest of the context",
    "min_tokens": "tokens before which nothing ends the text",
    "temperature": "0: greedy",
    "top_k": "draw from the k most likely tokens; 0: off",
    "top_p": "draw from the most likely tokens that together have this probability",
    "min_p": "drop tokens below this share of the largest probability",
    "repetition_penalty": "over prompt and output; 1: off",
    "presence_penalty": "over output tokens; 0: off",
    "frequency_penalty": "over output tokens, by count; 0: off",
    "seed": "same seed, same tokens; default: drawn",
    "n": "generations of the prompt",
    "logit_bias": "added to a token's logit; may be repeated",
    "allowed_token_ids": "only these tokens may be drawn; may be repeated",
    "stop": "string that ends the text; may be repeated",
    "stop_token_ids": "token that ends the text; may be repeated",
    "ignore_eos": "treat end-of-sequence tokens as ordinary ones",
    "include_stop_string": "keep the stop string in the text",
    "logprobs": "log-probabilities of the drawn token and this many best ones",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "skip_special_tokens": "leave special tokens out of the text",
    "use_prefix_cache": "read blocks of earlier prompts",
    "cache_salt": "share cached blocks only under the same salt",
    "priority": "lower first, where the server schedules by priority",
}
_CONSTRAINT_HELP = {
    "json_schema": "the text is JSON that this schema (as JSON, or @FILE) allows",
    "regex": "the whole text matches this regular expression",
    "choice": "the text is one of these; may be repeated",
    "grammar": "the text matches this grammar, in Lark's notation, or @FILE",
}


def add_engine_flags(parser: argparse.ArgumentParser, seed_flag: str = "--seed") -> None:
    """One positional MODEL and one flag for every other field of EngineConfig.

    Args:
      seed_flag: another name where --seed is a request's.
    """
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file, a bundled name (smollm2) or hub id"
    )
    group = parser.add_argument_group("engine")
    add_dataclass_flags(group, EngineConfig, _ENGINE_HELP, {"seed": seed_flag})


def add_dataclass_flags(
    group: Any, config: type, help_texts: Mapping[str, str], flags: Mapping[str, str] | None = None
) -> None:
    """One flag for every field of a dataclass that has a help text.

    Args:
      flags: names for flags that are not called as their field.
    """
    hints = get_type_hints(config)
    for field in fields(config):
        if field.name in help_texts:
            flag = (flags or {}).get(field.name, _flag_of(field.name))
            help_text = help_texts[field.name]
            _add_flag(group, flag, field.name, hints[field.name], help_text, field.default)


def engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of AsyncLLM and LLM that `add_engine_flags` has read."""
    return {field.name: getattr(options, field.name) for field in fields(EngineConfig)}


def limit_device_memory(memory_fraction: float) -> None:
    """Lets JAX take as much as the engine may use. Only works before JAX is imported."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(memory_fraction))


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message of a chat"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")


def prompt_of(options: argparse.Namespace) -> Prompt:
    if not options.chat:
        if options.system is not None:
            raise InvalidFieldError("system", "--system needs --chat")
        return options.prompt
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return ChatPrompt(messages)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every option that can be written as text; unset ones stay None."""
    group = parser.add_argument_group("sampling", "unset: the model's or jaxpaged's default")
    hints = get_type_hints(SamplingParams)
    for name, help_text in _SAMPLING_HELP.items():
        dest = f"sampling_{name}"  # `seed` is also a field of EngineConfig
        _add_flag(group, _flag_of(name), dest, hints[name], help_text, None)
    text = parser.add_argument_group("constraint", "what the whole text must match; at most one")
    choices = text.add_mutually_exclusive_group()
    for name, help_text in _CONSTRAINT_HELP.items():
        action = "append" if name == "choice" else "store"
        # A regular expression or a choice may begin with @; a schema or a grammar cannot.
        kind = _text_or_file if name in ("json_schema", "grammar") else str
        choices.add_argument(
            _flag_of(name), type=kind, metavar="TEXT", action=action, help=help_text
        )


def sampling_params_of(options: argparse.Namespace) -> SamplingParams:
    values = {name: getattr(options, f"sampling_{name}") for name in _SAMPLING_HELP}
    constraint = {name: getattr(options, name) for name in _CONSTRAINT_HELP}
    if any(value is not None for value in constraint.values()):
        values["constraint"] = Constraint(**constraint)
    if values["logit_bias"] is not None:
        values["logit_bias"] = dict(values["logit_bias"])
    return SamplingParams(**values)


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_flag(group: Any, flag: str, dest: str, hint: Any, help_text: str, default: Any) -> None:
    """A flag that reads values of type `hint` into `dest`."""
    if default is not None and not isinstance(default, bool):
        help_text = f"{help_text} (default: {default})"
    common = {"dest": dest, "default": default, "help": help_text}
    alternatives = [kind for kind in _alternatives(hint) if kind is not type(None)]
    origin = get_origin(alternatives[-1])
    if alternatives == [bool]:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif origin is Literal:
        group.add_argument(flag, choices=get_args(alternatives[0]), **common)
    elif origin is Mapping:
        group.add_argument(flag, type=_bias_pair, action="append", metavar="ID:VALUE", **common)
    elif origin is Sequence and str in get_args(alternatives[-1]):
        group.add_argument(flag, action="append", metavar="TEXT", **common)
    elif origin is Sequence:
        group.add_argument(flag, type=int, action="append", metavar="ID", **common)
    else:
        kind = alternatives[0]
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), **common)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _bias_pair(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition(":")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be ID:VALUE") from None


def _text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text[1:]!r}: {error}") from error
