"""The sampler as tests call it: jitted, its inputs made of options by name."""

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.runner.inputs import SampleInputs, SampleOptions, sample_words
from jaxpaged.runner.rejection import find_limits, look_before, pad_vocab
from jaxpaged.runner.sampling import Variant, gaps_of, sample_tokens

# What changes nothing, and its type on the device.
_DEFAULTS: dict[str, tuple[Any, type]] = {
    "temperature": (1.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "repetition_penalty": (0.0, np.float32),  # the row's logits are left alone
    "presence_penalty": (0.0, np.float32),
    "frequency_penalty": (0.0, np.float32),
    "first_end_position": (0, np.int32),
    "last_token_ids": (0, np.int32),
    "is_decode": (False, np.bool_),
}


def make_inputs(
    num_rows: int, *, seeds: Any = 0, positions: Any = None, rows: Any = None, **options: Any
) -> SampleInputs:
    """Row i draws for place i at position i, unless told otherwise; without options nothing is on.

    Args:
      seeds: signed 64-bit.
      options: each one value for all rows, or one a row.
    """
    unknown = options.keys() - _DEFAULTS.keys()
    assert not unknown, unknown
    words = np.broadcast_to(np.asarray(seeds, np.int64), num_rows)
    arrays = {
        name: np.broadcast_to(np.asarray(options.get(name, value), dtype), num_rows)
        for name, (value, dtype) in _DEFAULTS.items()
    }
    return SampleInputs(
        rows=_int32(np.arange(num_rows) if rows is None else rows),
        positions=_int32(np.arange(num_rows) if positions is None else positions),
        seeds=jnp.asarray(np.stack([words >> 32, words & 0xFFFFFFFF], axis=1).astype(np.uint32)),
        **{name: jnp.asarray(array) for name, array in arrays.items()},
    )


def words_of(inputs: SampleInputs) -> jax.Array:
    """The packed form of `inputs`."""
    seeds = {"seed_high": inputs.seeds[:, 0], "seed_low": inputs.seeds[:, 1]}
    options = [
        seeds[option.name] if option.name in seeds else getattr(inputs, option.name)
        for option in fields(SampleOptions)
    ]
    return sample_words(
        inputs.rows,
        inputs.positions,
        inputs.last_token_ids,
        inputs.is_decode,
        jnp.concatenate([jax.lax.bitcast_convert_type(option, jnp.int32) for option in options]),
    )


def _int32(values: Any) -> Any:
    return jnp.asarray(np.asarray(values), jnp.int32)


draw = jax.jit(sample_tokens, static_argnames="variant")
draw_random = partial(draw, variant=Variant.LIMITED_BOTH)


@partial(jax.jit, static_argnames="has_both")
def kept_mask(logits: jax.Array, inputs: SampleInputs, has_both: bool = True) -> jax.Array:
    """The tokens that may be drawn: each is looked at as if it had just been."""
    gaps = pad_vocab(gaps_of(logits, logits.max(axis=-1, keepdims=True), inputs))
    limits, _ = find_limits(gaps, -gaps, inputs.top_k, inputs.top_p, has_both=has_both)

    def is_kept(token_id: jax.Array) -> jax.Array:
        bounds = jax.lax.bitcast_convert_type(gaps[:, token_id], jnp.int32)
        token_ids = jnp.full(len(gaps), token_id, jnp.int32)
        before = look_before(gaps, -gaps, bounds, token_ids)
        return limits.keep(before.weight, before.count)

    kept = jax.lax.map(is_kept, jnp.arange(logits.shape[1])).T
    return kept & ((inputs.min_p[:, None] == 0) | (gaps[:, : logits.shape[1]] < jnp.inf))
