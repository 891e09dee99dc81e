"""Paged attention in plain XLA: the CPU's path, and everywhere the fallback that is right.

Two paths over the same arrays. Decode rows go together, vectorised over rows; the other rows go
one query tile after another. Both walk the KV tiles with an online softmax and stop at the last
tile that a query sees (a trip count known only on the device), so a short context costs little,
and never more than one tile a row is gathered.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kernels_pallas import softmax
from kernels_pallas.metadata import AttentionMetadata, AttentionOptions, Shaped
from kernels_pallas.pool import KVPool
from kernels_pallas.tuning import AttentionTuning
from kernels_pallas.write_kv import write_kv


def unsupported(q: Shaped, pool: KVPool) -> list[str]:
    """Every reason why this implementation cannot take these arrays."""
    reasons = []
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        reasons.append(f"q.dtype={q.dtype.name} is not float32, bfloat16 or float16")
    if q.dtype not in (pool.dtype, jnp.float32):
        names = f"pool.dtype={pool.dtype.name} nor float32"
        reasons.append(f"q.dtype={q.dtype.name} is neither {names}")
    if pool.is_joined:
        reasons.append("the pool has the layout of the TPU kernels")
    return reasons


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    v_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    pool: KVPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: AttentionTuning,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVPool]:
    """See `ops.paged_attention`."""
    pool = write_kv(pool, layer, k_new, v_new, metadata.slot_mapping)
    tables = pool.first_row(layer) + _widened(metadata, tuning.kv_tile // pool.block_size)
    num_rows = metadata.num_rows
    if metadata.is_decode_step:
        # One token a row at most: every real row is a decode row, wherever it stands.
        return _decode(q, pool, tables, metadata.kv_lens, options, sinks, tuning.kv_tile), pool
    is_decode = jnp.arange(num_rows, dtype=jnp.int32) < metadata.num_decode_rows
    kv_lens = jnp.where(is_decode, metadata.kv_lens, 0)
    decoded = _decode(q[:num_rows], pool, tables, kv_lens, options, sinks, tuning.kv_tile)
    return _prefill(q, decoded, pool, tables, metadata, options, sinks, tuning), pool


def _decode(
    q: Float[Array, "num_rows num_q_heads head_dim"],
    pool: KVPool,
    tables: Int32[Array, "num_rows width"],
    kv_lens: Int32[Array, " num_rows"],
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    kv_tile: int,
) -> Float[Array, "num_rows num_q_heads head_dim"]:
    """One query a row, at its last position; zeros where `kv_lens` is 0."""
    num_rows, num_q_heads, head_dim = q.shape
    heads = (num_rows, pool.num_kv_heads, num_q_heads // pool.num_kv_heads)
    q_heads = q.reshape(*heads, head_dim)
    first = _first_visible(kv_lens - 1, options)
    # Rows of length 0 must not pull the first tile to 0.
    first_of_all = jnp.min(jnp.where(kv_lens > 0, first, jnp.max(kv_lens)))

    def take_in(tile: Array, state: softmax.SoftmaxState) -> softmax.SoftmaxState:
        positions = tile * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32)[None, :]
        seen = (positions >= first[:, None]) & (positions < kv_lens[:, None])
        k, v = _gather_tile(pool, tables, tile, seen)
        visible = seen[:, None, None, :]
        return softmax.update(state, _scores(q_heads, k, options), visible, v)

    state = lax.fori_loop(
        first_of_all // kv_tile,
        _ceil_div(jnp.max(kv_lens), kv_tile),
        take_in,
        softmax.start(q_heads),
    )
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.reshape(1, *heads[1:]), heads)
    return softmax.finish(state, sinks).reshape(q.shape).astype(q.dtype)


def _prefill(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    decoded: Float[Array, "num_rows num_q_heads head_dim"],
    pool: KVPool,
    tables: Int32[Array, "num_rows width"],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: AttentionTuning,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """The rows after the decode rows, one query tile at a time; `decoded` fills the others."""
    num_tokens, q_tile = q.shape[0], min(tuning.q_tile, q.shape[0])
    rows = jnp.arange(metadata.num_rows, dtype=jnp.int32)
    tiles = jnp.where(rows < metadata.num_decode_rows, 0, _ceil_div(metadata.q_lens, q_tile))
    last_work = jnp.cumsum(tiles, dtype=jnp.int32)
    cu_q_lens = metadata.cu_q_lens
    # A row's last tile may reach past the last token: slices clamp silently, so make room.
    q = jnp.pad(q, ((0, q_tile), (0, 0), (0, 0)))
    out = jnp.zeros_like(q).at[: metadata.num_rows].set(decoded)

    def work(index: Array, out: Array) -> Array:
        row = jnp.sum(last_work <= index, dtype=jnp.int32)
        begin = (index - (last_work[row] - tiles[row])) * q_tile
        token = cu_q_lens[row] + begin
        num_queries = jnp.minimum(q_tile, metadata.q_lens[row] - begin)
        attended = _attend_tile(
            lax.dynamic_slice_in_dim(q, token, q_tile),
            metadata.kv_lens[row] - metadata.q_lens[row] + begin,
            num_queries,
            pool,
            lax.dynamic_slice_in_dim(tables, row, 1),
            options,
            sinks,
            tuning.kv_tile,
        )
        # The tile's tail belongs to other rows.
        is_own = (jnp.arange(q_tile) < num_queries)[:, None, None]
        kept = jnp.where(is_own, attended, lax.dynamic_slice_in_dim(out, token, q_tile))
        return lax.dynamic_update_slice_in_dim(out, kept, token, axis=0)

    return lax.fori_loop(0, last_work[-1], work, out)[:num_tokens]


def _attend_tile(
    q: Float[Array, "q_tile num_q_heads head_dim"],
    first_position: Int32[Array, ""],
    num_queries: Int32[Array, ""],
    pool: KVPool,
    table: Int32[Array, "1 width"],
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    kv_tile: int,
) -> Float[Array, "q_tile num_q_heads head_dim"]:
    """One row's queries from `first_position` on; what lies past `num_queries` means nothing."""
    q_tile, num_q_heads, head_dim = q.shape
    num_kv_heads, group = pool.num_kv_heads, num_q_heads // pool.num_kv_heads
    # [q_tile, kv_heads, group, d] -> [1, kv_heads, group * q_tile, d]
    q_heads = q.reshape(q_tile, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    q_heads = q_heads.reshape(1, num_kv_heads, group * q_tile, head_dim)
    q_positions = first_position + jnp.arange(q_tile, dtype=jnp.int32)
    first, end = _first_visible(first_position, options), first_position + num_queries

    def take_in(tile: Array, state: softmax.SoftmaxState) -> softmax.SoftmaxState:
        positions = tile * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32)[None, :]
        k, v = _gather_tile(pool, table, tile, (positions >= first) & (positions < end))
        visible = (positions <= q_positions[:, None]) & (positions < end)
        visible &= positions >= _first_visible(q_positions, options)[:, None]
        visible = jnp.broadcast_to(visible, (group, q_tile, kv_tile))
        visible = visible.reshape(1, 1, group * q_tile, kv_tile)
        return softmax.update(state, _scores(q_heads, k, options), visible, v)

    state = lax.fori_loop(
        first // kv_tile,
        _ceil_div(end, kv_tile),
        take_in,
        softmax.start(q_heads),
    )
    if sinks is not None:
        sinks = jnp.repeat(sinks, q_tile).reshape(1, num_kv_heads, group * q_tile)
    out = softmax.finish(state, sinks).reshape(num_kv_heads, group, q_tile, head_dim)
    return out.transpose(2, 0, 1, 3).reshape(q.shape).astype(q.dtype)


