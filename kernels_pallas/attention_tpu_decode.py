"""Decode on a TPU: rows of one new token, K and V written in the same kernel.

A row's last tile is in VMEM anyway, so the new token is put there, attended to, and written back
from there: the aligned group of tokens around it, because a TPU's memory is tiled over tokens and
takes whole tiles only. Nothing is read from the pool after it was written, so there is no hazard:

    block in HBM     | old | old | old | new | ...      one write unit = one tile of tokens
    copied to VMEM   | old | old | old |  ?  |          1. the tile's stale slot
    put in           | old | old | old | NEW |          2. selected by position
    staged, written  | old | old | old | NEW |          3. behind the arithmetic

The block belongs to this row alone (design: nobody writes a shared block), so no other row of the
call reads or writes it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.attention_tpu_tiles import (
    LANES,
    Item,
    KVStream,
    KVTiles,
    StateRefs,
    attend_tile,
)
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.tuning import TPUPhaseTuning

# Writes under way at once: a row's write is waited for when the row after the next one writes.
_NUM_STAGES = 2


def decode(
    q: jax.Array,
    new_kv: jax.Array,
    data: jax.Array,
    sinks: jax.Array | None,
    scalars: jax.Array,
    kv_lens: jax.Array,
    tables: jax.Array,
    *,
    options: AttentionOptions,
    tuning: TPUPhaseTuning,
    write_unit: int,
    head_groups: int,
    vmem_limit_bytes: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Writes each row's token and attends to the row's keys.

    Args:
      q: [num_kv_heads, num_rows, queries, lanes]; num_rows a multiple of `tuning.queries`.
      new_kv: [num_rows, planes, num_kv_heads, 1, lanes].
      data: the pool's; it is updated in place.
      sinks: float32[num_kv_heads, queries, LANES], equal over lanes, or None.
      scalars: int32[2]: the layer's first row in the pool, the number of rows to compute.
      kv_lens, tables: int32[num_rows], int32[num_rows * table_width].
      write_unit: tokens that are written together.
      head_groups: equal shares of the KV heads, which cores may work on side by side.

    Returns:
      Like q (anything in rows that are not computed), and the pool's data.
    """
    num_kv_heads, num_rows, num_queries, lanes = q.shape
    planes, block_size = data.shape[1], data.shape[3]
    heads, row_tile = num_kv_heads // head_groups, tuning.queries
    tiles = KVTiles(
        fetch=tuning.fetch,
        compute=tuning.compute,
        num_buffers=tuning.num_buffers,
        block_size=block_size,
        table_width=tables.shape[0] // kv_lens.shape[0],
    )
    in_specs = [
        pl.BlockSpec((heads, row_tile, num_queries, lanes), lambda g, i, *_: (g, i, 0, 0)),
        pl.BlockSpec((row_tile, planes, heads, 1, lanes), lambda g, i, *_: (i, 0, g, 0, 0)),
        pl.BlockSpec(memory_space=pltpu.HBM),
    ]
    operands = [q, new_kv, data]
    if sinks is not None:
        in_specs.append(pl.BlockSpec((heads, num_queries, LANES), lambda g, i, *_: (g, 0, 0)))
        operands.append(sinks)
    num_scalar_operands = 3
    kernel = pl.pallas_call(
        _make_kernel(tiles, options, write_unit, has_sinks=sinks is not None),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, data)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalar_operands,
            grid=(head_groups, num_rows // row_tile),
            in_specs=in_specs,
            out_specs=[in_specs[0], pl.BlockSpec(memory_space=pltpu.HBM)],
            scratch_shapes=[
                pltpu.VMEM((tuning.num_buffers, planes, heads, tuning.fetch, lanes), data.dtype),
                pltpu.VMEM((_NUM_STAGES, planes, heads, write_unit, lanes), data.dtype),
                *StateRefs.scratch(heads, num_queries, lanes),
                pltpu.SMEM((5,), jnp.int32),
                pltpu.SemaphoreType.DMA((tuning.num_buffers,)),
                pltpu.SemaphoreType.DMA((_NUM_STAGES,)),
            ],
        ),
        input_output_aliases={num_scalar_operands + 2: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        interpret=interpret,
        name="paged_decode",
    )
    out, data = kernel(scalars, kv_lens, tables, *operands)
    return out, data


