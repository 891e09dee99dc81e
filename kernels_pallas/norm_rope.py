"""Between the qkv product and attention: norms of queries and keys, and their rotation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


class RopeTables(NamedTuple):
    """Cosine and sine of each token's angles; made once a step and used by every layer."""

    cos: Float32[Array, "num_tokens half_head_dim"]
    sin: Float32[Array, "num_tokens half_head_dim"]


class HeadNorms(NamedTuple):
    """RMS norms over each query's and each key's head_dim (Qwen3)."""

    q_scale: Float[Array, " head_dim"]
    k_scale: Float[Array, " head_dim"]
    eps: float


def rms_norm(
    x: Float[Array, "*rows size"], scale: Float[Array, " size"], eps: float, dtype: DTypeLike
) -> Float[Array, "*rows size"]:
    """Divides by the root mean square over the last axis; float32 inside, rounded once."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    wide_scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (normed * wide_scale).astype(dtype)


def apply_rope(
    x: Float[Array, "num_tokens num_heads head_dim"], tables: RopeTables
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Turns each pair (i, i + head_dim / 2) of every head by its token's angle, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = tables.cos[:, None, :], tables.sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def split_heads(
    heads: Float[Array, "num_tokens num_kv_heads group_and_2 head_dim"],
    norms: HeadNorms | None,
    rope: RopeTables,
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Float[Array, "num_tokens num_kv_heads head_dim"],
    Float[Array, "num_tokens num_kv_heads head_dim"],
]:
    """Queries and keys, normed and turned, and values: in the dtype of `heads`, rounded to it.

    Args:
      heads: of each KV head its queries, its key, its value.
    """
    q = heads[:, :, :-2].reshape(heads.shape[0], -1, heads.shape[3])
    k, v = heads[:, :, -2], heads[:, :, -1]
    if norms is not None:
        q = rms_norm(q, norms.q_scale, norms.eps, q.dtype)
        k = rms_norm(k, norms.k_scale, norms.eps, k.dtype)
    return apply_rope(q, rope), apply_rope(k, rope), v
