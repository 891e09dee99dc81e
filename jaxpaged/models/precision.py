"""How precisely a step computes: the fewer its tokens, the more, where that costs no time.

x, between the layers, and what is added to it, is float32 in steps of few tokens, in models of any
dtype: rounding it again and again makes more than half of a bfloat16 model's error, but with many
tokens twice the bytes would cost 4 %. In still smaller steps, where reading the weights takes
longer than multiplying, products read x in two terms (`kernels_pallas.terms`), and between two of
them nothing is rounded but attention's weights: what remains is the rounding of the parameters, and
of keys and values in the pool.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.metadata import Shaped
from kernels_pallas.terms import num_terms

MAX_WIDE_TOKENS = 64
MAX_TWO_TERM_TOKENS = 16


def hidden_dtype(num_tokens: int, dtype: DTypeLike) -> DTypeLike:
    """What x is between the layers of a step, and what the last one gives."""
    return jnp.float32 if num_tokens <= MAX_WIDE_TOKENS else dtype


def operand_terms(x: Shaped, dtype: DTypeLike) -> int:
    """Terms of the weights' dtype in which products read x."""
    return num_terms(x.dtype, dtype) if x.shape[0] <= MAX_TWO_TERM_TOKENS else 1
