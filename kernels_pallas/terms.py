"""Values in a narrow type to twice its precision: as sums of terms of that type.

A product's operand has the type of the weights. One term is the value rounded; of two, the second
is what rounding took from the first (Dekker, 1971), as far as the type reaches: float16 has nothing
below 2**-24. While reading weights takes longer than multiplying does, as it does for few rows, a
product with two terms takes no more time.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


def num_terms_of(wide: DTypeLike, narrow: DTypeLike) -> int:
    """How many terms of one type stand for a value of another: 1 where both are the same."""
    return 2 if jnp.finfo(wide).bits > jnp.finfo(narrow).bits else 1


def in_terms(x: Float[Array, " *shape"], dtype: DTypeLike) -> Float[Array, "num_terms ..."]:
    """Terms of `dtype` whose sum is x: two where x has a wider type."""
    if num_terms_of(x.dtype, dtype) == 1:
        return x.astype(dtype)[None]
    info = jnp.finfo(dtype)
    # why not joined from two arrays: XLA's GPU fusions end at a concatenation
    x = jnp.broadcast_to(x, (2, *x.shape))
    # why not a cast there and back: XLA takes that for nothing
    rounded = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    is_first = lax.broadcasted_iota(jnp.int32, x.shape, 0) == 0
    return jnp.where(is_first, rounded, x - rounded).astype(dtype)


def sum_of(terms: Float[Array, "num_terms ..."]) -> Float32[Array, "..."]:
    """What the terms stand for."""
    return jnp.sum(terms, axis=0, dtype=jnp.float32)


def result_dtype(terms: Float[Array, "num_terms ..."]) -> DTypeLike:
    """What a product with these terms is rounded to: float32 is what two of them stand for."""
    return terms.dtype if terms.shape[0] == 1 else jnp.float32
