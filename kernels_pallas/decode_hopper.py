"""Paged decode attention for Hopper GPUs (compute capability 9.0), Pallas Mosaic GPU.

A persistent kernel: every multiprocessor runs one program with a few workers (see `decode_plan`).
A worker is a pair of warpgroups: the loader walks the worker's stretch of KV tiles and keeps a ring
of them in flight, one TMA box a block and head, found through the block table; the attender walks
the same stretch with an online softmax. The query heads of one KV head are rows of one MMA tile
(padded to 64 by zeros, whose products take little power: where power bounds the clock, a whole step
is faster for it). The ring runs on across segments, so that the loads of the next (row, head) are
under way while this one ends.

Scores are kept in base 2. A segment that covers its whole unit writes the output; a partial one
writes its normalised result, as the sum of two values of the input's type (exact to twice its
precision), with its maximum and sum, and `decode_combine_hopper` merges them in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.decode_combine_hopper import DecodeShape, combine, sink_rows
from kernels_pallas.decode_plan import DecodePlan, RowColumn, WorkerColumn
from kernels_pallas.hopper_parts import (
    MMA_ROWS,
    NEVER,
    SMALL,
    WARPGROUP,
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
from kernels_pallas.tuning import HopperDecodeTuning


def paged_decode(
    q: Float[Array, "num_rows num_q_heads head_dim"],
    pool: KVPool,
    first_row: Int32[Array, ""],
    block_tables: Int32[Array, "num_rows max_blocks_per_row"],
    plan: DecodePlan,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: HopperDecodeTuning,
    *,
    group: int,
    out: Float[Array, "num_tokens num_q_heads head_dim"] | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "num_rows_or_tokens num_q_heads head_dim"]:
    """Attends one query a row to the row's keys, which are in the pool already.

    Args:
      q: of each KV head its queries alone, or `padded_group(group)` rows of which they are the
        first; what the others hold does not matter.
      first_row: the layer's first row in the pool (`pool.first_row(layer)`).
      group: query heads a KV head.
      plan: made with this tuning's `kv_tile` and `num_workers`.
      out: array whose first rows become the result, in place, where the plan has tiles for them;
        None = a new one. Only when `writes_whole_rows(group, head_dim)`.
      interpret: run on the CPU; the probabilities then go through shared memory.

    Returns:
      The result, or `out` with it; rows for which the plan has no tiles hold anything.
    """
    shape = _shape_of(q, group, pool, sinks)
    num_rows, num_places = q.shape[0], 2 * tuning.num_workers
    out_type = (
        jax.ShapeDtypeStruct(
            (num_rows, shape.num_kv_heads * shape.out_group, shape.head_dim), q.dtype
        ),
        jax.ShapeDtypeStruct((num_places, 2, shape.padded_group, shape.head_dim), q.dtype),
        jax.ShapeDtypeStruct((num_places, 2, MMA_ROWS), jnp.float32),
    )
    out_ref = None
    if out is not None:
        assert shape.out_group == group, f"{group=} does not fill whole rows"
        out_ref, out_type = jax.new_ref(out), out_type[1:]
    kernel = plgpu.kernel(
        functools.partial(
            _entry, shape=shape, options=options, tuning=tuning, interpreted=interpret is not None
        ),
        out_type=out_type,
        grid=(tuning.num_programs,),
        grid_names=("program",),
        num_threads=2 * tuning.workers,
        thread_name="warpgroup",
        # No reduction here crosses warps: little scratch memory will do.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        **interpreted_options(interpret),
    )
    arguments = (
        _pad_group(q, shape),
        pool.data,
        block_tables,
        jnp.asarray(first_row, jnp.int32).reshape(1),
        plan.rows,
        plan.workers,
        sink_rows(sinks, shape),
    )
    if out_ref is None:
        written, partials, stats = kernel(*arguments)
    else:
        partials, stats = kernel(*arguments, out_ref)
        written = jax.freeze(out_ref)
    out = combine(written, partials, stats, plan, shape, sinks, interpret)
    if shape.out_group == group:
        return out
    out = out.reshape(num_rows, shape.num_kv_heads, shape.out_group, shape.head_dim)
    return out[:, :, :group].reshape(num_rows, -1, shape.head_dim)


def writes_whole_rows(group: int, head_dim: int) -> bool:
    """Whether a unit's result fills whole warpgroups of elements, so that none lies between."""
    return group * head_dim % WARPGROUP == 0


