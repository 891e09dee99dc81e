"""From the qkv product to the pool in one kernel for Hopper GPUs, Pallas Mosaic GPU.

A program takes one head of up to MMA_ROWS tokens: queries and keys are normed and turned as in
`norm_rope.split_heads`, queries written out as the attention kernels want them, keys and values
into their slots: a run of tokens in one copy, others through registers, for a copy takes 0.14 us to
issue. In small steps several programs share the tokens of a head. XLA needs six kernels for all of
this, the scatter the slowest.

Heads of a wider type than the pool's are rounded once: keys and values on their way to their slots,
and queries not even then, for they leave as terms (`terms.py`).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper_parts import MMA_ROWS, interpreted_options, split_off, swizzled_smem
from kernels_pallas.norm_rope import HeadNorms, RopeTables
from kernels_pallas.pool import KVPool
from kernels_pallas.terms import num_terms_of
from kernels_pallas.write_parts_hopper import RUN, Work, WriteRefs, WriteShape
from kernels_pallas.write_slots_hopper import write_slots

MAX_PROGRAMS = 264  # that run at once on an H200: registers leave room for two a multiprocessor
MAX_EARLY = 64  # tokens of a step whose programs ask for angles before they wait for heads


def can_write(heads: Any, pool: KVPool) -> bool:
    """Whether the kernel takes these arrays: heads as wide as the pool's lanes, 64 or 128.

    They are float32 or of the pool's type.
    """
    is_wide_enough = heads.shape[3] == pool.lanes and pool.lanes in (64, 128)
    is_precise_enough = heads.dtype in (pool.dtype, jnp.float32)
    return is_wide_enough and is_precise_enough and pool.block_size % RUN == 0


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
) -> tuple[Float[Array, "num_terms num_tokens num_kv_heads_x_q_rows head_dim"], KVPool]:
    """Norms, turns, and writes the keys and values of one layer into their slots, in place.

    Args:
      heads: of each KV head its queries, its key, its value. `can_write` must hold.
      first_row: the layer's first row in the pool (`pool.first_row(layer)`).
      slot_mapping: tokens whose slot is in the null block are padding, and not written.
      q_rows: rows of the queries returned for each KV head, at least as many as its queries; what
        the others hold means nothing.
      has_runs: tokens may lie in slots side by side, as those of a prompt do. Where none do, rows
        need not be looked at one after another to find out.
      interpret: run on the CPU.

    Returns:
      The queries in terms of the pool's type, one where heads have it too; and the pool.
    """
    num_tokens, num_kv_heads, group_and_2, head_dim = heads.shape
    multiple = 8 if interpret is None else MMA_ROWS  # the interpreter has no boxes past the end
    padded = -(-num_tokens // multiple) * multiple
    heads = _pad_tokens(heads.reshape(num_tokens, -1, head_dim), padded)
    num_tiles = -(-padded // MMA_ROWS)
    cos, sin, slots = (
        _pad_tokens(x, num_tiles * MMA_ROWS) for x in (rope.cos, rope.sin, slot_mapping)
    )
    shape = WriteShape(
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
        heads_dtype=heads.dtype,
        dtype=pool.dtype,
        num_terms=num_terms_of(heads.dtype, pool.dtype),
    )
    scales = (jnp.ones(head_dim, pool.dtype),) * 2 if norms is None else norms[:2]
    halves = (2, MMA_ROWS, shape.half)
    terms = swizzled_smem((shape.num_terms, *halves), pool.dtype)
    q_shape = (shape.num_terms, padded, num_kv_heads * q_rows, head_dim)
    kernel = plgpu.kernel(
        lambda *refs: _program(WriteRefs(*refs), shape),
        out_type=jax.ShapeDtypeStruct(q_shape, pool.dtype),
        grid=(num_tiles, num_kv_heads * (shape.group + 2 * shape.parts)),
        grid_names=("tile", "part"),
        kernel_name="write_qkv",
        scratch_types=(
            swizzled_smem(halves, heads.dtype),
            plgpu.SMEM((MMA_ROWS, head_dim), pool.dtype),
            None if heads.dtype == pool.dtype else terms,
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
    return q[:, :num_tokens], replace(pool, data=jax.freeze(data))


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


def _program(refs: WriteRefs, shape: WriteShape):
    work = Work(shape)
    for i, half in enumerate(shape.halves):
        plgpu.copy_gmem_to_smem(
            refs.heads_ref.at[pl.ds(work.first_token, shape.box), work.head, half],
            refs.halves_sm.at[i, pl.ds(0, shape.box)],
            refs.there,
        )
    slots = refs.slots_ref.at[pl.ds(work.first_token, MMA_ROWS)]
    plgpu.copy_gmem_to_smem(slots, refs.slots_sm, refs.there)

    @pl.when(work.kind == shape.group + 1)
    def _value():
        plgpu.barrier_wait(refs.there)
        write_slots(refs, work, shape, _load_halves(refs, shape.dtype), plane=1)

    @pl.when(work.kind <= shape.group)
    def _query_or_key():
        terms = [_in_terms(half, shape) for half in _normed_and_turned(refs, work, shape)]

        @pl.when(work.kind == shape.group)
        def _key():
            write_slots(refs, work, shape, [half[0] for half in terms], plane=0)

        @pl.when(work.kind < shape.group)
        def _query():
            _write_query(refs, work, shape, terms)

    plgpu.wait_smem_to_gmem(0)


def _load_halves(refs: WriteRefs, dtype: jnp.dtype) -> list[Any]:
    layout = plgpu.Layout.WGMMA
    return [plgpu.load(refs.halves_sm.at[i], layout=layout).astype(dtype) for i in range(2)]


def _normed_and_turned(refs: WriteRefs, work: Work, shape: WriteShape) -> tuple[Any, Any]:
    """The halves of a program's queries or keys, float32. Waits for the heads."""

    def load_angles():
        tokens = pl.ds(work.first_token, MMA_ROWS)
        return [
            plgpu.load(ref.at[tokens], layout=plgpu.Layout.WGMMA, optimized=False)
            for ref in (refs.cos_ref, refs.sin_ref)
        ]

    # In a small step one program's time counts, in others how many there is room for.
    angles = load_angles() if shape.loads_early else None
    scales = []
    if shape.eps is not None:
        is_key = jnp.where(work.kind == shape.group, 1.0, 0.0)
        scales = [
            _load_row(refs.k_scale_ref.at[half]) * is_key
            + _load_row(refs.q_scale_ref.at[half]) * (1.0 - is_key)
            for half in shape.halves
        ]
    plgpu.barrier_wait(refs.there)
    first, second = _load_halves(refs, jnp.dtype(jnp.float32))
    if shape.eps is not None:
        first, second = _norm(first, second, scales, shape)
    cos, sin = angles or load_angles()
    return first * cos - second * sin, second * cos + first * sin


