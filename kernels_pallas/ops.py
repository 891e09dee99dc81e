"""The operations: one function each, one signature on every platform.

`impl` names one of the `implementations`; None takes the platform's own. A named one never falls
back: what it cannot do raises NotImplementedError with every reason.
"""

from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas import (
    add_norm_hopper,
    attention_hopper,
    attention_tpu,
    checks,
    implementations,
    product,
    reference,
    write_qkv_hopper,
    xla,
)
from kernels_pallas.copy_blocks import copy_blocks as _copy_blocks
from kernels_pallas.implementations import Tuning
from kernels_pallas.metadata import AttentionMetadata, AttentionOptions
from kernels_pallas.norm_rope import HeadNorms, RopeTables, rms_norm, split_heads
from kernels_pallas.pool import KVPool, PoolLayout
from kernels_pallas.terms import in_terms, num_terms_of, sum_of
from kernels_pallas.tuning import HopperTuning, TPUTuning


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    v_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    pool: KVPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " num_q_heads"] | None = None,
    impl: str | None = None,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVPool]:
    """Writes the new K and V of one layer into their slots, then attends, causally, row by row.

    Where num_tokens equals num_rows, every row must have at most one token.

    Args:
      q: query head h reads KV head h // (num_q_heads // num_kv_heads). Of the pool's dtype, or
        float32 (not on a TPU): then the output is float32, too.
      pool: donate it to update it in place.
      layer: in 0 .. num_layers - 1; may be traced.
      sm_scale, window, soft_cap: see `AttentionOptions`.
      sinks: one more logit for each head, neither scaled nor capped, that takes probability but
        has no value.
      impl: one of `implementations.IMPLEMENTATIONS`, or None: the platform's own, or "xla" on a
        GPU where the Hopper kernels cannot do this.
      tuning: None = what suits the implementation, which takes its own kind only.

    Returns:
      The output, zeros for padding tokens, and the pool with the new K and V.

    Raises:
      ValueError: shapes, dtypes or options do not fit.
      NotImplementedError: the implementation cannot do this; the message has every reason.
    """
    options = AttentionOptions(sm_scale, window, soft_cap)
    name = implementations.choose(impl, q, pool)
    reasons = implementations.unsupported(name, q, pool)
    if reasons:
        raise NotImplementedError(f"impl={name!r}: " + "; ".join(reasons))
    if tuning is None:
        tuning = implementations.tuning_for(name, q, pool, metadata)
    if not isinstance(tuning, implementations.tuning_kind(name)):
        raise ValueError(f"impl={name!r} does not take {type(tuning).__name__}")
    checks.check_attention(q, k_new, v_new, pool, layer, metadata, options, sinks, tuning)
    if name == "reference":
        return _reference(q, k_new, v_new, pool, layer, metadata, options, sinks)
    if isinstance(tuning, HopperTuning):
        interpret = _hopper_interpret(name)
        return attention_hopper.paged_attention(
            q, k_new, v_new, pool, layer, metadata, options, sinks, tuning, interpret=interpret
        )
    if isinstance(tuning, TPUTuning):
        interpret = pltpu.InterpretParams() if name == "tpu_interpret" else False
        return attention_tpu.paged_attention(
            q, k_new, v_new, pool, layer, metadata, options, sinks, tuning, interpret=interpret
        )
    return xla.paged_attention(q, k_new, v_new, pool, layer, metadata, options, sinks, tuning)


