"""Drawing tokens from logits: exact top-k, top-p and min-p without sorting the vocabulary.

Thresholds are found digit by digit on the bits of the logits (an order-preserving map of float32 to
int32), in as many passes over the row whatever its content. A draw adds Gumbel noise and takes the
largest: the noise of a token depends on the row's seed, the token's absolute position and its id,
and on nothing else (Gumbel-max trick; Maddison et al., "A* Sampling", 2014).
"""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxpaged.runner.inputs import SampleInputs


class Variant(enum.Enum):
    """Which executable draws: all rows greedy, or any options."""

    GREEDY = "greedy"
    RANDOM = "random"


def sample_tokens(
    logits: Float32[Array, "num_samples vocab"],
    inputs: SampleInputs,
    variant: Variant,
    digit_bits: int = 1,
) -> tuple[Int32[Array, " num_samples"], Bool[Array, " num_samples"]]:
    """Draws one token a row.

    Order: temperature, min_p, top_k, top_p, each on what the one before left.

    Args:
      digit_bits: of the search for thresholds. More mean fewer passes over a row and more work in
        each; they change nothing else.

    Returns:
      The ids, and whether the row could be drawn from: no NaN or +inf, and not all -inf.
    """
    highest = logits.max(axis=-1, keepdims=True)
    is_finite = jnp.isfinite(highest[:, 0])
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if variant is Variant.GREEDY:
        return greedy, is_finite
    is_random = inputs.temperature > 0
    temperature = jnp.where(is_random, inputs.temperature, 1.0)[:, None]
    # The maximum goes first: a tiny temperature then gives -inf for the others, never NaN.
    scaled = jnp.where(logits < highest, (logits - highest) / temperature, 0.0)
    keep = kept_tokens(scaled, inputs, digit_bits)
    drawn = jnp.argmax(jnp.where(keep, scaled + _noise(inputs, logits.shape[1]), -jnp.inf), axis=-1)
    return jnp.where(is_random, drawn.astype(jnp.int32), greedy), is_finite


def kept_tokens(
    scaled: Float32[Array, "num_samples vocab"],
    inputs: SampleInputs,
    digit_bits: int = 1,
) -> Bool[Array, "num_samples vocab"]:
    """The tokens that min_p, then top_k, then top_p leave; at least one a row.

    Args:
      scaled: logits over temperature, less the row's maximum, so that the best are 0.
    """
    keep = scaled >= jnp.log(inputs.min_p)[:, None]
    return _keep_top(scaled, keep, inputs.top_k, inputs.top_p, digit_bits)


def _keep_top(
    scaled: Float32[Array, "num_samples vocab"],
    keep: Bool[Array, "num_samples vocab"],
    top_k: Int32[Array, " num_samples"],
    top_p: Float32[Array, " num_samples"],
    digit_bits: int,
) -> Bool[Array, "num_samples vocab"]:
    """Applies top_k, then top_p; a pass is skipped when no row asks for it."""
    keys = _ordered_bits(scaled)

    def apply_top_k(keep):
        wanted = jnp.where(top_k > 0, top_k, scaled.shape[1])
        wanted = wanted.astype(jnp.float32)
        return _keep_heaviest(keys, keep, jnp.ones_like(scaled), wanted, digit_bits)

    def apply_top_p(keep):
        weights = jnp.where(keep, jnp.exp(scaled), 0.0)
        # Never 0: a top_p too small for float32 still keeps the best token.
        wanted = jnp.maximum(top_p * weights.sum(axis=-1), jnp.finfo(jnp.float32).tiny)
        kept = _keep_heaviest(keys, keep, weights, wanted, digit_bits)
        return jnp.where(top_p[:, None] < 1, kept, keep)

    keep = jax.lax.cond((top_k > 0).any(), apply_top_k, lambda keep: keep, keep)
    return jax.lax.cond((top_p < 1).any(), apply_top_p, lambda keep: keep, keep)


