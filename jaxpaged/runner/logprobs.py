"""Log-probabilities: the model's own, before temperature, masks and penalties.

Packed for the way to the front as `jaxpaged.logprobs` describes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxpaged.runner.forward import head_logits
from jaxpaged.runner.weights import Weights
from jaxpaged.sampling_params import MAX_LOGPROBS


def top_logprobs(
    logits: Float32[Array, "num_rows vocab"], token_ids: Int32[Array, " num_rows"]
) -> Int32[Array, "num_rows packed"]:
    """Packs what there is to tell of `token_ids` and of the best tokens; equals in order of id."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    # Compared as logits: two that differ may have the same log-probability.
    chosen_logit = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    ids = jnp.arange(logits.shape[1])[None, :]
    is_before = (logits == chosen_logit) & (ids < token_ids[:, None])
    rank = 1 + jnp.sum((logits > chosen_logit) | is_before, axis=-1, dtype=jnp.int32)
    # top_k puts 0 before -0, which are equals here; adding 0 would be optimised away.
    unsigned_zeros = jnp.where(logits == 0, 0.0, logits)
    _, best = jax.lax.top_k(unsigned_zeros, min(MAX_LOGPROBS, logits.shape[1]))
    best_logprobs = jnp.take_along_axis(logprobs, best, axis=-1)
    pairs = jnp.stack([best, _bits(best_logprobs)], axis=-1)
    return jnp.concatenate([_bits(chosen), rank[:, None], pairs.reshape(len(best), -1)], axis=1)


def score_step(
    weights: Weights,
    hidden: Float[Array, "num_tokens hidden_size"],
    token_ids: Int32[Array, " num_tokens"],
) -> Int32[Array, "num_tokens packed"]:
    """The final norm and the head on a slice of prompt tokens, then `top_logprobs`.

    Args:
      hidden: what the last layer gave for the token before each of `token_ids`.
    """
    return top_logprobs(head_logits(weights, hidden), token_ids)


def _bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
