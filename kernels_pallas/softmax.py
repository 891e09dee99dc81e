"""The online-softmax state: attention over keys that arrive tile by tile.

For each query row, over the keys seen so far: m = max of the scores, l = sum of exp(score - m),
acc = sum of exp(score - m) * value. From Milakov and Gimelshein, "Online normalizer calculation
for softmax" (2018), and FlashAttention. A row that has seen no key has m = -inf, l = 0, acc = 0.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32


class SoftmaxState(NamedTuple):
    """All float32; the leading axes are the caller's."""

    m: Float32[Array, "*rows"]
    l: Float32[Array, "*rows"]  # noqa: E741
    acc: Float32[Array, "*rows head_dim"]


def start(q: Float[Array, "*rows head_dim"]) -> SoftmaxState:
    """The state before any key. Made like `q`, it varies over the same mesh axes."""
    return SoftmaxState(
        m=jnp.full_like(q[..., 0], -jnp.inf, jnp.float32),
        l=jnp.zeros_like(q[..., 0], jnp.float32),
        acc=jnp.zeros_like(q, jnp.float32),
    )


def update(
    state: SoftmaxState,
    scores: Float32[Array, "*heads queries keys"],
    visible: Bool[Array, "*heads queries keys"],
    values: Float[Array, "*heads keys head_dim"],
) -> SoftmaxState:
    """Takes in one tile.

    Args:
      scores: may hold anything, NaN included, where `visible` is False.
      visible: what each query sees; broadcasts against `scores`.
      values: must be finite everywhere: a weight of 0 does not hide NaN.
    """
    scores = jnp.where(visible, scores, -jnp.inf)
    m = jnp.maximum(state.m, jnp.max(scores, axis=-1))
    base = _finite(m)
    weights = jnp.exp(scores - base[..., None])
    decay = jnp.exp(state.m - base)
    added = jnp.matmul(weights, values.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return SoftmaxState(
        m=m,
        l=state.l * decay + jnp.sum(weights, axis=-1),
        acc=state.acc * decay[..., None] + added,
    )


def merge(first: SoftmaxState, second: SoftmaxState) -> SoftmaxState:
    """The state of the same rows over both sets of keys."""
    m = jnp.maximum(first.m, second.m)
    first_decay = jnp.exp(first.m - _finite(m))
    second_decay = jnp.exp(second.m - _finite(m))
    return SoftmaxState(
        m=m,
        l=first.l * first_decay + second.l * second_decay,
        acc=first.acc * first_decay[..., None] + second.acc * second_decay[..., None],
    )


def finish(
    state: SoftmaxState, sinks: Float32[Array, "*rows"] | None = None
) -> Float32[Array, "*rows head_dim"]:
    """The attention's output; zeros for rows that saw no key.

    Args:
      sinks: one more logit a row, which takes probability but has no value.
    """
    if sinks is not None:
        state = merge(state, SoftmaxState(sinks, jnp.ones_like(sinks), jnp.zeros_like(state.acc)))
    total = jnp.where(state.l > 0, state.l, 1)
    return state.acc / total[..., None]


def _finite(m: Float32[Array, "*rows"]) -> Float32[Array, "*rows"]:
    # -inf - -inf is NaN: rows without a key subtract 0 instead.
    return jnp.where(m == -jnp.inf, 0, m)