def padded_group(group: int) -> int:
    """Rows of a query box: whole tiles of 8."""
    return -(-group // 8) * 8


def _shape_of(q: Array, group: int, pool: KVPool, sinks: Array | None) -> DecodeShape:
    return DecodeShape(
        num_kv_heads=pool.num_kv_heads,
        group=group,
        padded_group=padded_group(group),
        out_group=next(n for n in range(group, group + 3) if n * q.shape[2] % WARPGROUP == 0),
        has_sinks=sinks is not None,
        head_dim=q.shape[2],
        block_size=pool.block_size,
        dtype=q.dtype,
    )


def _pad_group(q: Array, shape: DecodeShape) -> Array:
    """[num_rows, kv heads * padded_group, head_dim]: a box is whole tiles of 8 rows."""
    if q.shape[1] == shape.num_kv_heads * shape.padded_group:
        return q
    q = q.reshape(q.shape[0], shape.num_kv_heads, shape.group, shape.head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, shape.padded_group - shape.group), (0, 0)))
    return q.reshape(q.shape[0], -1, shape.head_dim)


def _entry(
    *refs,
    shape: DecodeShape,
    options: AttentionOptions,
    tuning: HopperDecodeTuning,
    interpreted: bool,
):
    """Allocates shared memory and barriers, then splits into loaders and attenders."""
    stages = tuning.workers * tuning.stages
    kv_shape = (stages, tuning.kv_tile, shape.head_dim)
    q_shape = (2 * tuning.workers, MMA_ROWS, shape.head_dim)
    num_parts = len(column_parts(shape.head_dim))
    out_shape = (tuning.workers * num_parts, MMA_ROWS, part_size(shape.head_dim))
    num_boxes = max(1, tuning.kv_tile // shape.block_size)
    p_shape = (tuning.workers, MMA_ROWS, tuning.kv_tile)
    pl.run_scoped(
        functools.partial(
            _program, *refs, shape=shape, options=options, tuning=tuning, interpreted=interpreted
        ),
        swizzled_smem(q_shape, shape.dtype),  # q, of this segment and the next
        swizzled_smem(kv_shape, shape.dtype),  # k
        swizzled_smem(kv_shape, shape.dtype),  # v
        plgpu.SMEM(out_shape, shape.dtype),  # out
        plgpu.SMEM((tuning.workers, MMA_ROWS), jnp.float32),  # m, then l
        swizzled_smem(p_shape, shape.dtype) if interpreted else None,
        plgpu.Barrier(num_barriers=2 * tuning.workers),  # q is there
        plgpu.Barrier(num_arrivals=num_boxes, num_barriers=stages),  # k is there
        plgpu.Barrier(num_arrivals=num_boxes, num_barriers=stages),  # v is there
        plgpu.Barrier(num_barriers=2 * tuning.workers),  # q can be filled
        plgpu.Barrier(num_barriers=stages),  # k was read
        plgpu.Barrier(num_barriers=stages),  # v was read
        collective_axes="warpgroup",
    )


def _program(
    q_ref,  # [num_rows, kv heads * padded_group, head_dim] GMEM
    pool_ref,  # [pool_rows, 2, kv heads, block_size, head_dim] GMEM
    tables_ref,  # i32[num_rows, max_blocks_per_row] GMEM
    first_row_ref,  # i32[1] GMEM
    rows_ref,  # i32[num_rows, 4] GMEM
    workers_ref,  # i32[num_workers, 8] GMEM
    sinks_ref,  # f32[kv heads, MMA_ROWS] GMEM
    out_ref,  # [num_rows, kv heads * out_group, head_dim] GMEM
    partials_ref,  # [places, 2, padded_group, head_dim] GMEM
    stats_ref,  # f32[places, 2 (m and l), MMA_ROWS] GMEM
    q_sm,  # [2 * workers, MMA_ROWS, head_dim] SMEM
    k_sm,  # [workers * stages, kv_tile, head_dim] SMEM
    v_sm,  # [workers * stages, kv_tile, head_dim] SMEM
    out_sm,  # [workers * parts, MMA_ROWS, part_size] SMEM
    stats_sm,  # f32[workers, MMA_ROWS] SMEM
    p_sm,  # [workers, MMA_ROWS, kv_tile] SMEM, or None
    q_there,
    k_there,
    v_there,
    q_read,
    k_read,
    v_read,
    *,
    shape: DecodeShape,
    options: AttentionOptions,
    tuning: HopperDecodeTuning,
    interpreted: bool,
):
    warpgroup = lax.axis_index("warpgroup")
    pair = lax.div(warpgroup, jnp.int32(2))
    worker = lax.axis_index("program") * tuning.workers + pair
    begin, end, begin_row, num_segments = (workers_ref[worker, column] for column in WorkerColumn)
    kv_tile, stages, group = tuning.kv_tile, tuning.stages, shape.out_group

    def walk(visit, *, looks_ahead: bool):
        """Calls visit(segment, row, keys, head, first tile, tiles, is whole unit, tiles before).

        Args:
          looks_ahead: asks for the next row's entries while a segment is under way.
        """

        def entries_of(row):
            last = rows_ref.shape[0] - 1
            return [rows_ref[jnp.minimum(row, last), column] for column in RowColumn]

        def segment(number, carry):
            position, row, *entries = carry
            row_begin, row_end, first_tile, kv_len = entries or entries_of(row)
            next_entries = entries_of(row + 1) if looks_ahead else ()
            tiles = lax.div(row_end - row_begin, jnp.int32(shape.num_kv_heads))
            head = lax.div(position - row_begin, tiles)
            tile = position - row_begin - head * tiles
            count = jnp.minimum(tiles - tile, end - position)
            is_whole = count == tiles
            visit(number, row, kv_len, head, first_tile + tile, count, is_whole, position - begin)
            position += count
            is_over = position == row_end
            entries = map(functools.partial(jnp.where, is_over), next_entries, entries)
            return position, jnp.where(is_over, row + 1, row), *entries

        first_entries = ()
        if looks_ahead:
            columns = [WorkerColumn.of_first_row(column) for column in RowColumn]
            first_entries = [workers_ref[worker, column] for column in columns]
        lax.fori_loop(0, num_segments, segment, (begin, begin_row, *first_entries))

    @pl.when(lax.rem(warpgroup, jnp.int32(2)) == 1)
    def _load():
        plgpu.set_max_registers(40, action="decrease")

        def visit(number, row, kv_len, head, first_tile, count, is_whole, done):
            del is_whole
            q_slot = 2 * pair + lax.rem(number, jnp.int32(2))
            plgpu.barrier_wait(q_read.at[q_slot])
            plgpu.copy_gmem_to_smem(
                q_ref.at[row, pl.ds(head * shape.padded_group, shape.padded_group)],
                q_sm.at[q_slot, pl.ds(0, shape.padded_group)],
                q_there.at[q_slot],
            )

            @pl.loop(0, count)
            def _(i):
                step = done + i
                slot = pair * stages + lax.rem(step, jnp.int32(stages))
                boxes = kv_boxes(
                    tables_ref, row, first_tile + i, first_row_ref[0], shape.block_size, kv_tile
                )
                low, high = _visible(kv_len, (first_tile + i) * kv_tile, options)
                for kv, sm, there, read in ((0, k_sm, k_there, k_read), (1, v_sm, v_there, v_read)):
                    pl.when(step >= stages)(lambda read=read: plgpu.barrier_wait(read.at[slot]))
                    for j, (pool_row, offset, size) in enumerate(boxes):
                        # What no query sees is not loaded: past a row's end all rows would read
                        # the null block, which takes as long as other blocks do.
                        lax.cond(
                            (j * size < high) & ((j + 1) * size > low),
                            functools.partial(
                                plgpu.copy_gmem_to_smem,
                                pool_ref.at[pool_row, kv, head, pl.ds(offset, size)],
                                sm.at[slot, pl.ds(j * size, size)],
                                there.at[slot],
                            ),
                            functools.partial(plgpu.barrier_arrive, there.at[slot]),
                        )

        walk(visit, looks_ahead=True)

    @pl.when(lax.rem(warpgroup, jnp.int32(2)) == 0)
    def _attend():
        alone = 240 if is_wide(shape.head_dim) else 232
        plgpu.set_max_registers(216 if tuning.workers == 2 else alone, action="increase")
        by_row = plgpu.Layout.WGMMA.reduce(1)
        parts = column_parts(shape.head_dim)

        def fill_out(rows):
            for i, columns in enumerate(parts):
                part = rows[:, columns.start : columns.start + columns.size]
                out_sm[pair * len(parts) + i] = part

        def store_out(ref):
            for i, columns in enumerate(parts):
                part_sm = out_sm.at[pair * len(parts) + i, pl.ds(0, ref.shape[0])]
                plgpu.copy_smem_to_gmem(part_sm, ref.at[:, columns])

        def clear_q():
            """Makes the rows zero that no query will fill, and lets the loader fill the others."""
            for slot in (2 * pair, 2 * pair + 1):
                for columns in parts:
                    part = q_sm.at[slot, :, columns]
                    zeros = jnp.zeros(part.shape, shape.dtype)
                    part[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            for i in range(2):
                pl.when(i < num_segments)(lambda i=i: plgpu.barrier_arrive(q_read.at[2 * pair + i]))

        def visit(number, row, kv_len, head, first_tile, count, is_whole, done):
            q_slot = 2 * pair + lax.rem(number, jnp.int32(2))
            plgpu.barrier_wait(q_there.at[q_slot])

            def take_in(i, carry, *, masked: bool):
                acc, m, l = carry  # noqa: E741
                step = done + i
                slot = pair * stages + lax.rem(step, jnp.int32(stages))
                # Its arrival is waited for, if there is a load that needs the slot.
                is_needed = step + stages < end - begin
                low, high = _visible(kv_len, (first_tile + i) * kv_tile, options)
                plgpu.barrier_wait(k_there.at[slot])

                def qk(acc_ref):
                    plgpu.wgmma(acc_ref, q_sm.at[q_slot], k_sm.at[slot].transpose((1, 0)))
                    return acc_ref[...]

                scores = pl.run_scoped(qk, mma_accumulator(MMA_ROWS, kv_tile))
                pl.when(is_needed)(lambda: plgpu.barrier_arrive(k_read.at[slot]))
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
                plgpu.barrier_wait(v_there.at[slot])
                if masked:
                    clear_invisible(v_sm.at[slot], low, high)
                if interpreted:
                    p_sm[pair] = p
                    plgpu.commit_smem()

                def pv(acc_ref):
                    plgpu.wgmma(acc_ref, p_sm.at[pair] if interpreted else p, v_sm.at[slot])
                    return acc_ref[...]

                if is_wide(shape.head_dim) and not interpreted:
                    # There are registers for one accumulator alone.
                    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                    acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_sm.at[slot]))(
                        plgpu.WGMMAAccumulatorRef.init(acc)
                    )
                    pl.when(is_needed)(lambda: plgpu.barrier_arrive(v_read.at[slot]))
                else:
                    added = pl.run_scoped(pv, mma_accumulator(MMA_ROWS, shape.head_dim))
                    pl.when(is_needed)(lambda: plgpu.barrier_arrive(v_read.at[slot]))
                    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + added
                return acc, m_new, l

            # The probabilities of other rows are zeros, too: no score is near their maximum.
            is_query = (
                plgpu.broadcasted_iota(jnp.int32, (MMA_ROWS,), 0, layout=by_row) < shape.group
            )
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
            pl.when(number + 2 < num_segments)(lambda: plgpu.barrier_arrive(q_read.at[q_slot]))
            # The stores of the segment before have left shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(is_whole)
            def _write():
                factor = 1.0 / jnp.maximum(l, SMALL)
                if shape.has_sinks:
                    sink = plgpu.load(sinks_ref.at[head], layout=by_row, optimized=False)
                    m_new = jnp.maximum(m, sink)
                    decay = jnp.exp2(m - m_new)
                    factor = decay / (l * decay + jnp.exp2(sink - m_new))
                result = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
                fill_out(result.astype(shape.dtype))
                plgpu.commit_smem()
                store_out(out_ref.at[row, pl.ds(head * group, group)])

            @pl.when(jnp.logical_not(is_whole))
            def _write_partial():
                place = 2 * worker + jnp.where(done == 0, 0, 1)
                rest = acc * lax.broadcast_in_dim(1.0 / jnp.maximum(l, SMALL), acc.shape, [0])
                for half, stat in enumerate((m, l)):
                    if half:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    stats_sm[pair] = stat
                    rounded = rest.astype(shape.dtype)
                    fill_out(rounded)
                    rest = rest - rounded.astype(jnp.float32)
                    plgpu.commit_smem()
                    store_out(partials_ref.at[place, half])
                    plgpu.copy_smem_to_gmem(stats_sm.at[pair], stats_ref.at[place, half])

        clear_q()
        walk(visit, looks_ahead=False)
        plgpu.wait_smem_to_gmem(0)


def _visible(kv_len, tile_begin, options: AttentionOptions):
    """Which keys of a tile the row's query sees: those from low on, below high."""
    low = 0 if options.window is None else kv_len - options.window - tile_begin
    return low, kv_len - tile_begin
