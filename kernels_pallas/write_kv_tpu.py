"""New keys and values of prompt tokens into their slots on a TPU, in place.

A TPU's memory is tiled over tokens and takes whole tiles only, so tokens are written in units of
one tile. XLA gathers the new tokens into units first; the kernel copies whole units, and mixes the
first and the last unit of a row with the tokens that the pool has there:

    slots of a row    | old old new new | new new new new | new  ?   ?   ?  |
    units             | read, mix       | copy            | read, mix       |

Each unit lies in one block, and no two units are the same, so copies run side by side.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool

# Units under way: one is read while the one before it is mixed and those before are written.
_NUM_STAGES = 4


def write_prefill_kv(
    pool: KVPool,
    first_row: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    metadata: AttentionMetadata,
    *,
    write_unit: int,
    interpret: Any,
) -> jax.Array:
    """Writes the tokens of all rows after the decode rows; returns the pool's data.

    Args:
      k_new, v_new: [num_tokens, num_kv_heads, head_dim].
      write_unit: tokens that are written together.
    """
    rows, offsets, begins, ends, tokens, count = _find_units(pool, first_row, metadata, write_unit)
    units = pool.pack(
        k_new.at[tokens].get(mode="promise_in_bounds").swapaxes(1, 2),
        v_new.at[tokens].get(mode="promise_in_bounds").swapaxes(1, 2),
    )
    _, planes, num_heads, _, lanes = units.shape
    stages = pltpu.VMEM((_NUM_STAGES, planes, num_heads, write_unit, lanes), pool.dtype)
    kernel = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(pool.data.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[stages, stages, *[pltpu.SemaphoreType.DMA((_NUM_STAGES,))] * 3],
        ),
        input_output_aliases={6: 0},
        interpret=interpret,
        name="write_prefill_kv",
    )
    return kernel(count[None], rows, offsets, begins, ends, units, pool.data)


def _find_units(
    pool: KVPool, first_row: jax.Array, metadata: AttentionMetadata, write_unit: int
) -> tuple[jax.Array, ...]:
    """Where each unit lies in the pool, which of its slots are new, and their tokens.

    Returns:
      int32[max_units] each: row of the pool, first slot in the block, first new slot of the unit,
      the one after the last; int32[max_units, write_unit]: tokens, anything where not new; int32[]:
      units in use.
    """
    num_tokens, num_rows = metadata.num_tokens, metadata.num_rows
    starts = metadata.cu_q_lens
    is_mine = jnp.arange(num_rows, dtype=jnp.int32) >= metadata.num_decode_rows
    first_positions = metadata.kv_lens - metadata.q_lens
    first_units = first_positions // write_unit
    last_units = (metadata.kv_lens - 1) // write_unit
    counts = jnp.where(is_mine & (metadata.q_lens > 0), last_units - first_units + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    # n tokens of a row touch at most (n - 2) / unit + 2 units, and at most n.
    max_units = min(num_tokens, num_tokens // write_unit + 2 * num_rows)
    index = jnp.arange(max_units, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    unit = first_units[row] + index - (ends[row] - counts[row])
    position = unit * write_unit
    table_idx = jnp.clip(position // pool.block_size, 0, metadata.block_tables.shape[1] - 1)
    blocks = metadata.block_tables[row, table_idx]
    slots = position[:, None] + jnp.arange(write_unit, dtype=jnp.int32)[None, :]
    tokens = starts[row][:, None] + slots - first_positions[row][:, None]
    return (
        first_row + blocks,
        position % pool.block_size,
        jnp.clip(first_positions[row] - position, 0, write_unit),
        jnp.clip(metadata.kv_lens[row] - position, 0, write_unit),
        jnp.clip(tokens, 0, num_tokens - 1),
        ends[-1],
    )


def _kernel(
    count_ref,  # int32[1] SMEM
    rows_ref,  # int32[max_units] SMEM
    offsets_ref,  # int32[max_units] SMEM
    begins_ref,  # int32[max_units] SMEM
    ends_ref,  # int32[max_units] SMEM
    units_ref,  # [max_units, planes, num_kv_heads, write_unit, lanes] HBM
    _pool_in_ref,  # the same memory as pool_ref
    pool_ref,  # [pool_rows, planes, num_kv_heads, block_size, lanes] HBM
    new_ref,  # [_NUM_STAGES, planes, num_kv_heads, write_unit, lanes] VMEM
    old_ref,  # likewise
    new_semaphores,
    old_semaphores,
    write_semaphores,
):
    count = count_ref[0]
    planes, num_heads, unit_size, lanes = new_ref.shape[1:]

    def in_pool(unit):
        offset = pl.multiple_of(offsets_ref[unit], unit_size)
        return pool_ref.at[rows_ref[unit], :, :, pl.ds(offset, unit_size), :]

    def new_copy(unit):
        stage = unit % _NUM_STAGES
        source = units_ref.at[unit]
        return pltpu.make_async_copy(source, new_ref.at[stage], new_semaphores.at[stage])

    def old_copy(unit):
        stage = unit % _NUM_STAGES
        return pltpu.make_async_copy(in_pool(unit), old_ref.at[stage], old_semaphores.at[stage])

    def write_copy(unit):
        stage = unit % _NUM_STAGES
        return pltpu.make_async_copy(new_ref.at[stage], in_pool(unit), write_semaphores.at[stage])

    def is_mixed(unit):
        return (begins_ref[unit] > 0) | (ends_ref[unit] < unit_size)

    def read(unit):
        @pl.when(unit >= _NUM_STAGES)
        def _():
            write_copy(unit - _NUM_STAGES).wait()

        new_copy(unit).start()

        @pl.when(is_mixed(unit))
        def _():
            old_copy(unit).start()

    def write(unit):
        new_copy(unit).wait()

        @pl.when(is_mixed(unit))
        def _():
            old_copy(unit).wait()
            stage = unit % _NUM_STAGES
            slots = lax.broadcasted_iota(jnp.int32, (unit_size, lanes), 0)
            is_new = (slots >= begins_ref[unit]) & (slots < ends_ref[unit])
            for plane in range(planes):
                for head in range(num_heads):
                    new, old = (ref[stage, plane, head] for ref in (new_ref, old_ref))
                    new_ref[stage, plane, head] = jnp.where(is_new, new, old)

        write_copy(unit).start()

    # Unit i is read while unit i - 1 is mixed.
    def visit(unit, _):
        @pl.when(unit < count)
        def _():
            read(unit)

        @pl.when(unit > 0)
        def _():
            write(unit - 1)

    @pl.when(count > 0)
    def _():
        lax.fori_loop(0, count + 1, visit, None)

    def finish(unit, _):
        write_copy(unit).wait()

    lax.fori_loop(jnp.maximum(count - _NUM_STAGES, 0), count, finish, None)
