"""Paged causal attention of prompt chunks for Hopper GPUs, Pallas Mosaic GPU.

A persistent kernel: each multiprocessor takes every num_programs-th (query tile, query head) of the
plan. One warpgroup loads (queries, and K and V one TMA box a block, through the block table), the
others attend, MMA_ROWS queries each, over shared K and V. Two attenders take turns on the matrix
unit: one multiplies while the other does its softmax (the schedule of FlashAttention-3; its form in
Mosaic follows JAX's own dense example). The loader is a tile ahead, across query tiles.

Queries and results move as swizzled boxes where a tile is full and begins at a multiple of 8
tokens. Elsewhere they go through an unswizzled buffer, results in boxes of 32, 16, .., 1 rows, so
that nothing of another row is ever written.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.hopper_parts import (
    LOG2E,
    MMA_ROWS,
    NEVER,
    SMALL,
    capped_scores,
    clear_invisible,
    column_parts,
    interpreted_options,
    is_wide,
    kv_boxes,
    mma_accumulator,
    part_size,
    swizzled_smem,
)
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.pool import KVPool
from kernels_pallas.prefill_plan import PrefillPlan, TileColumn
from kernels_pallas.tuning import HopperPrefillTuning


@dataclass(frozen=True)
class _Shape:
    num_q_heads: int
    group: int  # query heads a KV head
    head_dim: int
    block_size: int
    dtype: jnp.dtype
    has_sinks: bool


def paged_prefill(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    pool: KVPool,
    first_row: Int32[Array, ""],
    block_tables: Int32[Array, "num_rows max_blocks_per_row"],
    kv_lens: Int32[Array, " num_rows"],
    plan: PrefillPlan,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: HopperPrefillTuning,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "num_padded_tokens num_q_heads head_dim"]:
    """Attends the plan's queries to their rows' keys, which are in the pool already.

    Args:
      first_row: the layer's first row in the pool (`pool.first_row(layer)`).
      plan: made with this tuning's `q_tile`.
      interpret: run on the CPU; the probabilities then go through shared memory.

    Returns:
      The output, of a few tokens perhaps more than `q`; those that are in no tile hold anything.
    """
    shape = _Shape(
        num_q_heads=q.shape[1],
        group=q.shape[1] // pool.num_kv_heads,
        head_dim=q.shape[2],
        block_size=pool.block_size,
        dtype=q.dtype,
        has_sinks=sinks is not None,
    )
    num_tokens = q.shape[0]
    # Boxes are whole tiles of 8 tokens, and none may be larger than the array. The last one may
    # reach past the end, where TMA gives 0; the interpreter refuses that.
    missing = max(-num_tokens % 8, MMA_ROWS - num_tokens)
    if interpret is not None:
        missing = -num_tokens % 8 + tuning.q_tile
    if missing:
        q = jnp.pad(q, ((0, missing), (0, 0), (0, 0)))
    kernel = plgpu.kernel(
        functools.partial(
            _entry, shape=shape, options=options, tuning=tuning, interpreted=interpret is not None
        ),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tuning.num_programs,),
        grid_names=("program",),
        num_threads=tuning.attenders + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        **interpreted_options(interpret),
    )
    sinks = jnp.full((q.shape[1],), NEVER) if sinks is None else sinks * LOG2E
    return kernel(
        q,
        pool.data,
        block_tables,
        kv_lens,
        jnp.asarray(first_row, jnp.int32).reshape(1),
        plan.tiles,
        plan.num_tiles,
        sinks,
    )


def _entry(
    *refs, shape: _Shape, options: AttentionOptions, tuning: HopperPrefillTuning, interpreted
):
    """Allocates shared memory and barriers, then splits into the loader and the attenders."""
    attenders, stages = tuning.attenders, tuning.stages
    q_shape = (tuning.q_slots * attenders, MMA_ROWS, shape.head_dim)
    kv_shape = (stages, tuning.kv_tile, shape.head_dim)
    plain_shape = (attenders, MMA_ROWS, part_size(shape.head_dim))
    num_boxes = max(1, tuning.kv_tile // shape.block_size)
    p_shape = (attenders, MMA_ROWS, tuning.kv_tile)
    pl.run_scoped(
        functools.partial(
            _program, *refs, shape=shape, options=options, tuning=tuning, interpreted=interpreted
        ),
        swizzled_smem(q_shape, shape.dtype),  # q, and swizzled results
        swizzled_smem(kv_shape, shape.dtype),  # k
        swizzled_smem(kv_shape, shape.dtype),  # v
        plgpu.SMEM(plain_shape, shape.dtype),  # q and out, unswizzled
        swizzled_smem(p_shape, shape.dtype) if interpreted else None,
        plgpu.Barrier(num_barriers=tuning.q_slots * attenders),  # q is there
        plgpu.Barrier(num_barriers=attenders),  # unswizzled q is there
        plgpu.Barrier(num_arrivals=num_boxes, num_barriers=stages),  # k is there
        plgpu.Barrier(num_arrivals=num_boxes, num_barriers=stages),  # v is there
        plgpu.Barrier(num_barriers=tuning.q_slots * attenders),  # q may be overwritten
        plgpu.Barrier(num_arrivals=attenders, num_barriers=stages),  # k was read
        plgpu.Barrier(num_arrivals=attenders, num_barriers=stages),  # v was read
        plgpu.Barrier(num_barriers=1),  # v was cleared
        plgpu.Barrier(num_arrivals=attenders),  # whose turn it is on the matrix unit
        collective_axes="warpgroup",
    )


def _program(
    q_ref,  # [num_tokens, q heads, head_dim] GMEM
    pool_ref,  # [pool_rows, 2, kv heads, block_size, head_dim] GMEM
    tables_ref,  # i32[num_rows, max_blocks_per_row] GMEM
    kv_lens_ref,  # i32[num_rows] GMEM
    first_row_ref,  # i32[1] GMEM
    tiles_ref,  # i32[max_tiles, 4] GMEM
    num_tiles_ref,  # i32[1] GMEM
    sinks_ref,  # f32[q heads] GMEM
    out_ref,  # [num_tokens, q heads, head_dim] GMEM
    q_sm,  # [q_slots * attenders, MMA_ROWS, head_dim] SMEM
    k_sm,  # [stages, kv_tile, head_dim] SMEM
    v_sm,  # [stages, kv_tile, head_dim] SMEM
    plain_sm,  # [attenders, MMA_ROWS, part_size] SMEM
    p_sm,  # [attenders, MMA_ROWS, kv_tile] SMEM, or None
    q_there,
    plain_there,
    k_there,
    v_there,
    q_free,
    k_read,
    v_read,
    v_cleared,
    turn,
    *,
    shape: _Shape,
    options: AttentionOptions,
    tuning: HopperPrefillTuning,
    interpreted: bool,
):
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    attenders, kv_tile, stages, q_slots = (
        tuning.attenders,
        tuning.kv_tile,
        tuning.stages,
        tuning.q_slots,
    )
    num_items = num_tiles_ref[0] * shape.num_q_heads
    programs = jnp.int32(tuning.num_programs)
    count = jnp.maximum(lax.div(num_items - program + (programs - 1), programs), 0)

    def walk(visit):
        """Calls visit(number, row, head, token, queries, position, first step, end step, done).

        Steps are KV tiles of the row; `done` of them came before, over all items.
        """

        def item(number, done):
            index = program + number * programs
            tile = lax.div(index, jnp.int32(shape.num_q_heads))
            head = lax.rem(index, jnp.int32(shape.num_q_heads))
            row, token, queries, position = (tiles_ref[tile, column] for column in TileColumn)
            first = 0
            if options.window is not None:
                first = lax.div(jnp.maximum(position - (options.window - 1), 0), jnp.int32(kv_tile))
            end = _ceil_div(jnp.minimum(kv_lens_ref[row], position + tuning.q_tile), kv_tile)
            visit(number, row, head, token, queries, position, first, end, done)
            return done + end - first

        return lax.fori_loop(0, count, item, jnp.zeros((), jnp.int32))

    @pl.when(warpgroup == attenders)
    def _load():
        plgpu.set_max_registers(24 if is_wide(shape.head_dim) else 40, action="decrease")

        def visit(number, row, head, token, queries, position, first, end, done):
            del queries, position
            slot = lax.rem(number, jnp.int32(q_slots))
            for w in range(attenders):
                q_slot = slot * attenders + w
                pl.when(number >= q_slots)(
                    lambda q_slot=q_slot: plgpu.barrier_wait(q_free.at[q_slot])
                )

                @pl.when(lax.rem(token, jnp.int32(8)) == 0)
                def _(w=w, q_slot=q_slot):
                    begin = lax.div(token, jnp.int32(8)) * 8 + w * MMA_ROWS
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[pl.ds(begin, MMA_ROWS), head], q_sm.at[q_slot], q_there.at[q_slot]
                    )

            kv_head = lax.div(head, jnp.int32(shape.group))

            @pl.loop(first, end)
            def _(step):
                total = done + step - first
                kv_slot = lax.rem(total, jnp.int32(stages))
                boxes = kv_boxes(tables_ref, row, step, first_row_ref[0], shape.block_size, kv_tile)
                for kv, sm, there, read in ((0, k_sm, k_there, k_read), (1, v_sm, v_there, v_read)):
                    pl.when(total >= stages)(lambda read=read: plgpu.barrier_wait(read.at[kv_slot]))
                    for j, (pool_row, offset, size) in enumerate(boxes):
                        plgpu.copy_gmem_to_smem(
                            pool_ref.at[pool_row, kv, kv_head, pl.ds(offset, size)],
                            sm.at[kv_slot, pl.ds(j * size, size)],
                            there.at[kv_slot],
                        )

        total = walk(visit)
        # Every arrival is waited for.
        for slot in range(stages):
            pl.when(slot < total)(lambda slot=slot: plgpu.barrier_wait(k_read.at[slot]))
            pl.when(slot < total)(lambda slot=slot: plgpu.barrier_wait(v_read.at[slot]))
        for slot in range(q_slots):
            for w in range(attenders):
                q_slot = slot * attenders + w
                pl.when(slot < count)(lambda q_slot=q_slot: plgpu.barrier_wait(q_free.at[q_slot]))

    @pl.when(warpgroup < attenders)
    def _attend():
        plgpu.set_max_registers(240 if is_wide(shape.head_dim) else 232, action="increase")
        by_row = plgpu.Layout.WGMMA.reduce(1)
        is_clearer = warpgroup == attenders - 1

        def take_turn():
            if attenders > 1:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def visit(number, row, head, token, queries, position, first, end, done):
            kv_len = kv_lens_ref[row]
            q_slot = lax.rem(number, jnp.int32(q_slots)) * attenders + warpgroup
            mine = position + warpgroup * MMA_ROWS  # of this warpgroup's first query
            my_token = token + warpgroup * MMA_ROWS
            my_queries = jnp.clip(queries - warpgroup * MMA_ROWS, 0, MMA_ROWS)
            is_aligned = lax.rem(token, jnp.int32(8)) == 0
            my_end = jnp.minimum(_ceil_div(mine + MMA_ROWS, kv_tile), end)
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
                return lax.rem(done + step - first, jnp.int32(stages))

            def await_v(step, masked: bool):
                slot = kv_slot_of(step)
                if not masked:
                    plgpu.barrier_wait(v_there.at[slot])
                    return
                was_cleared = needs_clearing(step)
                pl.when(jnp.logical_not(is_clearer & was_cleared))(
                    lambda: plgpu.barrier_wait(v_there.at[slot])
                )
                if attenders > 1:
                    pl.when(jnp.logical_not(is_clearer) & was_cleared)(
                        lambda: plgpu.barrier_wait(v_cleared.at[0])
                    )

            def clear_v(step):
                slot = kv_slot_of(step)

                @pl.when(is_clearer & needs_clearing(step))
                def _():
                    plgpu.barrier_wait(v_there.at[slot])
                    clear_invisible(v_sm.at[slot], *low_high(step))
                    if attenders > 1:
                        plgpu.barrier_arrive(v_cleared.at[0])

            pl.when(is_aligned)(lambda: plgpu.barrier_wait(q_there.at[q_slot]))

            @pl.when(jnp.logical_not(is_aligned))
            def _load_q():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for columns in column_parts(shape.head_dim):
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[pl.ds(my_token, MMA_ROWS), head, columns],
                        plain_sm.at[warpgroup],
                        plain_there.at[warpgroup],
                    )
                    plgpu.barrier_wait(plain_there.at[warpgroup])
                    q = plgpu.load(plain_sm.at[warpgroup], layout=plgpu.Layout.WGMMA)
                    q_sm[q_slot, :, columns] = q
                    plgpu.commit_smem()

            plgpu.barrier_wait(k_there.at[kv_slot_of(first)])
            pl.when(warpgroup == 1)(take_turn)

            def take_in(step, carry, *, masked: bool):
                acc, m, l = carry  # noqa: E741
                slot = kv_slot_of(step)
                if masked:
                    clear_v(step)

                def qk(acc_ref):
                    plgpu.wgmma(acc_ref, q_sm.at[q_slot], k_sm.at[slot].transpose((1, 0)))
                    take_turn()
                    return acc_ref[...]

                scores = pl.run_scoped(qk, mma_accumulator(MMA_ROWS, kv_tile))
                plgpu.barrier_arrive(k_read.at[slot])
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
                    plgpu.barrier_arrive(turn)
                await_v(step, masked)
                if attenders > 1:
                    plgpu.barrier_wait(turn)

                def await_next_k():
                    pl.when(step + 1 < my_end)(
                        lambda: plgpu.barrier_wait(k_there.at[kv_slot_of(step + 1)])
                    )

                if interpreted:
                    p_sm[warpgroup] = p
                    plgpu.commit_smem()

                    def pv(acc_ref):
                        plgpu.wgmma(acc_ref, p_sm.at[warpgroup], v_sm.at[slot])
                        return acc_ref[...]

                    acc = acc + pl.run_scoped(pv, mma_accumulator(MMA_ROWS, shape.head_dim))
                    await_next_k()
                else:

                    def add_pv(acc_ref):
                        plgpu.wgmma(acc_ref, p, v_sm.at[slot])
                        await_next_k()

                    acc = pl.run_state(add_pv)(plgpu.WGMMAAccumulatorRef.init(acc))
                plgpu.barrier_arrive(v_read.at[slot])
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
                plgpu.barrier_wait(k_there.at[slot])
                plgpu.barrier_arrive(k_read.at[slot])
                take_turn()  # before the wait: the other one may have to clear V first
                await_v(step, masked=True)
                plgpu.barrier_arrive(v_read.at[slot])
                take_turn()

            pl.when(warpgroup == 0)(take_turn)
            factor = 1.0 / jnp.maximum(l, SMALL)
            if shape.has_sinks:
                sink = sinks_ref[head]
                m_new = jnp.maximum(m, sink)
                decay = jnp.exp2(m - m_new)
                factor = decay / (l * decay + jnp.exp2(sink - m_new))
            result = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(shape.dtype)

            @pl.when(is_aligned & (my_queries == MMA_ROWS))
            def _write():
                q_sm[q_slot] = result
                plgpu.commit_smem()
                begin = lax.div(token, jnp.int32(8)) * 8 + warpgroup * MMA_ROWS
                plgpu.copy_smem_to_gmem(q_sm.at[q_slot], out_ref.at[pl.ds(begin, MMA_ROWS), head])

            @pl.when(jnp.logical_not(is_aligned & (my_queries == MMA_ROWS)))
            def _write_rows():
                for columns in column_parts(shape.head_dim):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plain_sm[warpgroup] = result[:, columns.start : columns.start + columns.size]
                    plgpu.commit_smem()
                    part_ref = out_ref.at[:, head, columns]
                    _store_rows(plain_sm.at[warpgroup], part_ref, my_token, my_queries)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(q_free.at[q_slot])

        walk(visit)
        plgpu.wait_smem_to_gmem(0)


def _store_rows(rows_sm, out_ref, token, num_rows):
    """Stores the first `num_rows` rows, in boxes whose sizes are powers of two."""
    size = MMA_ROWS
    while size:
        begin = num_rows & ~jnp.int32(2 * size - 1)

        @pl.when((num_rows & size) != 0)
        def _(size=size, begin=begin):
            plgpu.copy_smem_to_gmem(
                rows_sm.at[pl.ds(begin, size)], out_ref.at[pl.ds(token + begin, size)]
            )

        size //= 2


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


def _ceil_div(dividend, divisor: int):
    return lax.div(dividend + (divisor - 1), jnp.int32(divisor))
