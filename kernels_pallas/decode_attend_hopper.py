"""The attender of a worker of the Hopper decode kernel: a warpgroup, with an online softmax.

Scores stand keys by queries, and so does the result head_dim by queries: the matrix unit multiplies
64 rows whatever there is, and a KV head has few queries. Power bounds an H200's clock, and products
of rows that are no queries take power, too.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.decode_parts_hopper import DecodeRefs, DecodeShape, Segment, Walk, visible
from kernels_pallas.hopper_parts import (
    NEVER,
    SMALL,
    capped_scores,
    clear_invisible,
    mma_accumulator,
    split_off,
    store_slowly,
    store_transposed,
    transposed,
)
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.tuning import HopperDecodeTuning


def attend(
    refs: DecodeRefs,
    walk: Walk,
    shape: DecodeShape,
    options: AttentionOptions,
    tuning: HopperDecodeTuning,
) -> None:
    """Computes and writes the worker's results, of whole units and of parts."""
    kv_tile, stages, group = tuning.kv_tile, tuning.stages, shape.out_group
    queries, by_query = shape.padded_group, plgpu.Layout.WGMMA.reduce(0)

    def visit(segment: Segment):
        number, row, head = segment.number, segment.row, segment.head
        first_tile, count, kv_len = segment.first_tile, segment.count, segment.kv_len
        q_slot = lax.rem(number, jnp.int32(2))
        plgpu.barrier_wait(refs.q_there.at[q_slot])

        def take_in(i, carry, *, masked: bool):
            acc, m, weights = carry
            step = segment.done + i
            slot = lax.rem(step, jnp.int32(stages))
            # Its arrival is waited for, if there is a load that needs the slot.
            is_needed = step + stages < walk.end - walk.begin
            low, high = visible(kv_len, (first_tile + i) * kv_tile, options)
            plgpu.barrier_wait(refs.k_there.at[slot])

            def kq(acc_ref):
                for term in range(shape.num_terms):
                    q = refs.q_sm.at[q_slot, term].transpose((1, 0))
                    plgpu.wgmma(acc_ref, refs.k_sm.at[slot], q)
                return acc_ref[...]

            scores = pl.run_scoped(kq, mma_accumulator(kv_tile, queries))
            pl.when(is_needed)(lambda: plgpu.barrier_arrive(refs.k_read.at[slot]))
            scores, factor = capped_scores(scores, options)
            if masked:
                key = plgpu.broadcasted_iota(
                    jnp.int32, (kv_tile, queries), 0, layout=plgpu.Layout.WGMMA
                )
                scores = jnp.where((key >= low) & (key < high), scores, -jnp.inf)
            highest = plgpu.layout_cast(scores.max(axis=0), by_query)
            m_new = jnp.maximum(m, highest * factor)
            decay = jnp.exp2(m - m_new)
            p = jnp.exp2(scores * factor - _spread(m_new, scores))
            weights = weights * _spread(decay, weights) + p
            refs.p_sm.transpose((1, 0))[...] = transposed(p.astype(shape.dtype))
            plgpu.commit_smem()
            plgpu.barrier_wait(refs.v_there.at[slot])
            if masked:
                clear_invisible(refs.v_sm.at[slot], low, high)

            def vp(acc_ref):
                values, p = refs.v_sm.at[slot].transpose((1, 0)), refs.p_sm.transpose((1, 0))
                plgpu.wgmma(acc_ref, values, p)
                return acc_ref[...]

            added = pl.run_scoped(vp, mma_accumulator(shape.head_dim, queries))
            pl.when(is_needed)(lambda: plgpu.barrier_arrive(refs.v_read.at[slot]))
            return acc * _spread(decay, acc) + added, m_new, weights

        carry = (
            _zeros(shape.head_dim, queries),
            plgpu.layout_cast(jnp.full((queries,), NEVER, jnp.float32), by_query),
            _zeros(kv_tile, queries),
        )
        # What the row does not fill is masked; with a window, any tile may be.
        filled = lax.div(kv_len, jnp.int32(kv_tile))
        unmasked = jnp.clip(filled - first_tile, 0, count) if options.window is None else 0
        carry = lax.fori_loop(0, unmasked, functools.partial(take_in, masked=False), carry)
        carry = lax.fori_loop(unmasked, count, functools.partial(take_in, masked=True), carry)
        acc, m, weights = carry
        l = plgpu.layout_cast(weights.sum(axis=0), by_query)  # noqa: E741
        pl.when(number + 2 < walk.num_segments)(
            lambda: plgpu.barrier_arrive(refs.q_read.at[q_slot])
        )
        # The stores of the segment before have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def write_terms(values, num_terms: int, write):
            """Calls `write` once for each term of the values, when it is in `out_sm`."""
            for term in range(num_terms):
                if term:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                rounded, values = split_off(values, shape.dtype)
                store_transposed(refs.out_sm, rounded)
                write(term)

        @pl.when(segment.is_whole)
        def _write():
            factor = 1.0 / jnp.maximum(l, SMALL)
            if shape.has_sinks:
                sink = plgpu.load(refs.sinks_ref.at[head], layout=by_query, optimized=False)
                m_new = jnp.maximum(m, sink)
                decay = jnp.exp2(m - m_new)
                factor = decay / (l * decay + jnp.exp2(sink - m_new))

            def write(term: int):
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    refs.out_sm.at[pl.ds(0, group)],
                    refs.out_ref.at[term, row, pl.ds(head * group, group)],
                )

            write_terms(acc * _spread(factor, acc), shape.num_terms, write)

        @pl.when(jnp.logical_not(segment.is_whole))
        def _write_partial():
            place = 2 * walk.worker + jnp.where(segment.done == 0, 0, 1)

            def write(term: int):
                store_slowly(refs.stats_sm, (m, l)[term])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(refs.out_sm, refs.partials_ref.at[place, term])
                plgpu.copy_smem_to_gmem(refs.stats_sm, refs.stats_ref.at[place, term])

            write_terms(acc * _spread(1.0 / jnp.maximum(l, SMALL), acc), 2, write)

    walk.for_each(visit, looks_ahead=False)
    plgpu.wait_smem_to_gmem(0)


def _zeros(*shape: int):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _spread(values, like):
    """One value a query, for every row of `like`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, like.shape, [1]), plgpu.Layout.WGMMA)