def _keep_heaviest(
    keys: Int32[Array, "num_samples vocab"],
    keep: Bool[Array, "num_samples vocab"],
    weights: Float32[Array, "num_samples vocab"],
    wanted: Float32[Array, " num_samples"],
    digit_bits: int,
) -> Bool[Array, "num_samples vocab"]:
    """The fewest kept tokens, largest keys and then lowest ids first, whose weights reach `wanted`.

    All of them when they do not reach it; at least one.

    Args:
      weights: equal where the keys are.
    """

    def reaches(offset: UInt32[Array, " num_samples"]) -> Bool[Array, " num_samples"]:
        is_counted = keep & (keys >= _signed(offset)[:, None])
        return jnp.where(is_counted, weights, 0.0).sum(axis=-1) >= wanted

    threshold = _signed(_largest_offset(reaches, len(keys), 32, digit_bits))[:, None]
    above = keep & (keys > threshold)
    ties = keep & (keys == threshold)
    missing = wanted - jnp.where(above, weights, 0.0).sum(axis=-1)
    num_needed = jnp.maximum(jnp.ceil(missing / jnp.where(ties, weights, 0.0).max(axis=-1)), 1.0)
    ids = jnp.arange(keys.shape[1], dtype=jnp.uint32)[None, :]

    def lowest_ids(ties: Bool[Array, "num_samples vocab"]) -> Bool[Array, "num_samples vocab"]:
        def are_few(offset: UInt32[Array, " num_samples"]) -> Bool[Array, " num_samples"]:
            before = ties & (ids < offset[:, None])
            return before.sum(axis=-1, dtype=jnp.float32) < num_needed

        num_bits = max(1, (keys.shape[1] - 1).bit_length())
        last = _largest_offset(are_few, len(keys), num_bits, digit_bits)
        return ties & (ids <= last[:, None])

    has_surplus = ties.sum(axis=-1, dtype=jnp.float32) > num_needed
    return above | jax.lax.cond(has_surplus.any(), lowest_ids, lambda ties: ties, ties)


def _largest_offset(
    holds: Callable[[UInt32[Array, " num_samples"]], Bool[Array, " num_samples"]],
    num_samples: int,
    num_bits: int,
    digit_bits: int,
) -> UInt32[Array, " num_samples"]:
    """Per row the largest number of `num_bits` bits for which `holds`, or 0 if it never does.

    It must hold from there down. All values of a digit are tried in one pass over the row.
    """
    assert 32 % digit_bits == 0, f"{digit_bits=} must divide 32"
    num_digits = -(-num_bits // digit_bits)

    def set_digit(i: Any, offset: UInt32[Array, " num_samples"]) -> UInt32[Array, " num_samples"]:
        shift = jnp.uint32(digit_bits * (num_digits - 1)) - jnp.uint32(i) * jnp.uint32(digit_bits)
        tried = [offset | (jnp.uint32(digit) << shift) for digit in range(1, 1 << digit_bits)]
        found = sum(holds(candidate).astype(jnp.uint32) for candidate in tried)
        return offset | (found << shift)

    start = jnp.zeros(num_samples, jnp.uint32)
    return jax.lax.fori_loop(0, num_digits, set_digit, start)


def _signed(offset: UInt32[Array, " num_samples"]) -> Int32[Array, " num_samples"]:
    """The int32 that is `offset` above the least one."""
    return jax.lax.bitcast_convert_type(offset ^ jnp.uint32(1 << 31), jnp.int32)


def _ordered_bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Maps float32 to int32, keeping their order (-0 counts as 0)."""
    # why not x + 0.0: the compiler takes that for x
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _noise(inputs: SampleInputs, vocab: int) -> Float32[Array, "num_samples vocab"]:
    """Gumbel noise of every token id; element i depends on seed, position and i alone."""

    def row_noise(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    return jax.vmap(row_noise)(inputs.seeds, inputs.positions)
