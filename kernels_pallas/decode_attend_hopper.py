"""The attenders of the Hopper decode kernel: a warpgroup a worker, with an online softmax."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.decode_parts_hopper import DecodeRefs, DecodeShape, Segment, Walk, visible
from kernels_pallas.hopper_parts import (
    MMA_ROWS,
    NEVER,
    SMALL,
    capped_scores,
    clear_invisible,
    column_parts,
    is_wide,
    mma_accumulator,
)
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.tuning import HopperDecodeTuning


def attend(
    refs: DecodeRefs,
    walk: Walk,
    shape: DecodeShape,
    options: AttentionOptions,
    tuning: HopperDecodeTuning,
    *,
    interpreted: bool,
) -> None:
    """Computes and writes one worker's results, of whole units and of parts."""
    pair, num_segments = walk.pair, walk.num_segments
    kv_tile, stages, group = tuning.kv_tile, tuning.stages, shape.out_group
    alone = 240 if is_wide(shape.head_dim) else 232
    plgpu.set_max_registers(216 if tuning.workers == 2 else alone, action="increase")
    by_row = plgpu.Layout.WGMMA.reduce(1)
    parts = column_parts(shape.head_dim)

    def fill_out(rows):
        for i, columns in enumerate(parts):
            part = rows[:, columns.start : columns.start + columns.size]
            refs.out_sm[pair * len(parts) + i] = part

    def store_out(ref):
        for i, columns in enumerate(parts):
            part_sm = refs.out_sm.at[pair * len(parts) + i, pl.ds(0, ref.shape[0])]
            plgpu.copy_smem_to_gmem(part_sm, ref.at[:, columns])

    def clear_q():
        """Makes the rows zero that no query will fill, and lets the loader fill the others."""
        for slot in (2 * pair, 2 * pair + 1):
            for columns in parts:
                part = refs.q_sm.at[slot, :, columns]
                zeros = jnp.zeros(part.shape, shape.dtype)
                part[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        for i in range(2):
            pl.when(i < num_segments)(
                lambda i=i: plgpu.barrier_arrive(refs.q_read.at[2 * pair + i])
            )

    def visit(segment: Segment):
        number, row, head = segment.number, segment.row, segment.head
        first_tile, count, kv_len = segment.first_tile, segment.count, segment.kv_len
        q_slot = 2 * pair + lax.rem(number, jnp.int32(2))
        plgpu.barrier_wait(refs.q_there.at[q_slot])

        def take_in(i, carry, *, masked: bool):
            acc, m, l = carry  # noqa: E741
            step = segment.done + i
            slot = pair * stages + lax.rem(step, jnp.int32(stages))
            # Its arrival is waited for, if there is a load that needs the slot.
            is_needed = step + stages < walk.end - walk.begin
            low, high = visible(kv_len, (first_tile + i) * kv_tile, options)
            plgpu.barrier_wait(refs.k_there.at[slot])

            def qk(acc_ref):
                plgpu.wgmma(acc_ref, refs.q_sm.at[q_slot], refs.k_sm.at[slot].transpose((1, 0)))
                return acc_ref[...]

            scores = pl.run_scoped(qk, mma_accumulator(MMA_ROWS, kv_tile))
            pl.when(is_needed)(lambda: plgpu.barrier_arrive(refs.k_read.at[slot]))
            scores, factor = capped_scores(scores, options)
            if masked:
                key = plgpu.broadcasted_iota(
                    jnp.int32, (MMA_ROWS, kv_tile), 1, layout=plgpu.Layout.WGMMA
                )
                scores = jnp.where((key >= low) & (key < high), scores, -jnp.inf)
            m_new = jnp.maximum(m, scores.max(axis=1) * factor)
            decay = jnp.exp2(m - m_new)
            p = jnp.exp2(scores * factor - lax.broadcast_in_dim(m_new, scores.shape, [0]))
            l = l * decay + p.sum(axis=1)  # noqa: E741
            p = p.astype(shape.dtype)
            plgpu.barrier_wait(refs.v_there.at[slot])
            if masked:
                clear_invisible(refs.v_sm.at[slot], low, high)
            if interpreted:
                refs.p_sm[pair] = p
                plgpu.commit_smem()

            def pv(acc_ref):
                plgpu.wgmma(acc_ref, refs.p_sm.at[pair] if interpreted else p, refs.v_sm.at[slot])
                return acc_ref[...]

            if is_wide(shape.head_dim) and not interpreted:
                # There are registers for one accumulator alone.
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, refs.v_sm.at[slot]))(
                    plgpu.WGMMAAccumulatorRef.init(acc)
                )
                pl.when(is_needed)(lambda: plgpu.barrier_arrive(refs.v_read.at[slot]))
            else:
                added = pl.run_scoped(pv, mma_accumulator(MMA_ROWS, shape.head_dim))
                pl.when(is_needed)(lambda: plgpu.barrier_arrive(refs.v_read.at[slot]))
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + added
            return acc, m_new, l

        # The probabilities of other rows are zeros, too: no score is near their maximum.
        is_query = plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS,), 0, layout=by_row) < shape.group
        carry = (
            plgpu.layout_cast(
                jnp.zeros((MMA_ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA
            ),
            jnp.where(is_query, NEVER, -NEVER),
            plgpu.layout_cast(jnp.zeros((MMA_ROWS,), jnp.float32), by_row),
        )
        # What the row does not fill is masked; with a window, any tile may be.
        filled = lax.div(kv_len, jnp.int32(kv_tile))
        unmasked = jnp.clip(filled - first_tile, 0, count) if options.window is None else 0
        carry = lax.fori_loop(0, unmasked, functools.partial(take_in, masked=False), carry)
        carry = lax.fori_loop(unmasked, count, functools.partial(take_in, masked=True), carry)
        acc, m, l = carry  # noqa: E741
        pl.when(number + 2 < num_segments)(lambda: plgpu.barrier_arrive(refs.q_read.at[q_slot]))
        # The stores of the segment before have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(segment.is_whole)
        def _write():
            factor = 1.0 / jnp.maximum(l, SMALL)
            if shape.has_sinks:
                sink = plgpu.load(refs.sinks_ref.at[head], layout=by_row, optimized=False)
                m_new = jnp.maximum(m, sink)
                decay = jnp.exp2(m - m_new)
                factor = decay / (l * decay + jnp.exp2(sink - m_new))
            result = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
            fill_out(result.astype(shape.dtype))
            plgpu.commit_smem()
            store_out(refs.out_ref.at[row, pl.ds(head * group, group)])

        @pl.when(jnp.logical_not(segment.is_whole))
        def _write_partial():
            place = 2 * walk.worker + jnp.where(segment.done == 0, 0, 1)
            rest = acc * lax.broadcast_in_dim(1.0 / jnp.maximum(l, SMALL), acc.shape, [0])
            for half, stat in enumerate((m, l)):
                if half:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                refs.stats_sm[pair] = stat
                rounded = rest.astype(shape.dtype)
                fill_out(rounded)
                rest = rest - rounded.astype(jnp.float32)
                plgpu.commit_smem()
                store_out(refs.partials_ref.at[place, half])
                plgpu.copy_smem_to_gmem(refs.stats_sm.at[pair], refs.stats_ref.at[place, half])

    clear_q()
    walk.for_each(visit, looks_ahead=False)
    plgpu.wait_smem_to_gmem(0)
