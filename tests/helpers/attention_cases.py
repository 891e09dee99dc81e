"""Random steps for attention, with NaN wherever no kernel may look, and the oracle's answer."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.checks import check_values
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool, PoolLayout
from kernels_pallas.reference import paged_attention_reference, write_kv_reference


@dataclass(frozen=True)
class Shape:
    """Static sizes of a case; `num_tokens` and `num_rows` None = as many as there are."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    num_blocks: int = 48
    num_layers: int = 2
    table_width: int = 10
    num_tokens: int | None = None
    num_rows: int | None = None
    dtype: Any = jnp.float32


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of one `paged_attention` call."""

    q: jax.Array
    k_new: jax.Array
    v_new: jax.Array
    pool: KVPool
    layer: int
    metadata: AttentionMetadata

    @property
    def args(self) -> tuple:
        """`layer` as an array, so that one compilation serves all layers."""
        layer = jnp.int32(self.layer)
        return self.q, self.k_new, self.v_new, self.pool, layer, self.metadata


def make_case(
    rows: list[tuple[int, int]],
    *,
    num_decode_rows: int = 0,
    shape: Shape | None = None,
    seed: int = 0,
    layer: int = 1,
    window: int | None = None,
) -> AttentionCase:
    """Builds a step from each row's (q_len, kv_len).

    Blocks are drawn in random order. Every slot that holds no key of an earlier token is NaN in
    all layers, the null block too, and so are the padding tokens' q, k and v.

    Args:
      window: blocks that lie wholly before it are replaced by the null block.
    """
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    metadata = _metadata(rows, num_decode_rows, shape, rng, window)
    num_real = sum(q_len for q_len, _ in rows)

    def tokens(num_heads: int) -> jax.Array:
        values = rng.standard_normal((metadata.num_tokens, num_heads, shape.head_dim))
        values[num_real:] = np.nan
        return jnp.asarray(values, shape.dtype)

    return AttentionCase(
        q=tokens(shape.num_q_heads),
        k_new=tokens(shape.num_kv_heads),
        v_new=tokens(shape.num_kv_heads),
        pool=_filled_pool(rows, metadata, shape, rng, layer),
        layer=layer,
        metadata=metadata,
    )


def oracle(
    case: AttentionCase,
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[np.ndarray, KVPool]:
    """The output in float64, and the pool after the write."""
    k, v = (np.asarray(blocks) for blocks in case.pool.layer_kv(case.layer))
    metadata = jax.tree.map(np.asarray, case.metadata)
    k, v = write_kv_reference(
        k, v, np.asarray(case.k_new), np.asarray(case.v_new), metadata.slot_mapping
    )
    out = paged_attention_reference(
        np.asarray(case.q),
        k,
        v,
        metadata.block_tables,
        metadata.q_lens,
        metadata.kv_lens,
        sm_scale=sm_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else np.asarray(sinks),
    )
    return out, case.pool.with_layer_kv(case.layer, jnp.asarray(k), jnp.asarray(v))


def assert_close(actual: jax.Array, expected: np.ndarray) -> None:
    """Tolerances of the house: float32 1e-5, bfloat16 1e-2."""
    tolerance = 1e-5 if actual.dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance
    )


def assert_same_pool(actual: KVPool, expected: KVPool) -> None:
    """Bit for bit, except in the null blocks, where several padding tokens may race."""
    for layer in range(expected.num_layers):
        for got, wanted in zip(actual.layer_kv(layer), expected.layer_kv(layer), strict=True):
            np.testing.assert_array_equal(
                np.asarray(got[1:], np.float32), np.asarray(wanted[1:], np.float32)
            )


def with_layout(pool: KVPool, layout: PoolLayout) -> KVPool:
    """The same keys and values in a pool of another layout; what is padding there is 0."""
    other = KVPool.create(
        num_layers=pool.num_layers,
        num_blocks=pool.num_blocks,
        num_kv_heads=pool.num_kv_heads,
        block_size=pool.block_size,
        head_dim=pool.head_dim,
        dtype=pool.dtype,
        layout=layout,
    )
    for layer in range(pool.num_layers):
        other = other.with_layer_kv(layer, *pool.layer_kv(layer))
    return other


def with_block_dropped(case: AttentionCase, row: int, index: int) -> AttentionCase:
    """One entry of a block table points at the next entry's block instead."""
    tables = np.array(case.metadata.block_tables)
    tables[row, index] = tables[row, index + 1]
    return replace(case, metadata=replace(case.metadata, block_tables=jnp.asarray(tables)))


