"""Paged causal attention of prompt chunks for Hopper GPUs, Pallas Mosaic GPU.

A persistent kernel: each multiprocessor takes every num_programs-th (query tile, query head) of the
plan. One warpgroup loads (queries, and K and V one TMA box a block, through the block table), the
others attend, MMA_ROWS queries each, over shared K and V. Two attenders take turns on the matrix
unit: one multiplies while the other does its softmax (the schedule of FlashAttention-3; its form in
Mosaic follows JAX's own dense example). The loader is a tile ahead, across query tiles.

Queries and results move as swizzled boxes where a tile is full and begins at a multiple of 8
tokens. Elsewhere they go through an unswizzled buffer, results in boxes of 32, 16, .., 1 rows, so
that nothing of another row is ever written.

Here are the call and its memory; a program's work is in `prefill_parts_hopper` (what it visits),
`prefill_load_hopper` and `prefill_attend_hopper`.
"""

import functools

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
    interpreted_options,
    part_size,
    swizzled_smem,
)
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.pool import KVPool
from kernels_pallas.prefill_attend_hopper import attend
from kernels_pallas.prefill_load_hopper import load
from kernels_pallas.prefill_parts_hopper import PrefillRefs, PrefillShape, Walk
from kernels_pallas.prefill_plan import PrefillPlan
from kernels_pallas.tuning import HopperPrefillTuning


def paged_prefill(
    q: Float[Array, "num_terms num_tokens num_q_heads head_dim"],
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
) -> Float[Array, "num_terms num_padded_tokens num_q_heads head_dim"]:
    """Attends the plan's queries to their rows' keys, which are in the pool already.

    Args:
      q: in one term or two of the pool's type (`terms`).
      first_row: the layer's first row in the pool (`pool.first_row(layer)`).
      plan: made with this tuning's `q_tile`.
      interpret: run on the CPU; the probabilities then go through shared memory.

    Returns:
      The output, in as many terms as `q`, of a few tokens perhaps more; those that are in no tile
      hold anything.
    """
    num_terms, num_tokens, num_q_heads, head_dim = q.shape
    # Boxes are whole tiles of 8 tokens, and none may be larger than the array. The last one may
    # reach past the end, where TMA gives 0; the interpreter refuses that.
    missing = max(-num_tokens % 8, MMA_ROWS - num_tokens)
    if interpret is not None:
        missing = -num_tokens % 8 + tuning.q_tile
    if missing:
        q = jnp.pad(q, ((0, 0), (0, missing), (0, 0), (0, 0)))
    shape = PrefillShape(
        num_terms=num_terms,
        num_padded_tokens=num_tokens + missing,
        num_q_heads=num_q_heads,
        group=num_q_heads // pool.num_kv_heads,
        head_dim=head_dim,
        block_size=pool.block_size,
        dtype=q.dtype,
        has_sinks=sinks is not None,
    )
    # A box at one term's end may reach into the next: those rows are no queries.
    flat_q = q.reshape(-1, num_q_heads, head_dim)
    kernel = plgpu.kernel(
        functools.partial(
            _entry, shape=shape, options=options, tuning=tuning, interpreted=interpret is not None
        ),
        out_type=jax.ShapeDtypeStruct(flat_q.shape, q.dtype),
        grid=(tuning.num_programs,),
        grid_names=("program",),
        kernel_name="prefill",
        num_threads=tuning.attenders + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        **interpreted_options(interpret),
    )
    sinks = jnp.full((num_q_heads,), NEVER) if sinks is None else sinks * LOG2E
    out = kernel(
        flat_q,
        pool.data,
        block_tables,
        kv_lens,
        jnp.asarray(first_row, jnp.int32).reshape(1),
        plan.tiles,
        plan.num_tiles,
        sinks,
    )
    return out.reshape(q.shape)


def _entry(
    *refs, shape: PrefillShape, options: AttentionOptions, tuning: HopperPrefillTuning, interpreted
):
    """Allocates shared memory and barriers, then splits into the loader and the attenders."""
    attenders, stages = tuning.attenders, tuning.stages
    q_shape = (tuning.q_slots * attenders, shape.num_terms, MMA_ROWS, shape.head_dim)
    kv_shape = (stages, tuning.kv_tile, shape.head_dim)
    plain_shape = (attenders, MMA_ROWS, part_size(shape.head_dim))
    num_boxes = max(1, tuning.kv_tile // shape.block_size)
    p_shape = (attenders, MMA_ROWS, tuning.kv_tile)
    pl.run_scoped(
        lambda *scratch: _program(
            PrefillRefs(*refs, *scratch), shape, options, tuning, interpreted=interpreted
        ),
        swizzled_smem(q_shape, shape.dtype),  # q, and swizzled results
        swizzled_smem(kv_shape, shape.dtype),  # k
        swizzled_smem(kv_shape, shape.dtype),  # v
        plgpu.SMEM(plain_shape, shape.dtype),  # q and out, unswizzled
        swizzled_smem(p_shape, shape.dtype) if interpreted else None,
        plgpu.Barrier(
            num_arrivals=shape.num_terms, num_barriers=tuning.q_slots * attenders
        ),  # q is there
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
    refs: PrefillRefs,
    shape: PrefillShape,
    options: AttentionOptions,
    tuning: HopperPrefillTuning,
    *,
    interpreted: bool,
):
    warpgroup = lax.axis_index("warpgroup")
    walk = Walk(refs, shape, options, tuning)
    pl.when(warpgroup == tuning.attenders)(lambda: load(refs, walk, shape, tuning))
    pl.when(warpgroup < tuning.attenders)(
        lambda: attend(refs, walk, warpgroup, shape, options, tuning, interpreted=interpreted)
    )
