"""New keys and values into their slots, in place where the pool is donated."""

from dataclasses import replace

from jaxtyping import Array, Float, Int32

from kernels_pallas.pool import KVPool


def write_kv(
    pool: KVPool,
    layer: int | Int32[Array, ""],
    k_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    v_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int32[Array, " num_tokens"],
) -> KVPool:
    """Writes token i's K and V of one layer into slot `slot_mapping[i]`.

    Padding tokens all land in the null block, so slots are in range but not unique.
    """
    rows = pool.first_row(layer) + slot_mapping // pool.block_size
    offsets = slot_mapping % pool.block_size
    tokens = pool.pack(k_new, v_new)
    data = pool.data.at[rows, :, :, offsets].set(tokens, mode="promise_in_bounds")
    return replace(pool, data=data)