def qkv_attention(
    heads: Float[Array, "num_tokens num_kv_heads group_and_2 head_dim"],
    norms: HeadNorms | None,
    rope: RopeTables,
    pool: KVPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " num_q_heads"] | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "num_terms num_tokens num_q_heads head_dim"], KVPool]:
    """`paged_attention` on a qkv product, whose queries and keys are normed and turned first.

    Args:
      heads: of each KV head its queries, its key, its value; of the pool's dtype, or float32,
        which only keys and values are rounded from.
      norms: None = no norms.

    Returns:
      The output in terms of the pool's dtype (two if `heads` are float32 and the pool is not, but
      one on a TPU), where padding tokens hold anything, and the pool with the new K and V.

    Raises:
      As `paged_attention`.
    """
    num_tokens, num_kv_heads, group_and_2, head_dim = heads.shape
    q_shape = (num_tokens, num_kv_heads * (group_and_2 - 2), head_dim)
    q = jax.ShapeDtypeStruct(q_shape, heads.dtype)
    name = implementations.choose(impl, q, pool)
    if (
        implementations.tuning_kind(name) is not HopperTuning
        or implementations.unsupported(name, q, pool)
        or not write_qkv_hopper.can_write(heads, pool)
    ):
        options = {"sm_scale": sm_scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        return _qkv_attention_in_parts(heads, norms, rope, pool, layer, metadata, name, options)
    options = AttentionOptions(sm_scale, window, soft_cap)
    num_terms = num_terms_of(heads.dtype, pool.dtype)
    tuning = attention_hopper.tuning_for(pool, metadata, num_terms)
    kv = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), pool.dtype)
    checks.check_attention(q, kv, kv, pool, layer, metadata, options, sinks, tuning)
    return attention_hopper.qkv_attention(
        heads,
        norms,
        rope,
        pool,
        layer,
        metadata,
        options,
        sinks,
        tuning,
        interpret=_hopper_interpret(name),
    )


def _qkv_attention_in_parts(
    heads: Array,
    norms: HeadNorms | None,
    rope: RopeTables,
    pool: KVPool,
    layer: int | Array,
    metadata: AttentionMetadata,
    name: str,
    options: dict[str, Any],
) -> tuple[Array, KVPool]:
    """By separate operations."""
    q, *kv = split_heads(heads, norms, rope)
    k, v = (x.astype(pool.dtype) for x in kv)
    if implementations.tuning_kind(name) is TPUTuning:  # its kernels take no other queries
        q = q.astype(pool.dtype)
    out, pool = paged_attention(q, k, v, pool, layer, metadata, impl=name, **options)
    return in_terms(out, pool.dtype), pool


def matmul(
    x: Float[Array, "num_terms num_tokens in_size"],
    w: Float[Array, "in_size out_size"],
    *,
    impl: str | None = None,
) -> Float[Array, "num_tokens out_size"]:
    """x @ w, with float32 sums; float32 operands are multiplied with all of their bits.

    Args:
      x: see `terms.in_terms`.
      impl: as in `paged_attention`; all have XLA's product, "hopper" its own for few rows.

    Returns:
      Rounded to the dtype of x; float32 if x has two terms.

    Raises:
      ValueError: x is not in one term or two.
    """
    checks.check_operand(x)
    return product.matmul(x, w, num_programs=implementations.hopper_multiprocessors(impl))


def matmul_in_parts(
    x: Float[Array, "num_terms num_tokens in_size"],
    w: Float[Array, "in_size out_size"],
    *,
    out_dtype: DTypeLike | None = None,
    impl: str | None = None,
) -> Float[Array, "num_parts num_tokens out_size"]:
    """As `matmul`, but for `add_norm` to add up.

    Args:
      out_dtype: what one part is rounded to; None = as in `matmul`.

    Returns:
      One part, or float32 sums of several.

    Raises:
      ValueError: x is not in one term or two.
    """
    checks.check_operand(x)
    num_programs = implementations.hopper_multiprocessors(impl)
    return product.matmul_in_parts(x, w, out_dtype, num_programs=num_programs)


def add_parts(
    x: Float[Array, "num_tokens size"], parts: Float[Array, "num_parts num_tokens size"]
) -> Float[Array, "num_tokens size"]:
    """x + all parts (see `matmul_in_parts`), whose sum is rounded to the dtype of x."""
    return x + sum_of(parts).astype(x.dtype)


