"""Random requests with random options, every one of them valid, from a seed."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import jax.numpy as jnp

from jaxpaged.sampling_params import Constraint, SamplingParams

# Of the tiny models' logits, wider than the byte tokenizer.
VOCAB_SIZE = 300
MAX_PROMPT_TOKENS = 100
MAX_TOKENS = 24
# Ids that the tiny models draw often: requests end by them, at various lengths.
EOS_TOKEN_IDS = (136, 257)

_CONSTRAINTS = (
    Constraint(regex="[a-f]{2,9}(xy|z)*"),
    Constraint(choice=["left", "right", "leftmost", "été"]),
    Constraint(json_schema={"type": "array", "items": {"type": "integer"}, "maxItems": 3}),
    Constraint(json_schema='{"properties": {"a": {"enum": ["b", "bc"]}}, "required": ["a"]}'),
    Constraint(grammar='start: "a" rest\nrest: "b" | "c" rest'),
)


def sharpen(logits: Any, state: Any) -> Any:
    return logits * jnp.where(state.position % 2 == 0, 1.5, 0.75)


def avoid_output(logits: Any, state: Any) -> Any:
    return logits - state.output_counts.astype(jnp.float32)


def lift(logits: Any, state: Any) -> Any:
    """Would lift what is masked, too."""
    return jnp.maximum(logits, 0.0)


PROCESSORS = (sharpen, avoid_output, lift)


@dataclass(frozen=True)
class RandomRequest:
    prompt: list[int]
    params: SamplingParams


def random_requests(
    seed: int, count: int, *, processors: tuple[Any, ...] = PROCESSORS
) -> list[RandomRequest]:
    """Requests whose prompts share prefixes, and whose options are any that go together.

    Args:
      processors: what `logits_processor` is picked from; empty where functions cannot go.
    """
    rng = Random(seed)
    prefixes = [_ids(rng, length) for length in (1, 7, 16, 33, 48, 80)]
    return [RandomRequest(_prompt(rng, prefixes), _params(rng, processors)) for _ in range(count)]


def _ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _prompt(rng: Random, prefixes: list[list[int]]) -> list[int]:
    length = rng.choice([1, 2, 15, 16, 17, 32, 33, rng.randint(1, MAX_PROMPT_TOKENS)])
    prefix = rng.choice(prefixes)[: rng.randint(1, MAX_PROMPT_TOKENS)]
    if rng.random() < 0.3:
        return prefix  # others begin with it, or are the same
    return (prefix + _ids(rng, length))[:MAX_PROMPT_TOKENS]


def _params(rng: Random, processors: tuple[Any, ...]) -> SamplingParams:
    options = _drawing(rng) | _penalties(rng) | _ends(rng) | _told(rng)
    options["n"] = rng.choice([None, 1, 1, 2, 3, 4])
    options["max_tokens"] = rng.choice([None, rng.randint(1, 4), rng.randint(1, MAX_TOKENS)])
    if rng.random() < 0.2:
        options["constraint"] = rng.choice(_CONSTRAINTS)
        # No byte's id: an end that the text needs would leave it nothing to draw.
        options["stop_token_ids"] = rng.sample(range(258, VOCAB_SIZE), 3)
    else:
        options |= _tokens(rng, options["max_tokens"] or 16)
    if processors and rng.random() < 0.1:
        options["logits_processor"] = rng.choice(processors)
    if rng.random() < 0.05:
        options |= {"n": 1, "prompt_logprobs": 2, "max_tokens": 0, "min_tokens": 0}
    return SamplingParams(**options)


def _drawing(rng: Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.0, 0.0, None, 0.4, 1.0, 1.5, 1e-30]),
        "top_k": rng.choice([None, None, 0, -1, 1, 6, 50, 1000]),
        "top_p": rng.choice([None, None, 1.0, 0.95, 0.6, 1e-6]),
        "min_p": rng.choice([None, None, 0.0, 0.02, 0.3]),
        # Some of them in several requests.
        "seed": rng.choice([0, 1, -1, 2**63 - 1, -(2**63), rng.getrandbits(63)]),
    }


def _penalties(rng: Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    return {
        "repetition_penalty": rng.choice([None, 1.0, 0.8, 1.3, 5.0]),
        "presence_penalty": rng.choice([None, 0.0, -0.7, 1.1, 2.0]),
        "frequency_penalty": rng.choice([None, 0.0, -0.3, 0.4, 2.0]),
    }


def _tokens(rng: Random, max_tokens: int) -> dict[str, Any]:
    """What would leave a constrained text nothing to draw."""
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["logit_bias"] = _bias(rng)
    if rng.random() < 0.2:
        options["allowed_token_ids"] = [*_ids(rng, rng.choice([4, 30, 200])), 65]
    if rng.random() < 0.3:
        options["min_tokens"] = rng.randint(0, max_tokens)
    return options


def _bias(rng: Random) -> Mapping[int, float]:
    height = rng.choice([1.0, 5.0, 1000.0])  # the last one is clamped
    return {token_id: rng.uniform(-height, height) for token_id in _ids(rng, rng.randint(1, 20))}


def _ends(rng: Random) -> dict[str, Any]:
    options: dict[str, Any] = {"ignore_eos": rng.choice([None, True, False])}
    if rng.random() < 0.2:
        options["stop_token_ids"] = [i for i in _ids(rng, rng.randint(1, 20)) if i != 65]
    if rng.random() < 0.3:
        options["stop"] = [chr(rng.randrange(32, 127)) for _ in range(rng.randint(1, 12))]
        options["stop"] += rng.choice([[], ["ab", "a}"], ["\N{REPLACEMENT CHARACTER}"]])
        options["include_stop_string"] = rng.choice([None, True, False])
    return options


def _told(rng: Random) -> dict[str, Any]:
    return {
        "logprobs": rng.choice([None, None, 0, 1, 5, 20]),
        "prompt_logprobs": rng.choice([None, None, None, None, 0, 3, 20]),
        "skip_special_tokens": rng.choice([None, True, False]),
        "use_prefix_cache": rng.choice([None, None, True, False]),
        "cache_salt": rng.choice([None, None, "", "a", "b"]),
    }
