"""Logits processors for tests, which leave one token to draw, and requests that use them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.runner.processors import LogitsState
from jaxpaged.sampling_params import SamplingParams

VOCAB_SIZE = 300
IDS = jnp.arange(VOCAB_SIZE)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


def asked(processor: Any, max_tokens: int = 20, **options: Any) -> SamplingParams:
    options = {"temperature": 0.0, **options}
    return SamplingParams(max_tokens=max_tokens, logits_processor=processor, **options)


def only(token_id: jax.Array | int) -> jax.Array:
    return jnp.where(token_id == IDS, 0.0, -jnp.inf)


def position(logits: jax.Array, state: LogitsState) -> jax.Array:
    return only(state.position)
