"""The loader of a worker of the Hopper decode kernel: a warpgroup, a ring of tiles ahead of it."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.decode_parts_hopper import DecodeRefs, DecodeShape, Segment, Walk, visible
from kernels_pallas.hopper_parts import kv_boxes
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.tuning import HopperDecodeTuning


def load(
    refs: DecodeRefs,
    walk: Walk,
    shape: DecodeShape,
    options: AttentionOptions,
    tuning: HopperDecodeTuning,
) -> None:
    """Fills the worker's slots of queries, keys and values."""
    kv_tile, stages = tuning.kv_tile, tuning.stages

    def visit(segment: Segment):
        row, head, first_tile = segment.row, segment.head, segment.first_tile
        q_slot = lax.rem(segment.number, jnp.int32(2))
        pl.when(segment.number >= 2)(lambda: plgpu.barrier_wait(refs.q_read.at[q_slot]))
        heads = pl.ds(head * shape.padded_group, shape.padded_group)
        for term in range(shape.num_terms):
            plgpu.copy_gmem_to_smem(
                refs.q_ref.at[term, row, heads], refs.q_sm.at[q_slot, term], refs.q_there.at[q_slot]
            )

        @pl.loop(0, segment.count)
        def _(i):
            step = segment.done + i
            slot = lax.rem(step, jnp.int32(stages))
            boxes = kv_boxes(
                refs.tables_ref,
                row,
                first_tile + i,
                refs.first_row_ref[0],
                shape.block_size,
                kv_tile,
            )
            low, high = visible(segment.kv_len, (first_tile + i) * kv_tile, options)
            for kv, sm, there, read in (
                (0, refs.k_sm, refs.k_there, refs.k_read),
                (1, refs.v_sm, refs.v_there, refs.v_read),
            ):
                pl.when(step >= stages)(lambda read=read: plgpu.barrier_wait(read.at[slot]))
                for j, (pool_row, offset, size) in enumerate(boxes):
                    # What no query sees is not loaded: past a row's end all rows would read
                    # the null block, which takes as long as other blocks do.
                    lax.cond(
                        (j * size < high) & ((j + 1) * size > low),
                        functools.partial(
                            plgpu.copy_gmem_to_smem,
                            refs.pool_ref.at[pool_row, kv, head, pl.ds(offset, size)],
                            sm.at[slot, pl.ds(j * size, size)],
                            there.at[slot],
                        ),
                        functools.partial(plgpu.barrier_arrive, there.at[slot]),
                    )

    walk.for_each(visit, looks_ahead=True)
