"""Products of few rows with weights: the Hopper kernel where it is the faster, XLA's elsewhere."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.product_hopper import can_multiply, product, product_tiling


def precision_of(dtype: DTypeLike) -> jax.lax.Precision:
    """Of a product: float32 means float32 everywhere.

    The default is TensorFloat-32 on a GPU and bfloat16 on a TPU, with 10 and 7 bits of fraction.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def matmul(
    x: Float[Array, "num_tokens in_size"],
    w: Float[Array, "in_size out_size"],
    out_dtype: DTypeLike,
    *,
    num_programs: int | None,
) -> Float[Array, "num_tokens out_size"]:
    """See `ops.matmul`.

    Args:
      num_programs: multiprocessors of a Hopper GPU; None: elsewhere.
    """
    if num_programs is None or not can_multiply(x, w):
        return jnp.matmul(x, w, precision=precision_of(x.dtype), preferred_element_type=out_dtype)
    num_rows, inner = x.shape
    tiling = product_tiling(num_rows, inner, w.shape[1], is_gated=False, num_programs=num_programs)
    sums = product(x, w, tiling)
    return sums.sum(axis=0).astype(out_dtype) if tiling.split > 1 else sums[0].astype(out_dtype)


def gated_matmul(
    x: Float[Array, "num_tokens in_size"],
    w: Float[Array, "in_size twice_out_size"],
    *,
    num_programs: int | None,
) -> Float[Array, "num_tokens out_size"]:
    """See `ops.gated_matmul`; `num_programs` as in `matmul`."""
    if num_programs is None or not can_multiply(x, w, is_gated=True):
        sums = jnp.matmul(x, w, precision=precision_of(x.dtype), preferred_element_type=x.dtype)
        return gated(sums)
    (num_rows, inner), columns = x.shape, w.shape[1] // 2
    tiling = product_tiling(num_rows, inner, columns, is_gated=True, num_programs=num_programs)
    return product(x, w, tiling, is_gated=True)[0]


def gated(
    gate_up: Float[Array, "num_tokens twice_out_size"],
) -> Float[Array, "num_tokens out_size"]:
    """silu(gate) * up, rounded once: gates are the first half of the columns."""
    # why widened: a GPU has bfloat16 products, and XLA would round after each of them
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)
