"""How precisely a step computes: the fewer its tokens, the more, where that costs little time.

x, between the layers, and what is added to it, is float32 in steps of few tokens, in models of any
dtype: rounding it again and again makes more than half of a bfloat16 model's error, but with many
tokens twice the bytes would cost 4 %. In still smaller steps, where reading the weights takes
longer than multiplying, products read two terms (`kernels_pallas.terms`), and between two of them
nothing is rounded but attention's weights: what remains is the rounding of the parameters, and of
keys and values in the pool. The head reads two terms of so few logit rows in any step. (A TPU's
attention rounds queries and results, too.)
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

MAX_WIDE_TOKENS = 64
MAX_TWO_TERM_ROWS = 16


def hidden_dtype(num_tokens: int, dtype: DTypeLike) -> DTypeLike:
    """What x is between the layers of a step, and what the last one gives."""
    return jnp.float32 if num_tokens <= MAX_WIDE_TOKENS else dtype


def operand_dtype(num_rows: int, dtype: DTypeLike) -> DTypeLike:
    """What a product's operand is rounded to, before it is put in terms of the weights' dtype."""
    return jnp.float32 if num_rows <= MAX_TWO_TERM_ROWS else dtype
