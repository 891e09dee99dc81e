"""From the qkv product to the pool in one kernel for Hopper GPUs, Pallas Mosaic GPU.

A program takes one head of up to MMA_ROWS tokens: queries and keys are normed and turned as in
`norm_rope.split_heads`, queries written out as the attention kernels want them, keys and values
into their slots: a run of tokens in one copy, others through registers, for a copy takes 0.14 us to
issue. In small steps several programs share the tokens of a head. XLA needs six kernels for all of
this, the scatter the slowest.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper_parts import (
    MMA_ROWS,
    WARPGROUP,
    interpreted_options,
    swizzled_smem,
)
from kernels_pallas.norm_rope import HeadNorms, RopeTables
from kernels_pallas.pool import KVPool

RUN = 16  # tokens in slots side by side that leave in one copy: divides every block size
MAX_PROGRAMS = 264  # that run at once on an H200: registers leave room for two a multiprocessor
MAX_EARLY = 64  # tokens of a step whose programs ask for angles before they wait for heads


@dataclass(frozen=True)
class _Shape:
    group: int  # query heads a KV head
    q_rows: int  # rows of the output a KV head
    half: int  # of head_dim
    block_size: int
    num_tokens: int
    box: int  # tokens that one TMA box takes
    parts: int  # programs that share the keys or values of one head and tile
    loads_early: bool
    has_runs: bool
    eps: float | None  # None: no norms
    dtype: jnp.dtype


def can_write(heads: Any, pool: KVPool) -> bool:
    """Whether the kernel takes these arrays: heads as wide as the pool's lanes, 64 or 128."""
    is_wide_enough = heads.shape[3] == pool.lanes and pool.lanes in (64, 128)
    return is_wide_enough and heads.dtype == pool.dtype and pool.block_size % RUN == 0


def write_qkv(
    heads: Float[Array, "num_tokens num_kv_heads group_and_2 head_dim"],
    norms: HeadNorms | None,
    rope: RopeTables,
    pool: KVPool,
    first_row: Int32[Array, ""],
    slot_mapping: Int32[Array, " num_tokens"],
    *,
    q_rows: int,
    has_runs: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "num_tokens num_kv_heads_x_q_rows head_dim"], KVPool]:
    """Norms, turns, and writes the keys and values of one layer into their slots, in place.

    Args:
      heads: of each KV head its queries, its key, its value.
      first_row: the layer's first row in the pool (`pool.first_row(layer)`).
      slot_mapping: tokens whose slot is in the null block are padding, and not written.
      q_rows: rows of the queries returned for each KV head, at least as many as its queries; what
        the others hold means nothing.
      has_runs: tokens may lie in slots side by side, as those of a prompt do. Where none do, rows
        need not be looked at one after another to find out.
      interpret: run on the CPU.

    Returns:
      The queries, and the pool.
    """
    num_tokens, num_kv_heads, group_and_2, head_dim = heads.shape
    multiple = 8 if interpret is None else MMA_ROWS  # the interpreter has no boxes past the end
    padded = -(-num_tokens // multiple) * multiple
    heads = _pad_tokens(heads.reshape(num_tokens, -1, head_dim), padded)
    num_tiles = -(-padded // MMA_ROWS)
    cos, sin, slots = (
        _pad_tokens(x, num_tiles * MMA_ROWS) for x in (rope.cos, rope.sin, slot_mapping)
    )
    shape = _Shape(
        group=group_and_2 - 2,
        q_rows=q_rows,
        half=head_dim // 2,
        block_size=pool.block_size,
        num_tokens=num_tokens,
        box=min(MMA_ROWS, padded),
        parts=_num_parts(num_tokens, num_tiles * num_kv_heads, group_and_2 - 2),
        loads_early=num_tokens <= MAX_EARLY,
        has_runs=has_runs,
        eps=None if norms is None else norms.eps,
        dtype=heads.dtype,
    )
    scales = (jnp.ones(head_dim, heads.dtype),) * 2 if norms is None else norms[:2]
    half_tile = (MMA_ROWS, shape.half)
    kernel = plgpu.kernel(
        functools.partial(_program, shape=shape),
        out_type=jax.ShapeDtypeStruct((padded, num_kv_heads * q_rows, head_dim), heads.dtype),
        grid=(num_tiles, num_kv_heads * (shape.group + 2 * shape.parts)),
        grid_names=("tile", "part"),
        scratch_types=(
            swizzled_smem((2, *half_tile), heads.dtype),
            plgpu.SMEM((MMA_ROWS, head_dim), heads.dtype),
            plgpu.SMEM((MMA_ROWS,), jnp.int32),
            plgpu.Barrier(num_arrivals=3),
        ),
        # Otherwise Mosaic chooses layouts of buffers that have none: it swizzled the rows', and
        # forgot that where some columns are stored at a time.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # what is read was committed before, by all
        ),
        **interpreted_options(interpret),
    )
    data = jax.new_ref(pool.data)
    first = jnp.asarray(first_row, jnp.int32).reshape(1)
    q = kernel(heads, cos, sin, *scales, slots, first, data)
    return q[:num_tokens], replace(pool, data=jax.freeze(data))


def _num_parts(num_tokens: int, num_groups: int, group: int) -> int:
    """How many programs share a key or value, so that all still run at once.

    Args:
      num_groups: tiles of tokens times KV heads.
    """
    for parts in (4, 2):
        if num_tokens > RUN and num_groups * (group + 2 * parts) <= MAX_PROGRAMS:
            return parts
    return 1


def _pad_tokens(array: Array, num_tokens: int) -> Array:
    missing = num_tokens - array.shape[0]
    return jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)]) if missing else array


