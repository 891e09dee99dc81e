"""The loader of the Hopper prefill kernel: one warpgroup, a tile ahead of those that attend."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper_parts import MMA_ROWS, is_wide, kv_boxes
from kernels_pallas.prefill_parts_hopper import Item, PrefillRefs, PrefillShape, Walk
from kernels_pallas.tuning import HopperPrefillTuning


def load(refs: PrefillRefs, walk: Walk, shape: PrefillShape, tuning: HopperPrefillTuning) -> None:
    """Fills the slots of queries (where aligned: see `prefill_hopper`), keys and values."""
    attenders, stages, q_slots = tuning.attenders, tuning.stages, tuning.q_slots
    if attenders > 1:
        plgpu.set_max_registers(24 if is_wide(shape.head_dim) else 40, action="decrease")

    def load_q(item: Item):
        slot = lax.rem(item.number, jnp.int32(q_slots))
        for w in range(attenders):
            q_slot = slot * attenders + w
            pl.when(item.number >= q_slots)(
                lambda q_slot=q_slot: plgpu.barrier_wait(refs.q_free.at[q_slot])
            )

            @pl.when(lax.rem(item.token, jnp.int32(8)) == 0)
            def _(w=w, q_slot=q_slot):
                begin = lax.div(item.token, jnp.int32(8)) * 8 + w * MMA_ROWS
                for term in range(shape.num_terms):
                    plgpu.copy_gmem_to_smem(
                        refs.q_ref.at[shape.tokens(term, begin, MMA_ROWS), item.head],
                        refs.q_sm.at[q_slot, term],
                        refs.q_there.at[q_slot],
                    )

    def load_kv(item: Item):
        kv_head = lax.div(item.head, jnp.int32(shape.group))

        @pl.loop(item.first, item.end)
        def _(step):
            total = item.done + step - item.first
            kv_slot = lax.rem(total, jnp.int32(stages))
            boxes = kv_boxes(
                refs.tables_ref,
                item.row,
                step,
                refs.first_row_ref[0],
                shape.block_size,
                tuning.kv_tile,
            )
            for kv, sm, there, read in (
                (0, refs.k_sm, refs.k_there, refs.k_read),
                (1, refs.v_sm, refs.v_there, refs.v_read),
            ):
                pl.when(total >= stages)(lambda read=read: plgpu.barrier_wait(read.at[kv_slot]))
                for j, (pool_row, offset, size) in enumerate(boxes):
                    plgpu.copy_gmem_to_smem(
                        refs.pool_ref.at[pool_row, kv, kv_head, pl.ds(offset, size)],
                        sm.at[kv_slot, pl.ds(j * size, size)],
                        there.at[kv_slot],
                    )

    def visit(item: Item):
        load_q(item)
        load_kv(item)

    total = walk.for_each(visit)
    # Every arrival is waited for.
    for slot in range(stages):
        pl.when(slot < total)(lambda slot=slot: plgpu.barrier_wait(refs.k_read.at[slot]))
        pl.when(slot < total)(lambda slot=slot: plgpu.barrier_wait(refs.v_read.at[slot]))
    for slot in range(q_slots):
        for w in range(attenders):
            q_slot = slot * attenders + w
            pl.when(slot < walk.count)(
                lambda q_slot=q_slot: plgpu.barrier_wait(refs.q_free.at[q_slot])
            )
