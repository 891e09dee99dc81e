"""Drawing tokens from logits: exact top-k, top-p and min-p without sorting the vocabulary.

A draw adds Gumbel noise and takes the largest: the noise of a token depends on the row's seed, the
token's absolute position and its id, and on nothing else (Gumbel-max trick; Maddison et al., "A*
Sampling", 2014). What top_k and top_p leave out is refused after it was drawn (rejection.py).
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxpaged.runner.inputs import SampleInputs
from jaxpaged.runner.rejection import draw_kept, pad_vocab


class Variant(enum.Enum):
    """Which executable draws; the host picks the least that does for every row of the step.

    A row gets the same token from each that does for it. All rows are greedy; no row has top_k or
    top_p; no row has both; any options.
    """

    GREEDY = "greedy"
    RANDOM = "random"
    LIMITED = "limited"
    LIMITED_BOTH = "limited_both"

    @property
    def has_loops(self) -> bool:
        return self in (Variant.LIMITED, Variant.LIMITED_BOTH)


def sample_tokens(
    logits: Float32[Array, "num_samples vocab"],
    inputs: SampleInputs,
    variant: Variant,
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
    gaps = gaps_of(logits, highest, inputs)
    if variant is Variant.RANDOM:
        drawn = jnp.argmax(_noise(inputs, gaps.shape[1]) - gaps, axis=-1).astype(jnp.int32)
        return jnp.where(is_random, drawn, greedy), is_finite
    gaps = pad_vocab(gaps)
    drawn, is_found = draw_kept(
        gaps,
        _noise(inputs, gaps.shape[1]) - gaps,
        jnp.where(is_random, inputs.top_k, 0),
        jnp.where(is_random, inputs.top_p, 1.0),
        has_both=variant is Variant.LIMITED_BOTH,
    )
    # The best token is always kept.
    return jnp.where(is_random & is_found, drawn, greedy), is_finite


def gaps_of(
    logits: Float32[Array, "num_samples vocab"],
    highest: Float32[Array, "num_samples 1"],
    inputs: SampleInputs,
) -> Float32[Array, "num_samples vocab"]:
    """How far below the row's highest logits are, over temperature; inf where min_p leaves none."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]
    # The maximum goes first: a tiny temperature then gives inf for the others, never NaN.
    gaps = jnp.where(logits < highest, (highest - logits) / temperature, 0.0)
    return jnp.where(gaps <= -jnp.log(inputs.min_p)[:, None], gaps, jnp.inf)


def _noise(inputs: SampleInputs, vocab: int) -> Float32[Array, "num_samples vocab"]:
    """Gumbel noise of every token id; element i depends on seed, position and i alone."""

    def row_noise(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        # Otherwise a token's noise would depend on how many tokens there are.
        with jax.threefry_partitionable(True):
            return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    return jax.vmap(row_noise)(inputs.seeds, inputs.positions)
