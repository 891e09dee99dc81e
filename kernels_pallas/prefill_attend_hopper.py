"""The attenders of the Hopper prefill kernel: warpgroups of MMA_ROWS queries each."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper_parts import (
    MMA_ROWS,
    NEVER,
    SMALL,
    capped_scores,
    clear_invisible,
    column_parts,
    is_wide,
    mma_accumulator,
    split_off,
)
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.prefill_parts_hopper import Item, PrefillRefs, PrefillShape, Walk, ceil_div
from kernels_pallas.tuning import HopperPrefillTuning


def attend(
    refs: PrefillRefs,
    walk: Walk,
    warpgroup: Any,
    shape: PrefillShape,
    options: AttentionOptions,
    tuning: HopperPrefillTuning,
    *,
    interpreted: bool,
) -> None:
    """Computes and writes what the queries of one attender see.

    Args:
      warpgroup: the attender's number; the last one clears V for all.
    """
    attenders, kv_tile, stages = tuning.attenders, tuning.kv_tile, tuning.stages
    k_sm, v_sm = refs.k_sm, refs.v_sm
    if attenders > 1:  # else the loader leaves as many anyway
        plgpu.set_max_registers(240 if is_wide(shape.head_dim) else 232, action="increase")
    by_row = plgpu.Layout.WGMMA.reduce(1)
    is_clearer = warpgroup == attenders - 1

    def take_turn():
        if attenders > 1:
            plgpu.barrier_arrive(refs.turn)
            plgpu.barrier_wait(refs.turn)

    def visit(item: Item):
        position, first, end = item.position, item.first, item.end
        kv_len = refs.kv_lens_ref[item.row]
        q_slot = lax.rem(item.number, jnp.int32(tuning.q_slots)) * attenders + warpgroup
        mine = position + warpgroup * MMA_ROWS  # of this warpgroup's first query
        my_token = item.token + warpgroup * MMA_ROWS
        my_queries = jnp.clip(item.num_queries - warpgroup * MMA_ROWS, 0, MMA_ROWS)
        is_aligned = lax.rem(item.token, jnp.int32(8)) == 0
        my_end = jnp.minimum(ceil_div(mine + MMA_ROWS, kv_tile), end)
        # Tiles that all queries see whole; with a window, none is sure to be. None that must
        # be cleared is one, whatever queries past the chunk's end would see.
        all_see = 0
        if options.window is None:
            all_see = lax.div(jnp.minimum(mine + 1, kv_len), jnp.int32(kv_tile))
        unmasked_end = jnp.clip(all_see, first, my_end)

        def needs_clearing(step):
            needs = (step + 1) * kv_tile > kv_len
            if options.window is not None:
                needs |= step * kv_tile < position - (options.window - 1)
            return needs

        def low_high(step):
            """Keys of a tile that may be visible to some query: others may hold anything."""
            low = -1 if options.window is None else position - (options.window - 1)
            return low - step * kv_tile, kv_len - step * kv_tile

        def kv_slot_of(step):
            return lax.rem(item.done + step - first, jnp.int32(stages))

        def await_v(step, masked: bool):
            slot = kv_slot_of(step)
            if not masked:
                plgpu.barrier_wait(refs.v_there.at[slot])
                return
            was_cleared = needs_clearing(step)
            pl.when(jnp.logical_not(is_clearer & was_cleared))(
                lambda: plgpu.barrier_wait(refs.v_there.at[slot])
            )
            if attenders > 1:
                pl.when(jnp.logical_not(is_clearer) & was_cleared)(
                    lambda: plgpu.barrier_wait(refs.v_cleared.at[0])
                )

        def clear_v(step):
            slot = kv_slot_of(step)

            @pl.when(is_clearer & needs_clearing(step))
            def _():
                plgpu.barrier_wait(refs.v_there.at[slot])
                clear_invisible(v_sm.at[slot], *low_high(step))
                if attenders > 1:
                    plgpu.barrier_arrive(refs.v_cleared.at[0])

        pl.when(is_aligned)(lambda: plgpu.barrier_wait(refs.q_there.at[q_slot]))
        pl.when(jnp.logical_not(is_aligned))(
            lambda: _load_plain_q(refs, shape, warpgroup, q_slot, my_token, item.head)
        )
        plgpu.barrier_wait(refs.k_there.at[kv_slot_of(first)])
        pl.when(warpgroup == 1)(take_turn)

        def take_in(step, carry, *, masked: bool):
            acc, m, l = carry  # noqa: E741
            slot = kv_slot_of(step)
            if masked:
                clear_v(step)

            def qk(acc_ref):
                # why loops over terms: unrolled, their many addresses would spill registers
                @pl.loop(0, shape.num_terms)
                def _(term):
                    q_sm = refs.q_sm.at[q_slot, term]
                    plgpu.wgmma(acc_ref, q_sm, k_sm.at[slot].transpose((1, 0)))

                take_turn()
                return acc_ref[...]

            scores = pl.run_scoped(qk, mma_accumulator(MMA_ROWS, kv_tile))
            plgpu.barrier_arrive(refs.k_read.at[slot])
            scores, factor = capped_scores(scores, options)
            if masked:
                scores = _mask(scores, mine, step * kv_tile, options)
            m_new = jnp.maximum(m, scores.max(axis=1) * factor)
            decay = jnp.exp2(m - m_new)
            p = jnp.exp2(scores * factor - lax.broadcast_in_dim(m_new, scores.shape, [0]))
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            l = l * decay + p.sum(axis=1)  # noqa: E741
            p = p.astype(shape.dtype)
            if attenders > 1:
                # Keeps the softmax ahead of the other warpgroup's turn.
                acc, l, m_new, p = lax.optimization_barrier((acc, l, m_new, p))  # noqa: E741
                plgpu.barrier_arrive(refs.turn)
            await_v(step, masked)
            if attenders > 1:
                plgpu.barrier_wait(refs.turn)

            def await_next_k():
                pl.when(step + 1 < my_end)(
                    lambda: plgpu.barrier_wait(refs.k_there.at[kv_slot_of(step + 1)])
                )

            if interpreted:
                refs.p_sm[warpgroup] = p
                plgpu.commit_smem()

                def pv(acc_ref):
                    plgpu.wgmma(acc_ref, refs.p_sm.at[warpgroup], v_sm.at[slot])
                    return acc_ref[...]

                acc = acc + pl.run_scoped(pv, mma_accumulator(MMA_ROWS, shape.head_dim))
                await_next_k()
            else:

                def add_pv(acc_ref):
                    plgpu.wgmma(acc_ref, p, v_sm.at[slot])
                    await_next_k()

                acc = pl.run_state(add_pv)(plgpu.WGMMAAccumulatorRef.init(acc))
            plgpu.barrier_arrive(refs.v_read.at[slot])
            return acc, m_new, l

        carry = (
            plgpu.layout_cast(
                jnp.zeros((MMA_ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA
            ),
            plgpu.layout_cast(jnp.full((MMA_ROWS,), NEVER, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((MMA_ROWS,), jnp.float32), by_row),
        )
        unmasked, masked = (functools.partial(take_in, masked=x) for x in (False, True))
        carry = lax.fori_loop(first, unmasked_end, unmasked, carry)
        acc, m, l = lax.fori_loop(unmasked_end, my_end, masked, carry)  # noqa: E741

        @pl.loop(my_end, end)
        def _pass(step):
            """Tiles that only the other warpgroup reads: keep in step with it."""
            slot = kv_slot_of(step)
            plgpu.barrier_wait(refs.k_there.at[slot])
            plgpu.barrier_arrive(refs.k_read.at[slot])
            take_turn()  # before the wait: the other one may have to clear V first
            await_v(step, masked=True)
            plgpu.barrier_arrive(refs.v_read.at[slot])
            take_turn()

        pl.when(warpgroup == 0)(take_turn)
        factor = 1.0 / jnp.maximum(l, SMALL)
        if shape.has_sinks:
            sink = refs.sinks_ref[item.head]
            m_new = jnp.maximum(m, sink)
            decay = jnp.exp2(m - m_new)
            factor = decay / (l * decay + jnp.exp2(sink - m_new))
        result = acc * lax.broadcast_in_dim(factor, acc.shape, [0])

        def write_rows(result):
            _write_rows(refs, shape, result, warpgroup, my_token, my_queries, item.head)

        if shape.num_terms == 1:
            result = result.astype(shape.dtype)

            @pl.when(is_aligned & (my_queries == MMA_ROWS))
            def _write():
                refs.q_sm[q_slot, 0] = result
                plgpu.commit_smem()
                begin = lax.div(item.token, jnp.int32(8)) * 8 + warpgroup * MMA_ROWS
                plgpu.copy_smem_to_gmem(
                    refs.q_sm.at[q_slot, 0], refs.out_ref.at[pl.ds(begin, MMA_ROWS), item.head]
                )

            pl.when(jnp.logical_not(is_aligned & (my_queries == MMA_ROWS)))(
                lambda: write_rows(result)
            )
        else:  # whole tiles are rare where there are two terms: in steps of few tokens
            write_rows(result)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(refs.q_free.at[q_slot])

    walk.for_each(visit)
    plgpu.wait_smem_to_gmem(0)


def _load_plain_q(refs: PrefillRefs, shape: PrefillShape, warpgroup, q_slot, token, head):
    """Queries that begin anywhere, through the unswizzled buffer."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.loop(0, shape.num_terms)
    def _(term):
        for columns in column_parts(shape.head_dim):
            plgpu.copy_gmem_to_smem(
                refs.q_ref.at[shape.tokens(term, token, MMA_ROWS), head, columns],
                refs.plain_sm.at[warpgroup],
                refs.plain_there.at[warpgroup],
            )
            plgpu.barrier_wait(refs.plain_there.at[warpgroup])
            q = plgpu.load(refs.plain_sm.at[warpgroup], layout=plgpu.Layout.WGMMA)
            refs.q_sm[q_slot, term, :, columns] = q
            plgpu.commit_smem()


