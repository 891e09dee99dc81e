"""Drawing tokens from logits: exact top-k, top-p and min-p without sorting the vocabulary.

Thresholds are found by bisection on the bits of the logits (an order-preserving map of float32 to
int32), 32 passes over the row whatever its content. A draw adds Gumbel noise and takes the largest:
the noise of a token depends on the row's seed, the token's absolute position and its id, and on
nothing else (Gumbel-max trick; Maddison et al., "A* Sampling", 2014).
"""

import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxpaged.runner.inputs import SampleInputs


class Variant(enum.Enum):
    """Which executable draws: all rows greedy, or any options."""

    GREEDY = "greedy"
    RANDOM = "random"


def sample_tokens(
    logits: Float32[Array, "num_samples vocab"], inputs: SampleInputs, variant: Variant
) -> tuple[Int32[Array, " num_samples"], Bool[Array, " num_samples"]]:
    """Draws one token a row.

    Order: temperature, min_p, top_k, top_p, each on what the one before left.

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
    keep = kept_tokens(scaled, inputs)
    drawn = jnp.argmax(jnp.where(keep, scaled + _noise(inputs, logits.shape[1]), -jnp.inf), axis=-1)
    return jnp.where(is_random, drawn.astype(jnp.int32), greedy), is_finite


def kept_tokens(
    scaled: Float32[Array, "num_samples vocab"], inputs: SampleInputs
) -> Bool[Array, "num_samples vocab"]:
    """The tokens that min_p, then top_k, then top_p leave; at least one a row.

    Args:
      scaled: logits over temperature, less the row's maximum, so that the best are 0.
    """
    keep = scaled >= jnp.log(inputs.min_p)[:, None]
    return _keep_top(scaled, keep, inputs.top_k, inputs.top_p)


def _keep_top(
    scaled: Float32[Array, "num_samples vocab"],
    keep: Bool[Array, "num_samples vocab"],
    top_k: Int32[Array, " num_samples"],
    top_p: Float32[Array, " num_samples"],
) -> Bool[Array, "num_samples vocab"]:
    """Applies top_k, then top_p; a pass is skipped when no row asks for it."""
    keys = _ordered_bits(scaled)

    def apply_top_k(keep):
        wanted = jnp.where(top_k > 0, top_k, scaled.shape[1])
        return _keep_heaviest(keys, keep, jnp.ones_like(scaled), wanted.astype(jnp.float32))

    def apply_top_p(keep):
        weights = jnp.where(keep, jnp.exp(scaled), 0.0)
        # Never 0: a top_p too small for float32 still keeps the best token.
        wanted = jnp.maximum(top_p * weights.sum(axis=-1), jnp.finfo(jnp.float32).tiny)
        kept = _keep_heaviest(keys, keep, weights, wanted)
        return jnp.where(top_p[:, None] < 1, kept, keep)

    keep = jax.lax.cond((top_k > 0).any(), apply_top_k, lambda keep: keep, keep)
    return jax.lax.cond((top_p < 1).any(), apply_top_p, lambda keep: keep, keep)


def _keep_heaviest(
    keys: Int32[Array, "num_samples vocab"],
    keep: Bool[Array, "num_samples vocab"],
    weights: Float32[Array, "num_samples vocab"],
    wanted: Float32[Array, " num_samples"],
) -> Bool[Array, "num_samples vocab"]:
    """The fewest kept tokens, largest keys and then lowest ids first, whose weights reach `wanted`.

    All of them when they do not reach it; at least one.
    """

    def weight_from(threshold):
        return jnp.where(keep & (keys >= threshold[:, None]), weights, 0.0).sum(axis=-1)

    threshold = _largest_key(lambda t: weight_from(t) >= wanted, keys.shape[0])
    above = keep & (keys > threshold[:, None])
    ties = keep & (keys == threshold[:, None])
    missing = wanted - jnp.where(above, weights, 0.0).sum(axis=-1)
    # Weight of the ties with lower ids: a tie is needed while that is short of what is missing.
    before = jnp.cumsum(jnp.where(ties, weights, 0.0), axis=-1) - jnp.where(ties, weights, 0.0)
    first_tie = ties & (jnp.cumsum(ties, axis=-1) == 1)
    needed = (before < missing[:, None]) | (first_tie & ~above.any(axis=-1, keepdims=True))
    return above | (ties & needed)


def _largest_key(
    holds: Callable[[Int32[Array, " num_samples"]], Bool[Array, " num_samples"]], num_samples: int
) -> Int32[Array, " num_samples"]:
    """Per row the largest int32 for which `holds`, where it holds from there down.

    The least int32 if it never does.
    """

    def signed(offset: UInt32[Array, " num_samples"]) -> Int32[Array, " num_samples"]:
        return jax.lax.bitcast_convert_type(offset ^ jnp.uint32(1 << 31), jnp.int32)

    def set_bit(i, offset):
        candidate = offset | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(signed(candidate)), candidate, offset)

    # `offset` is the distance from the least int32, found bit by bit.
    return signed(jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(num_samples, jnp.uint32)))


def _ordered_bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Maps float32 to int32, keeping their order (-0 counts as 0)."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _noise(inputs: SampleInputs, vocab: int) -> Float32[Array, "num_samples vocab"]:
    """Gumbel noise of every token id; element i depends on seed, position and i alone."""

    def row_noise(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    return jax.vmap(row_noise)(inputs.seeds, inputs.positions)
