"""Paged decode attention for Hopper GPUs (compute capability 9.0), Pallas Mosaic GPU.

A persistent kernel: two programs a multiprocessor (one where rows are few or heads wide), each a
worker (see `decode_plan`), which is a pair of warpgroups. The loader walks the worker's stretch of
KV tiles and keeps a ring of them in flight, one TMA box a block and head, found through the block
table; the attender walks the same stretch with an online softmax. The ring runs on across segments,
so that the loads of the next (row, head) are under way while this one ends.

Scores are kept in base 2. A segment that covers its whole unit writes the output; a partial one
writes its normalised result, as the sum of two values of the input's type (exact to twice its
precision), with its maximum and sum, and `decode_combine_hopper` merges them in float32.

Here are the call and its memory; a program's work is in `decode_parts_hopper` (what a worker
visits), `decode_load_hopper` and `decode_attend_hopper`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.decode_attend_hopper import attend
from kernels_pallas.decode_combine_hopper import combine, sink_rows
from kernels_pallas.decode_load_hopper import load
from kernels_pallas.decode_parts_hopper import DecodeRefs, DecodeShape, Walk
from kernels_pallas.decode_plan import DecodePlan
from kernels_pallas.hopper_parts import (
    WARPGROUP,
    interpreted_options,
    swizzled_smem,
)
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.pool import KVPool
from kernels_pallas.tuning import HopperDecodeTuning


def paged_decode(
    q: Float[Array, "num_terms num_rows num_q_heads head_dim"],
    pool: KVPool,
    first_row: Int32[Array, ""],
    block_tables: Int32[Array, "num_rows max_blocks_per_row"],
    plan: DecodePlan,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: HopperDecodeTuning,
    *,
    group: int,
    out: Float[Array, "num_terms num_tokens num_q_heads head_dim"] | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "num_terms num_rows_or_tokens num_q_heads head_dim"]:
    """Attends one query a row to the row's keys, which are in the pool already.

    Args:
      q: of each KV head its queries alone, or `padded_group(group)` rows of which they are the
        first; what the others hold does not matter. In terms, and so is the result.
      first_row: the layer's first row in the pool (`pool.first_row(layer)`).
      group: query heads a KV head.
      plan: made with this tuning's `kv_tile` and `num_workers`.
      out: array whose first rows become the result, in place, where the plan has tiles for them;
        None = a new one. Only when `writes_whole_rows(group, head_dim)`.
      interpret: run on the CPU.

    Returns:
      The result, or `out` with it; rows for which the plan has no tiles hold anything.
    """
    shape = _shape_of(q, group, pool, sinks)
    num_terms, num_rows = q.shape[:2]
    num_places = 2 * tuning.num_workers
    out_type = (
        jax.ShapeDtypeStruct(
            (num_terms, num_rows, shape.num_kv_heads * shape.out_group, shape.head_dim), q.dtype
        ),
        jax.ShapeDtypeStruct((num_places, 2, shape.padded_group, shape.head_dim), q.dtype),
        jax.ShapeDtypeStruct((num_places, 2, shape.padded_group), jnp.float32),
    )
    out_ref = None
    if out is not None:
        assert shape.out_group == group, f"{group=} does not fill whole rows"
        out_ref, out_type = jax.new_ref(out), out_type[1:]
    kernel = plgpu.kernel(
        functools.partial(_entry, shape=shape, options=options, tuning=tuning),
        out_type=out_type,
        # why a worker a program: what crosses warps goes through memory that a program has once
        grid=(tuning.num_workers,),
        grid_names=("worker",),
        kernel_name="decode",
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=2048),
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
    out = out.reshape(num_terms, num_rows, -1, shape.out_group, shape.head_dim)
    return out[:, :, :, :group].reshape(num_terms, num_rows, -1, shape.head_dim)


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
        out_group=next(n for n in range(group, group + 3) if n * q.shape[3] % WARPGROUP == 0),
        has_sinks=sinks is not None,
        head_dim=q.shape[3],
        block_size=pool.block_size,
        dtype=q.dtype,
        num_terms=q.shape[0],
    )


def _pad_group(q: Array, shape: DecodeShape) -> Array:
    """[.., kv heads * padded_group, head_dim]: a box is whole tiles of 8 rows."""
    if q.shape[2] == shape.num_kv_heads * shape.padded_group:
        return q
    groups = q.reshape(*q.shape[:2], shape.num_kv_heads, shape.group, shape.head_dim)
    missing = shape.padded_group - shape.group
    groups = jnp.pad(groups, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
    return groups.reshape(*q.shape[:2], -1, shape.head_dim)


def _entry(*refs, shape: DecodeShape, options: AttentionOptions, tuning: HopperDecodeTuning):
    """Allocates shared memory and barriers, then splits into the loader and the attender."""
    stages = tuning.stages
    kv_shape = (stages, tuning.kv_tile, shape.head_dim)
    num_boxes = max(1, tuning.kv_tile // shape.block_size)
    pl.run_scoped(
        lambda *scratch: _program(DecodeRefs(*refs, *scratch), shape, options, tuning),
        swizzled_smem((2, shape.num_terms, shape.padded_group, shape.head_dim), shape.dtype),  # q
        swizzled_smem(kv_shape, shape.dtype),  # k
        swizzled_smem(kv_shape, shape.dtype),  # v
        plgpu.SMEM((shape.padded_group, shape.head_dim), shape.dtype),  # out
        plgpu.SMEM((shape.padded_group,), jnp.float32),  # m, then l
        swizzled_smem((shape.padded_group, tuning.kv_tile), shape.dtype),  # p
        plgpu.Barrier(num_arrivals=shape.num_terms, num_barriers=2),  # q is there
        plgpu.Barrier(num_arrivals=num_boxes, num_barriers=stages),  # k is there
        plgpu.Barrier(num_arrivals=num_boxes, num_barriers=stages),  # v is there
        plgpu.Barrier(num_barriers=2),  # q was read
        plgpu.Barrier(num_barriers=stages),  # k was read
        plgpu.Barrier(num_barriers=stages),  # v was read
        collective_axes="warpgroup",
    )


def _program(
    refs: DecodeRefs, shape: DecodeShape, options: AttentionOptions, tuning: HopperDecodeTuning
):
    walk = Walk(refs, shape)
    is_loader = lax.axis_index("warpgroup") == 1
    pl.when(is_loader)(lambda: load(refs, walk, shape, options, tuning))
    pl.when(jnp.logical_not(is_loader))(lambda: attend(refs, walk, shape, options, tuning))
