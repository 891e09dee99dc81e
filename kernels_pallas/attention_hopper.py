"""Paged attention on Hopper GPUs: the decode kernel for decode rows, the prefill kernel for others.

New K and V are written first, in place; then both kernels read the pool alone.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.decode_hopper import padded_group, paged_decode, writes_whole_rows
from kernels_pallas.decode_plan import make_decode_plan
from kernels_pallas.metadata import AttentionMetadata, AttentionOptions, Shaped
from kernels_pallas.norm_rope import HeadNorms, RopeTables
from kernels_pallas.pool import KVPool
from kernels_pallas.prefill_hopper import paged_prefill
from kernels_pallas.prefill_plan import make_prefill_plan
from kernels_pallas.terms import in_terms, sum_of
from kernels_pallas.tuning import HopperTuning, hopper_tuning
from kernels_pallas.write_kv import write_kv
from kernels_pallas.write_qkv_hopper import write_qkv

LANES = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
MAX_GROUP = 16
_H200_MULTIPROCESSORS = 132


def unsupported(q: Shaped, pool: KVPool) -> list[str]:
    """Every reason why these kernels cannot take these arrays."""
    reasons = []
    if pool.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"pool.dtype={pool.dtype.name} is not bfloat16 or float16")
    if q.dtype not in (pool.dtype, jnp.float32):
        names = f"pool.dtype={pool.dtype.name} nor float32"
        reasons.append(f"q.dtype={q.dtype.name} is neither {names}")
    if pool.is_joined or pool.lanes not in LANES:
        reasons.append(f"{pool.lanes=} of the pool is not one of {LANES}: it has another layout")
    if pool.block_size not in BLOCK_SIZES:
        reasons.append(f"{pool.block_size=} is not one of {BLOCK_SIZES}")
    group = q.shape[1] // pool.num_kv_heads
    if group > MAX_GROUP:
        reasons.append(f"{group} query heads a KV head are more than {MAX_GROUP}")
    return reasons


def is_hopper() -> bool:
    """Whether the default device is a GPU of compute capability 9.0."""
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def num_multiprocessors() -> int:
    """Of the default device or, without a Hopper GPU, of an H200."""
    found = getattr(jax.devices()[0], "core_count", None) if is_hopper() else None
    return found or _H200_MULTIPROCESSORS


def tuning_for(pool: KVPool, metadata: AttentionMetadata, num_terms: int = 1) -> HopperTuning:
    """What suits these shapes, on the default device or, without one, on an H200.

    Args:
      num_terms: of the queries.
    """
    return hopper_tuning(
        num_units=metadata.num_rows * pool.num_kv_heads,
        head_dim=pool.lanes,
        num_programs=num_multiprocessors(),
        num_terms=num_terms,
    )


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    v_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    pool: KVPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: HopperTuning,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVPool]:
    """See `ops.paged_attention`."""
    pool = write_kv(pool, layer, k_new, v_new, metadata.slot_mapping)
    # Zeros beyond head_dim add nothing to a score; those of the values are cut off again.
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, pool.lanes - pool.head_dim)))
    terms = in_terms(padded, pool.dtype)
    group = q.shape[1] // pool.num_kv_heads
    out = attend(terms, group, pool, layer, metadata, options, sinks, tuning, interpret)
    out = sum_of(out).astype(q.dtype)
    token = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None]
    out = jnp.where(token < metadata.cu_q_lens[-1], out, 0)
    return out[..., : pool.head_dim], pool


def qkv_attention(
    heads: Float[Array, "num_tokens num_kv_heads group_and_2 head_dim"],
    norms: HeadNorms | None,
    rope: RopeTables,
    pool: KVPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: HopperTuning,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "num_terms num_tokens num_q_heads head_dim"], KVPool]:
    """See `ops.qkv_attention`; `write_qkv_hopper.can_write` must hold."""
    group = heads.shape[2] - 2
    q, pool = write_qkv(
        heads,
        norms,
        rope,
        pool,
        pool.first_row(layer),
        metadata.slot_mapping,
        # The decode kernel wants whole tiles of 8 rows, the prefill kernel the queries alone.
        q_rows=padded_group(group) if metadata.is_decode_step else group,
        has_runs=not metadata.is_decode_step,
        interpret=interpret,
    )
    return attend(q, group, pool, layer, metadata, options, sinks, tuning, interpret), pool


def attend(
    q: Float[Array, "num_terms num_tokens num_q_heads lanes"],
    group: int,
    pool: KVPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: HopperTuning,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "num_terms num_tokens num_q_heads lanes"]:
    """Both kernels, over keys that are in the pool already.

    Args:
      group: query heads a KV head. In a decode step `q` may have more, padding that is not looked
        at.

    Returns:
      The output, in as many terms; padding tokens hold anything.
    """
    num_rows = metadata.num_rows
    # In a decode step prompts' last tokens are decode rows like others. Padded rows would cost as
    # much as short ones, and all of that would fall to the last workers.
    num_decode_rows = metadata.num_decode_rows
    if metadata.is_decode_step:
        num_decode_rows = jnp.sum(metadata.q_lens, dtype=jnp.int32)
    shared = pool, pool.first_row(layer), metadata.block_tables
    decode_plan = make_decode_plan(
        metadata,
        num_decode_rows,
        num_kv_heads=pool.num_kv_heads,
        kv_tile=tuning.decode.kv_tile,
        num_workers=tuning.decode.num_workers,
        window=options.window,
    )
    decode = functools.partial(
        paged_decode,
        q[:, :num_rows],
        *shared,
        decode_plan,
        options,
        sinks,
        tuning.decode,
        group=group,
        interpret=interpret,
    )
    if metadata.is_decode_step:
        return decode()
    prefill_plan = make_prefill_plan(metadata, tuning.prefill.q_tile)
    out = paged_prefill(
        q,
        *shared,
        own_lens(metadata.kv_lens),
        prefill_plan,
        options,
        sinks,
        tuning.prefill,
        interpret=interpret,
    )
    if writes_whole_rows(group, pool.lanes):
        out = decode(out=out)
    else:
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
        first = jnp.where(row < num_decode_rows, decode(), out[:, :num_rows])
        # why term by term: XLA would copy the whole output first
        tokens = out.reshape(-1, *out.shape[2:])
        for term, rows in enumerate(first):
            begin = term * out.shape[1]
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, rows, begin, axis=0)
        out = tokens.reshape(out.shape)
    # Not before: the decode kernel would be handed a slice in place, and write into another array.
    return out[:, : metadata.num_tokens]


def own_lens(lens: Int32[Array, " num_rows"]) -> Int32[Array, " num_rows"]:
    """The same, as the result of an operation.

    XLA hands a kernel a slice of a larger argument in place, and a kernel refuses what does not
    begin at a multiple of 256 bytes.
    """
    return jnp.maximum(lens, 0)