def _make_kernel(tiles: KVTiles, options: AttentionOptions, write_unit: int, *, has_sinks: bool):
    def kernel(
        scalars_ref,  # int32[2] SMEM
        kv_lens_ref,  # int32[num_rows] SMEM
        tables_ref,  # int32[num_rows * table_width] SMEM
        q_ref,  # [heads, row_tile, queries, lanes] VMEM
        new_kv_ref,  # [row_tile, planes, heads, 1, lanes] VMEM
        _pool_in_ref,  # the same memory as pool_ref
        *refs,
    ):
        sinks_ref = refs[0] if has_sinks else None  # float32[heads, queries, LANES] VMEM
        (
            out_ref,  # [heads, row_tile, queries, lanes] VMEM
            pool_ref,  # [pool_rows, planes, num_kv_heads, block_size, lanes] HBM
            buffers_ref,  # [num_buffers, planes, heads, fetch, lanes] VMEM
            stages_ref,  # [_NUM_STAGES, planes, heads, write_unit, lanes] VMEM
            *state_refs,
            cursor_ref,  # int32[5] SMEM: the stream's four, then how many rows were written
            fetch_semaphores,
            write_semaphores,
        ) = refs[has_sinks:]
        state = StateRefs(*state_refs)
        group, step = pl.program_id(0), pl.program_id(1)
        heads, row_tile = q_ref.shape[:2]
        num_rows = scalars_ref[1]

        def item_at(row):
            end = kv_lens_ref[row]
            first = 0 if options.window is None else jnp.maximum(end - options.window, 0)
            return Item(row, jnp.int32(first), end)

        stream = KVStream(
            tiles,
            item_at,
            num_rows,
            pool_ref,
            tables_ref,
            scalars_ref[0],
            group * heads,
            buffers_ref,
            cursor_ref,
            fetch_semaphores,
        )
        writer = _Writer(
            stream, write_unit, new_kv_ref, stages_ref, cursor_ref, 4, write_semaphores
        )

        @pl.when(step == 0)
        def _():
            stream.start()
            cursor_ref[4] = 0

        def compute_row(index, _):
            item = item_at(step * row_tile + index)
            state.start(sinks_ref)
            first, stop = stream.tile_range(item)

            def compute_tile(tile, _):
                buffer = stream.wait(item, tile)
                kv_ref = buffers_ref.at[buffer]

                @pl.when((tile == stop - 1) & (item.end > 0))
                def _():
                    writer.write(item, tile, kv_ref, index)

                attend_tile(
                    tiles,
                    options,
                    item,
                    tile,
                    kv_ref,
                    lambda head: q_ref[head, index],
                    lambda position: _visible(item, position, q_ref.shape[2], tiles.compute),
                    state,
                )
                stream.release()

            lax.fori_loop(first, stop, compute_tile, None)
            for head in range(heads):
                out_ref[head, index] = state.finish(head).astype(out_ref.dtype)

        lax.fori_loop(0, jnp.clip(num_rows - step * row_tile, 0, row_tile), compute_row, None)

        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            writer.finish()

    return kernel


class _Writer:
    """Puts the rows' new tokens into their tiles and writes them back to the pool."""

    def __init__(
        self,
        stream: KVStream,
        write_unit: int,
        new_kv_ref: Any,
        stages_ref: Any,
        count_ref: Any,
        count_entry: int,
        semaphores: Any,
    ):
        self.stream = stream
        self.write_unit = write_unit
        self.new_kv_ref = new_kv_ref
        self.stages_ref = stages_ref
        self.count_ref = count_ref
        self.count_entry = count_entry
        self.semaphores = semaphores

    def write(self, item: Item, tile: Any, kv_ref: Any, index: Any) -> None:
        """Starts the write of row `item`, number `index` of this grid step."""
        tiles, unit = self.stream.tiles, self.write_unit
        count = self.count_ref[self.count_entry]
        stage = count % _NUM_STAGES
        position = item.end - 1

        @pl.when(count >= _NUM_STAGES)
        def _():
            self._copy(stage, 0, 0).wait()

        in_tile = pl.multiple_of((position - tile * tiles.fetch) // unit * unit, unit)
        planes, num_heads, _, lanes = kv_ref.shape
        is_new = lax.broadcasted_iota(jnp.int32, (unit, lanes), 0) == position % unit
        for plane in range(planes):
            for head in range(num_heads):
                old = kv_ref[plane, head, pl.ds(in_tile, unit), :]
                new = jnp.broadcast_to(self.new_kv_ref[index, plane, head], (unit, lanes))
                both = jnp.where(is_new, new, old)
                kv_ref[plane, head, pl.ds(in_tile, unit), :] = both
                self.stages_ref[stage, plane, head] = both
        block = self.stream.tables_ref[item.row * tiles.table_width + position // tiles.block_size]
        in_block = pl.multiple_of(position % tiles.block_size // unit * unit, unit)
        self._copy(stage, self.stream.first_row + block, in_block).start()
        self.count_ref[self.count_entry] = count + 1

    def finish(self) -> None:
        """Waits for the writes that no later row has waited for."""
        count = self.count_ref[self.count_entry]
        for back in range(1, _NUM_STAGES + 1):

            @pl.when(count >= back)
            def _(back=back):
                self._copy((count - back) % _NUM_STAGES, 0, 0).wait()

    def _copy(self, stage: Any, pool_row: Any, in_block: Any) -> Any:
        num_heads = self.stages_ref.shape[2]
        target = self.stream.pool_ref.at[
            pool_row,
            :,
            pl.ds(self.stream.head_start, num_heads),
            pl.ds(in_block, self.write_unit),
            :,
        ]
        semaphore = self.semaphores.at[stage]
        return pltpu.make_async_copy(self.stages_ref.at[stage], target, semaphore)


def _visible(item: Item, position: Any, num_queries: int, size: int) -> jax.Array:
    positions = position + lax.broadcasted_iota(jnp.int32, (num_queries, size), 1)
    return (positions >= item.first) & (positions < item.end)