def _program(
    heads_ref,  # [num_tokens, heads, head_dim] GMEM
    cos_ref,  # f32[tiles * MMA_ROWS, half] GMEM
    sin_ref,  # f32[tiles * MMA_ROWS, half] GMEM
    q_scale_ref,  # [head_dim] GMEM
    k_scale_ref,  # [head_dim] GMEM
    slots_ref,  # i32[tiles * MMA_ROWS] GMEM
    first_row_ref,  # i32[1] GMEM
    pool_ref,  # [pool_rows, 2, kv heads, block_size, head_dim] GMEM
    q_ref,  # [num_tokens, kv heads * q_rows, head_dim] GMEM
    halves_sm,  # [2, MMA_ROWS, half] SMEM
    rows_sm,  # [MMA_ROWS, head_dim] SMEM, unswizzled: single rows can leave it
    slots_sm,  # i32[MMA_ROWS] SMEM
    there,
    *,
    shape: _Shape,
):
    # Of each KV head a program a query head, then `parts` for its key, then as many for its value.
    group, parts = jnp.int32(shape.group), jnp.int32(shape.parts)
    index, per_kv_head = lax.axis_index("part"), group + 2 * parts
    kv_head, index = lax.div(index, per_kv_head), lax.rem(index, per_kv_head)
    part = lax.rem(index - group, parts)
    kind = jnp.where(index < group, index, group + lax.div(index - group, parts))
    head, first_token = kv_head * (group + 2) + kind, lax.axis_index("tile") * MMA_ROWS
    halves = [pl.ds(i * shape.half, shape.half) for i in range(2)]
    for i, half in enumerate(halves):
        plgpu.copy_gmem_to_smem(
            heads_ref.at[pl.ds(first_token, shape.box), head, half],
            halves_sm.at[i, pl.ds(0, shape.box)],
            there,
        )
    plgpu.copy_gmem_to_smem(slots_ref.at[pl.ds(first_token, MMA_ROWS)], slots_sm, there)

    def load(i):
        return plgpu.load(halves_sm.at[i], layout=plgpu.Layout.WGMMA)

    def write_rows(first, second, plane: int):
        for half, values in zip(halves, (first, second), strict=True):
            rows_sm[:, half] = values
        plgpu.commit_smem()
        size = MMA_ROWS // shape.parts
        begin = part * size
        end = jnp.minimum(begin + size, shape.num_tokens - first_token)

        def target(slot, num_tokens: int):
            block = lax.div(slot, jnp.int32(shape.block_size))
            tokens = pl.ds(lax.rem(slot, jnp.int32(shape.block_size)), num_tokens)
            return pool_ref.at[first_row_ref[0] + block, plane, kv_head, tokens]

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

    @pl.when(kind == group + 1)
    def _value():
        plgpu.barrier_wait(there)
        write_rows(load(0), load(1), plane=1)

    @pl.when(kind <= group)
    def _query_or_key():
        def load_angles():
            tokens = pl.ds(first_token, MMA_ROWS)
            return [
                plgpu.load(ref.at[tokens], layout=plgpu.Layout.WGMMA, optimized=False)
                for ref in (cos_ref, sin_ref)
            ]

        # In a small step one program's time counts, in others how many there is room for.
        angles = load_angles() if shape.loads_early else None
        scales = []
        if shape.eps is not None:
            is_key = jnp.where(kind == group, 1.0, 0.0)
            scales = [
                _load_row(k_scale_ref.at[half]) * is_key
                + _load_row(q_scale_ref.at[half]) * (1.0 - is_key)
                for half in halves
            ]
        plgpu.barrier_wait(there)
        first, second = load(0).astype(jnp.float32), load(1).astype(jnp.float32)
        if shape.eps is not None:
            first, second = _norm(first, second, scales, shape)
        cos, sin = angles or load_angles()
        turned = (first * cos - second * sin).astype(shape.dtype)
        other = (second * cos + first * sin).astype(shape.dtype)

        @pl.when(kind == group)
        def _key():
            write_rows(turned, other, plane=0)

        @pl.when(kind < group)
        def _query():
            plgpu.commit_smem()  # all have read what is written now
            for i, (half, values) in enumerate(zip(halves, (turned, other), strict=True)):
                halves_sm[i] = values
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    halves_sm.at[i, pl.ds(0, shape.box)],
                    q_ref.at[pl.ds(first_token, shape.box), kv_head * shape.q_rows + kind, half],
                )

    plgpu.wait_smem_to_gmem(0)


def _load_row(ref):
    """One value a column, float32."""
    by_column = plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(ref, layout=by_column, optimized=False).astype(jnp.float32)


def _norm(first, second, scales, shape: _Shape):
    """RMS norm of two halves, each with its part of the scale, rounded as `rms_norm` rounds."""
    square = (first * first).sum(axis=1) + (second * second).sum(axis=1)
    factor = lax.rsqrt(square * (0.5 / shape.half) + shape.eps)
    factor = lax.broadcast_in_dim(factor, first.shape, [0])

    def scaled(x, scale):
        scale = lax.broadcast_in_dim(scale, x.shape, [1])
        return (x * factor * scale).astype(shape.dtype).astype(jnp.float32)

    return scaled(first, scales[0]), scaled(second, scales[1])