def with_rows_of(
    small: AttentionCase, large: AttentionCase, places: dict[int, int]
) -> AttentionCase:
    """`large` with rows of `small` moved in: tokens, and old keys and values.

    Args:
      places: a row of `small` -> the row of `large` of the same lengths.
    """
    arrays = {name: np.array(getattr(large, name)) for name in ("q", "k_new", "v_new")}
    k, v = (np.array(blocks) for blocks in large.pool.layer_kv(large.layer))
    small_k, small_v = (np.asarray(blocks) for blocks in small.pool.layer_kv(small.layer))
    small_starts, large_starts = small.metadata.cu_q_lens, large.metadata.cu_q_lens
    for source, target in places.items():
        length = int(small.metadata.q_lens[source])
        begin, end = int(small_starts[source]), int(large_starts[target])
        for name, array in arrays.items():
            array[end : end + length] = np.asarray(getattr(small, name))[begin : begin + length]
        for index in range(-(-int(small.metadata.kv_lens[source]) // small.pool.block_size)):
            old = int(small.metadata.block_tables[source, index])
            new = int(large.metadata.block_tables[target, index])
            k[new], v[new] = small_k[old], small_v[old]
    pool = large.pool.with_layer_kv(large.layer, jnp.asarray(k), jnp.asarray(v))
    return replace(large, pool=pool, **{name: jnp.asarray(array) for name, array in arrays.items()})


def _metadata(
    rows: list[tuple[int, int]],
    num_decode_rows: int,
    shape: Shape,
    rng: np.random.Generator,
    window: int | None,
) -> AttentionMetadata:
    num_real = sum(q_len for q_len, _ in rows)
    num_rows = len(rows) if shape.num_rows is None else shape.num_rows
    num_tokens = num_real if shape.num_tokens is None else shape.num_tokens
    free = (rng.permutation(shape.num_blocks) + 1).tolist()
    tables = np.zeros((num_rows, shape.table_width), np.int32)
    lens = np.zeros((2, num_rows), np.int32)
    slots = []
    for row, (q_len, kv_len) in enumerate(rows):
        lens[:, row] = q_len, kv_len
        for index in range(-(-kv_len // shape.block_size)):
            tables[row, index] = free.pop()
        for position in range(kv_len - q_len, kv_len):
            block, offset = divmod(position, shape.block_size)
            slots.append(tables[row, block] * shape.block_size + offset)
        if window is not None:
            tables[row, : max(0, kv_len - q_len - window + 1) // shape.block_size] = 0
    padding = [index % shape.block_size for index in range(num_tokens - num_real)]
    metadata = AttentionMetadata(
        block_tables=jnp.asarray(tables),
        q_lens=jnp.asarray(lens[0]),
        kv_lens=jnp.asarray(lens[1]),
        slot_mapping=jnp.asarray(slots + padding, jnp.int32),
        num_decode_rows=jnp.int32(num_decode_rows),
    )
    check_values(metadata, num_blocks=shape.num_blocks, block_size=shape.block_size, window=window)
    return metadata


def _filled_pool(
    rows: list[tuple[int, int]],
    metadata: AttentionMetadata,
    shape: Shape,
    rng: np.random.Generator,
    layer: int,
) -> KVPool:
    """NaN, except for the keys and values of earlier tokens in blocks that a table still names."""
    pool = KVPool.create(
        num_layers=shape.num_layers,
        num_blocks=shape.num_blocks,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    pool = jax.tree.map(lambda data: jnp.full_like(data, jnp.nan), pool)
    size = (shape.num_blocks + 1, shape.num_kv_heads, shape.block_size, shape.head_dim)
    k, v = np.full((2, *size), np.nan)
    tables = np.asarray(metadata.block_tables)
    for row, (q_len, kv_len) in enumerate(rows):
        for position in range(kv_len - q_len):
            block, offset = divmod(position, shape.block_size)
            if tables[row, block]:
                for blocks in (k, v):
                    blocks[tables[row, block], :, offset] = rng.standard_normal(
                        (shape.num_kv_heads, shape.head_dim)
                    )
    return pool.with_layer_kv(layer, jnp.asarray(k, shape.dtype), jnp.asarray(v, shape.dtype))
