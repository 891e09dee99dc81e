"""Whole blocks to other blocks: copy-on-write, and reuse of partly matching cached blocks."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kernels_pallas.pool import KVPool


def copy_blocks(
    pool: KVPool, sources: Int32[Array, " num_copies"], destinations: Int32[Array, " num_copies"]
) -> KVPool:
    """Copies K and V of whole blocks, in all layers.

    All reads come before all writes, so a source that is another pair's destination gives what it
    held before. Padding pairs are (0, 0).
    """
    first_rows = jnp.arange(pool.num_layers, dtype=jnp.int32)[:, None] * (pool.num_blocks + 1)
    copied = pool.data.at[first_rows + sources[None, :]].get(mode="promise_in_bounds")
    data = pool.data.at[first_rows + destinations[None, :]].set(copied, mode="promise_in_bounds")
    return replace(pool, data=data)