def _load_row(ref):
    """One value a column, float32."""
    by_column = plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(ref, layout=by_column, optimized=False).astype(jnp.float32)


def _norm(first, second, scales, shape: WriteShape):
    """RMS norm of two halves, each with its part of the scale, rounded as `split_heads` rounds."""
    square = (first * first).sum(axis=1) + (second * second).sum(axis=1)
    factor = lax.rsqrt(square * (0.5 / shape.half) + shape.eps)
    factor = lax.broadcast_in_dim(factor, first.shape, [0])

    def scaled(x, scale):
        scale = lax.broadcast_in_dim(scale, x.shape, [1])
        return (x * factor * scale).astype(shape.heads_dtype).astype(jnp.float32)

    return scaled(first, scales[0]), scaled(second, scales[1])


def _in_terms(x, shape: WriteShape) -> list[Any]:
    first, rest = split_off(x, shape.dtype)
    return [first] if shape.num_terms == 1 else [first, rest.astype(shape.dtype)]


def _write_query(refs: WriteRefs, work: Work, shape: WriteShape, terms: list[list[Any]]) -> None:
    """Starts the copies of a tile of one head's queries.

    Args:
      terms: of each half.
    """
    if refs.terms_sm is None:
        plgpu.commit_smem()  # all have read what is written now
    tokens = pl.ds(work.first_token, shape.box)
    row = work.kv_head * shape.q_rows + work.kind
    for term in range(shape.num_terms):
        out_sm = refs.halves_sm if refs.terms_sm is None else refs.terms_sm.at[term]
        for i, half in enumerate(shape.halves):
            out_sm[i] = terms[i][term]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_sm.at[i, pl.ds(0, shape.box)], refs.q_ref.at[term, tokens, row, half]
            )