def _gather_tile(
    pool: KVPool,
    tables: Int32[Array, "num_rows width"],
    tile: Int32[Array, ""],
    seen: Bool[Array, "num_rows kv_tile"],
) -> tuple[
    Float[Array, "num_rows num_kv_heads kv_tile head_dim"],
    Float[Array, "num_rows num_kv_heads kv_tile head_dim"],
]:
    """K and V of one tile of each row; V is 0 where no query sees it, K may be anything there."""
    num_rows, kv_tile = seen.shape
    width = kv_tile // pool.block_size
    blocks = lax.dynamic_slice_in_dim(tables, tile * width, width, axis=1)[:, None, :]
    heads = jnp.arange(pool.num_kv_heads, dtype=jnp.int32)[None, :, None]
    shape = (num_rows, pool.num_kv_heads, kv_tile, pool.lanes)
    k = pool.data.at[blocks, 0, heads].get(mode="promise_in_bounds").reshape(shape)
    v = pool.data.at[blocks, 1, heads].get(mode="promise_in_bounds").reshape(shape)
    k, v = k[..., : pool.head_dim], v[..., : pool.head_dim]
    return k, jnp.where(seen[:, None, :, None], v, 0)


def _scores(
    q: Float[Array, "num_rows num_kv_heads queries head_dim"],
    k: Float[Array, "num_rows num_kv_heads keys head_dim"],
    options: AttentionOptions,
) -> Float32[Array, "num_rows num_kv_heads queries keys"]:
    scores = jnp.einsum(
        "rhqd,rhkd->rhqk",
        q,
        k,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores = scores * options.sm_scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return scores


def _first_visible(
    positions: Int32[Array, "*queries"], options: AttentionOptions
) -> Int32[Array, "*queries"]:
    """The first key that a query at each position sees."""
    if options.window is None:
        return jnp.zeros_like(positions)
    return jnp.maximum(positions - (options.window - 1), 0)


def _widened(metadata: AttentionMetadata, width: int) -> Int32[Array, "num_rows width"]:
    """Block tables as wide as whole KV tiles: slices past the end would clamp silently."""
    missing = -metadata.block_tables.shape[1] % width
    return jnp.pad(metadata.block_tables, ((0, 0), (0, missing)))


def _ceil_div(dividend: Int32[Array, "*any"], divisor: int) -> Int32[Array, "*any"]:
    return (dividend + (divisor - 1)) // divisor
