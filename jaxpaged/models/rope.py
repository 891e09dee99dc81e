"""Rotary position embedding: angles in float32, pairs (i, i + head_dim / 2) as in Hugging Face."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxpaged.models.config import RopeConfig
from kernels_pallas.norm_rope import RopeTables


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, " half_head_dim"]:
    """Radians per position of each pair.

    Type "llama3" (Llama 3.1): pairs that turn fewer than `low_freq_factor` times within the
    original context are slowed down by `factor`, those above `high_freq_factor` stay, and between
    the two the slowdown is blended linearly in the number of turns.
    """
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.type == "default":
        return frequencies.astype(np.float32)
    turns = rope.original_max_len * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (frequencies * (kept + (1 - kept) / rope.factor)).astype(np.float32)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int32[Array, " num_tokens"]
) -> RopeTables:
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return RopeTables(jnp.cos(angles), jnp.sin(angles))