def _write_rows(refs: PrefillRefs, shape: PrefillShape, result, warpgroup, token, num_rows, head):
    """The first `num_rows` rows of a result, in boxes whose sizes are powers of two."""
    rows_sm = refs.plain_sm.at[warpgroup]
    for columns in column_parts(shape.head_dim):
        out_ref = refs.out_ref.at[:, head, columns]

        def write_term(term, rest, out_ref=out_ref):
            """Returns what the term leaves for the next."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            rounded, rest = split_off(rest, shape.dtype)
            rows_sm[...] = rounded
            plgpu.commit_smem()
            size = MMA_ROWS
            while size:
                begin = num_rows & ~jnp.int32(2 * size - 1)

                @pl.when((num_rows & size) != 0)
                def _(size=size, begin=begin):
                    plgpu.copy_smem_to_gmem(
                        rows_sm.at[pl.ds(begin, size)],
                        out_ref.at[shape.tokens(term, token + begin, size)],
                    )

                size //= 2
            return rest

        part = result[:, columns.start : columns.start + columns.size]
        lax.fori_loop(0, shape.num_terms, write_term, part)


def _mask(scores, first_query, first_key, options: AttentionOptions):
    """Causal, and within the window."""
    query = first_query + plgpu.broadcasted_iota(
        jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA
    )
    key = first_key + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    visible = key <= query
    if options.window is not None:
        visible &= key > query - options.window
    return jnp.where(visible, scores, -jnp.inf)
