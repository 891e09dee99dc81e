"""The Hopper write kernel's way from a tile of keys or values to their slots in the pool."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper_parts import MMA_ROWS, WARPGROUP, store_slowly
from kernels_pallas.write_parts_hopper import RUN, Work, WriteRefs, WriteShape


def write_slots(refs: WriteRefs, work: Work, shape: WriteShape, halves, plane: int) -> None:
    """Starts the copies of a program's rows of a tile.

    Args:
      halves: the tile, two times `[MMA_ROWS, half]`, in registers and of the pool's type.
      plane: 0 = keys, 1 = values.
    """
    rows_sm, slots_sm = refs.rows_sm, refs.slots_sm
    for half, values in zip(shape.halves, halves, strict=True):
        store_slowly(rows_sm.at[:, half], values)
    plgpu.commit_smem()
    size = MMA_ROWS // shape.parts
    begin = work.part * size
    end = jnp.minimum(begin + size, shape.num_tokens - work.first_token)

    def target(slot, num_tokens: int):
        block = lax.div(slot, jnp.int32(shape.block_size))
        tokens = pl.ds(lax.rem(slot, jnp.int32(shape.block_size)), num_tokens)
        return refs.pool_ref.at[refs.first_row_ref[0] + block, plane, work.kv_head, tokens]

    def is_real(slot):
        return slot >= shape.block_size  # others are in the null block

    def load_row(i):
        layout = plgpu.Layout.WG_STRIDED((1, 2 * shape.half), vec_size=1)
        return plgpu.load(rows_sm.at[pl.ds(i, 1)], layout=layout)

    def store_row(i, slot, row):
        if row is None:
            plgpu.copy_smem_to_gmem(rows_sm.at[pl.ds(i, 1)], target(slot, 1))
        else:
            target(slot, 1)[...] = row

    # A narrower row leaves threads without an element, which no layout has.
    fills_warpgroup = 2 * shape.half % WARPGROUP == 0
    if not shape.has_runs:  # all is loaded before the first branch: no row waits for another
        idxs = [begin + i for i in range(size)]
        slots = [slots_sm[i] for i in idxs]
        rows = [load_row(i) if fills_warpgroup else None for i in idxs]
        for i, slot, row in zip(idxs, slots, rows, strict=True):
            pl.when(is_real(slot) & (i < end))(functools.partial(store_row, i, slot, row))
        return

    def write_next(i):
        slot = slots_sm[i]
        # Both ends in one block are of one row, and so is all that lies between.
        last = slots_sm[jnp.minimum(i + (RUN - 1), MMA_ROWS - 1)]
        starts_run = lax.rem(slot, jnp.int32(RUN)) == 0
        is_run = starts_run & (last == slot + (RUN - 1)) & (i + RUN <= end)

        @pl.when(is_real(slot) & is_run)
        def _():
            plgpu.copy_smem_to_gmem(rows_sm.at[pl.ds(i, RUN)], target(slot, RUN))

        @pl.when(is_real(slot) & jnp.logical_not(is_run))
        def _():
            store_row(i, slot, load_row(i) if fills_warpgroup else None)

        return i + jnp.where(is_run, RUN, 1)

    lax.while_loop(lambda i: i < end, write_next, begin)
