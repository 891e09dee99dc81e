"""Products of few rows with weights: the Hopper kernel where it is the faster, XLA's elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.product_hopper import can_multiply, gated_product, product, product_tiling
from kernels_pallas.terms import in_terms, result_dtype, sum_of


def precision_of(dtype: DTypeLike) -> jax.lax.Precision:
    """Of a product: float32 means float32 everywhere.

    The default is TensorFloat-32 on a GPU and bfloat16 on a TPU, with 10 and 7 bits of fraction.
    """
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def matmul_in_parts(
    x: Float[Array, "num_terms num_tokens in_size"],
    w: Float[Array, "in_size out_size"],
    out_dtype: DTypeLike | None,
    *,
    num_programs: int | None,
) -> Float[Array, "num_parts num_tokens out_size"]:
    """See `ops.matmul_in_parts`.

    Args:
      num_programs: multiprocessors of a Hopper GPU; None: elsewhere.
    """
    out_dtype = out_dtype or result_dtype(x)
    if num_programs is None or not can_multiply(x, w):
        return _xla_matmul(x, w, out_dtype)[None]
    tiling = product_tiling(x, w.shape[1], is_gated=False, num_programs=num_programs)
    return product(x, w, tiling, out_dtype)


def matmul(
    x: Float[Array, "num_terms num_tokens in_size"],
    w: Float[Array, "in_size out_size"],
    *,
    num_programs: int | None,
) -> Float[Array, "num_tokens out_size"]:
    """See `ops.matmul`; `num_programs` as in `matmul_in_parts`."""
    parts = matmul_in_parts(x, w, None, num_programs=num_programs)
    return sum_of(parts).astype(result_dtype(x)) if len(parts) > 1 else parts[0]


def gated_matmul(
    x: Float[Array, "num_terms num_tokens in_size"],
    w: Float[Array, "in_size twice_out_size"],
    *,
    num_programs: int | None,
) -> Float[Array, "num_terms num_tokens out_size"]:
    """See `ops.gated_matmul`; `num_programs` as in `matmul_in_parts`."""
    if num_programs is None or not can_multiply(x, w, is_gated=True):
        return gated(matmul(x, w, num_programs=None), x.dtype)
    tiling = product_tiling(x, w.shape[1] // 2, is_gated=True, num_programs=num_programs)
    return gated_product(x, w, tiling)


def gated(
    gate_up: Float[Array, "num_tokens twice_out_size"], dtype: DTypeLike
) -> Float[Array, "num_terms num_tokens out_size"]:
    """silu(gate) * up, where gates are the first half of the columns; in terms of `dtype`."""
    # why widened: a GPU has bfloat16 products, and XLA would round after each of them
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return in_terms((jax.nn.silu(gate) * up).astype(gate_up.dtype), dtype)


def _xla_matmul(
    x: Float[Array, "num_terms num_tokens in_size"],
    w: Float[Array, "in_size out_size"],
    out_dtype: DTypeLike,
) -> Float[Array, "num_tokens out_size"]:
    num_terms, num_tokens, in_size = x.shape
    ways: Any = {"precision": precision_of(x.dtype)}
    if num_terms == 1:
        return jnp.matmul(x[0], w, preferred_element_type=out_dtype, **ways)
    sums = jnp.matmul(x.reshape(-1, in_size), w, preferred_element_type=jnp.float32, **ways)
    return sum_of(sums.reshape(num_terms, num_tokens, -1)).astype(out_dtype)
