"""Sums of weights as integers: the same in any order, size of batch and program.

A weight is at most 1 and becomes a multiple of 2**-38, cut in two at 2**-19 so that `MAX_ADDED` of
each part add up in 32 bits. Such sums become three digits, of which 2**19 add up.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

MAX_ADDED = 4096
# Adding one of these to a part rounds it, and leaves it as an integer in the sum's lowest bits.
_HIGH_ROUNDER, _LOW_ROUNDER = 16.0, 1.5 * 2.0**-15
_DIGIT_BITS = 13


def parts_of(weights: Float32[Array, "..."]) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Weights of at most 1 as two integers, each more by its rounder's bits."""
    # why not conversions to integers: each takes seven instructions, for it saturates
    high = jax.lax.bitcast_convert_type(weights + jnp.float32(_HIGH_ROUNDER), jnp.int32)
    # why not the rounder taken off again: XLA simplifies that to the weight
    whole = (high - jnp.int32(_bits_of(_HIGH_ROUNDER))).astype(jnp.float32)
    low = (weights - whole * jnp.float32(2.0**-19)) + jnp.float32(_LOW_ROUNDER)
    return (
        jax.lax.bitcast_convert_type(high, jnp.uint32),
        jax.lax.bitcast_convert_type(low, jnp.uint32),
    )


def _bits_of(rounder: float) -> int:
    return int(np.float32(rounder).view(np.int32))


def digits_of(
    high: UInt32[Array, "..."], low: UInt32[Array, "..."], num_added: int
) -> tuple[UInt32[Array, "..."], ...]:
    """Sums of `parts_of` as three digits, the highest first, base 2**13 and unit 2**-38."""
    surplus = [_bits_of(x) * num_added % 2**32 for x in (_HIGH_ROUNDER, _LOW_ROUNDER)]
    high = jax.lax.bitcast_convert_type(high - jnp.uint32(surplus[0]), jnp.int32)
    low = jax.lax.bitcast_convert_type(low - jnp.uint32(surplus[1]), jnp.int32)
    low, carried = low & jnp.int32(2**19 - 1), low >> jnp.int32(19)
    high = jax.lax.bitcast_convert_type(high + carried, jnp.uint32)
    low = jax.lax.bitcast_convert_type(low, jnp.uint32)
    middle = ((high & jnp.uint32(0x7F)) << jnp.uint32(6)) | (low >> jnp.uint32(13))
    return high >> jnp.uint32(7), middle, low & jnp.uint32(0x1FFF)


def carry(digits: tuple[UInt32[Array, "..."], ...]) -> tuple[jax.Array, ...]:
    """The same number with the lower two digits below their base."""
    high, middle, low = digits
    bits, mask = jnp.uint32(_DIGIT_BITS), jnp.uint32((1 << _DIGIT_BITS) - 1)
    middle = middle + (low >> bits)
    return high + (middle >> bits), middle & mask, low & mask


def weight_of(digits: tuple[Any, ...]) -> Float32[Array, " num_samples"]:
    """The weight that digits stand for."""
    part = jnp.float32(2.0**-_DIGIT_BITS)
    high, middle, low = (digit.astype(jnp.float32) for digit in digits)
    return (high + (middle + low * part) * part) * jnp.float32(2.0**-12)