def add_norm(
    x: Float[Array, "num_tokens size"],
    parts: Float[Array, "num_parts num_tokens size"],
    scale: Float[Array, " size"],
    eps: float,
    *,
    operand_dtype: DTypeLike,
    impl: str | None = None,
) -> tuple[Float[Array, "num_tokens size"], Float[Array, "num_terms num_tokens size"]]:
    """As `add_parts`, and the RMS norm of it, for products to read.

    Args:
      parts: see `matmul_in_parts`.
      operand_dtype: what the norm is rounded to, before it is put in terms of the dtype of `scale`.
      impl: see `matmul`.
    """
    is_hopper = implementations.hopper_multiprocessors(impl) is not None
    if is_hopper and add_norm_hopper.can_add_norm(x, parts):
        num_terms = num_terms_of(operand_dtype, scale.dtype)
        return add_norm_hopper.add_norm(x, parts, scale, eps, num_terms=num_terms)
    total = add_parts(x, parts)
    return total, in_terms(rms_norm(total, scale, eps, operand_dtype), scale.dtype)


def gated_matmul(
    x: Float[Array, "num_terms num_tokens in_size"],
    w: Float[Array, "in_size twice_out_size"],
    *,
    impl: str | None = None,
) -> Float[Array, "num_terms num_tokens out_size"]:
    """silu(gate) * up, where x @ w has the gates in the first half of its columns.

    Args:
      impl: see `matmul`.

    Returns:
      In as many terms as x has.

    Raises:
      ValueError: x is not in one term or two.
    """
    checks.check_operand(x)
    return product.gated_matmul(x, w, num_programs=implementations.hopper_multiprocessors(impl))


def copy_blocks(
    pool: KVPool, sources: Int32[Array, " num_copies"], destinations: Int32[Array, " num_copies"]
) -> KVPool:
    """Copies K and V of whole blocks, in all layers, all reads before all writes.

    Args:
      sources, destinations: block ids; padding pairs are (0, 0), no other destination twice.

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    checks.check_copy(sources, destinations)
    return _copy_blocks(pool, sources, destinations)


def pool_layout(impl: str | None) -> PoolLayout:
    """The layout of the pool that an implementation reads and writes."""
    family = implementations.named(impl).removesuffix("_interpret")
    layouts: dict[str, PoolLayout] = {"tpu": "tpu", "hopper": "hopper"}
    return layouts.get(family, "plain")


def max_blocks_per_row(impl: str | None, *, num_rows: int, num_tokens: int) -> int | None:
    """The widest block tables that an implementation takes; None = any.

    Args:
      num_rows, num_tokens: of the largest step.
    """
    if implementations.named(impl) not in ("tpu", "tpu_interpret"):
        return None
    return attention_tpu.max_blocks_per_row(num_rows=num_rows, num_tokens=num_tokens)


def _hopper_interpret(name: str) -> plgpu.InterpretGPUParams | None:
    return plgpu.InterpretGPUParams() if name == "hopper_interpret" else None


def _reference(
    q: Array,
    k_new: Array,
    v_new: Array,
    pool: KVPool,
    layer: int | Array,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Array | None,
) -> tuple[Array, KVPool]:
    """Calls the oracle on the host, so that it can stand in for a kernel inside a jitted step."""

    def on_host(q, k_new, v_new, k_blocks, v_blocks, metadata, sinks):
        arrays = jax.tree.map(np.asarray, (q, k_new, v_new, k_blocks, v_blocks, metadata, sinks))
        q, k_new, v_new, k_blocks, v_blocks, metadata, sinks = arrays
        k_blocks, v_blocks = reference.write_kv_reference(
            k_blocks, v_blocks, k_new, v_new, metadata.slot_mapping
        )
        out = reference.paged_attention_reference(
            q,
            k_blocks,
            v_blocks,
            metadata.block_tables,
            metadata.q_lens,
            metadata.kv_lens,
            sm_scale=options.sm_scale,
            window=options.window,
            soft_cap=options.soft_cap,
            sinks=sinks,
        )
        return out.astype(q.dtype), k_blocks, v_blocks

    k_blocks, v_blocks = pool.layer_kv(layer)
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (q, k_blocks, v_blocks)
    )
    out, k_blocks, v_blocks = jax.pure_callback(
        on_host, shapes, q, k_new, v_new, k_blocks, v_blocks, metadata, sinks
    )
    return out, pool.with_layer_kv(layer, k_blocks, v_blocks)
