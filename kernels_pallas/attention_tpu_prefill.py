"""Prefill and mixed steps on a TPU: rows of any number of new tokens, over a pool that has them.

Query tiles lie at fixed places of the flat batch, so no query and no output is ever moved to an
aligned place. A tile may hold tokens of several rows, a row may reach over several tiles; the
kernel goes through the pairs that meet, and the softmax state lets a token see its own row alone:

    tokens   | row 0          | row 1 | row 2                        | padding |
    tiles    | tile 0     | tile 1          | tile 2     | tile 3              |
    pairs    (0, row 0) (1, row 0) (1, row 1) (1, row 2) (2, row 2) (3, row 2)

Pairs of one tile follow each other, so its queries are fetched and its output is written once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.attention_tpu_tiles import (
    LANES,
    Item,
    KVStream,
    KVTiles,
    StateRefs,
    attend_tile,
)
from kernels_pallas.metadata import AttentionMetadata, AttentionOptions
from kernels_pallas.tuning import TPUPhaseTuning


class Pairs(NamedTuple):
    """Which query tile meets which row, in order. Unused entries repeat the last pair.

    Attributes:
      rows, tiles: int32[max_pairs + 1].
      num_pairs: int32[], pairs in use.
    """

    rows: jax.Array
    tiles: jax.Array
    num_pairs: jax.Array


def find_pairs(metadata: AttentionMetadata, q_tile: int, num_tiles: int) -> Pairs:
    """The pairs of all rows after the decode rows."""
    num_rows = metadata.num_rows
    starts = metadata.cu_q_lens
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    is_mine = (rows >= metadata.num_decode_rows) & (metadata.q_lens > 0)
    first_tiles = starts[:-1] // q_tile
    counts = jnp.where(is_mine, (starts[1:] - 1) // q_tile - first_tiles + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    count = ends[-1]
    # A pair more starts with every row and with every tile: no more than that.
    index = jnp.arange(num_rows + num_tiles + 1, dtype=jnp.int32)
    used = jnp.minimum(index, jnp.maximum(count - 1, 0))
    row = jnp.searchsorted(ends, used, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    tile = jnp.minimum(first_tiles[row] + used - (ends[row] - counts[row]), num_tiles - 1)
    return Pairs(row, tile, count)


def prefill(
    q: jax.Array,
    data: jax.Array,
    sinks: jax.Array | None,
    scalars: jax.Array,
    pairs: Pairs,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    tables: jax.Array,
    *,
    options: AttentionOptions,
    tuning: TPUPhaseTuning,
    head_groups: int,
    vmem_limit_bytes: int,
    interpret: Any,
) -> jax.Array:
    """Attends; the new K and V are in the pool.

    Args:
      q: [num_kv_heads, num_tiles, group * q_tile, lanes]; q_tile = `tuning.queries`, a power of
        two; the tokens of one query head stand together.
      data: the pool's; it is read only.
      sinks: float32[num_kv_heads, group * q_tile, LANES], equal over lanes, or None.
      scalars: int32[2]: the layer's first row in the pool, the number of pairs.
      cu_q_lens, kv_lens, tables: int32[num_rows + 1], int32[num_rows],
        int32[num_rows * table_width].
      head_groups: equal shares of the KV heads, which cores may work on side by side.

    Returns:
      Like q; anything in tiles without a pair.
    """
    num_kv_heads, _, num_queries, lanes = q.shape
    planes, block_size = data.shape[1], data.shape[3]
    heads = num_kv_heads // head_groups
    tiles = KVTiles(
        fetch=tuning.fetch,
        compute=tuning.compute,
        num_buffers=tuning.num_buffers,
        block_size=block_size,
        table_width=tables.shape[0] // kv_lens.shape[0],
    )

    def tile_of(group, pair, _scalars, _rows, tiles_ref, *_):
        return group, tiles_ref[pair], 0, 0

    q_spec = pl.BlockSpec((heads, 1, num_queries, lanes), tile_of)
    in_specs = [q_spec, pl.BlockSpec(memory_space=pltpu.HBM)]
    operands = [q, data]
    if sinks is not None:
        in_specs.append(pl.BlockSpec((heads, num_queries, LANES), lambda g, i, *_: (g, 0, 0)))
        operands.append(sinks)
    kernel = pl.pallas_call(
        _make_kernel(tiles, options, tuning.queries, has_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(head_groups, pairs.rows.shape[0] - 1),
            in_specs=in_specs,
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((tuning.num_buffers, planes, heads, tuning.fetch, lanes), data.dtype),
                *StateRefs.scratch(heads, num_queries, lanes),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((tuning.num_buffers,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        interpret=interpret,
        name="paged_prefill",
    )
    return kernel(scalars, pairs.rows, pairs.tiles, cu_q_lens, kv_lens, tables, *operands)


def _make_kernel(tiles: KVTiles, options: AttentionOptions, q_tile: int, *, has_sinks: bool):
    def kernel(
        scalars_ref,  # int32[2] SMEM
        rows_ref,  # int32[max_pairs + 1] SMEM
        tiles_ref,  # int32[max_pairs + 1] SMEM
        cu_q_lens_ref,  # int32[num_rows + 1] SMEM
        kv_lens_ref,  # int32[num_rows] SMEM
        tables_ref,  # int32[num_rows * table_width] SMEM
        q_ref,  # [heads, 1, group * q_tile, lanes] VMEM
        pool_ref,  # [pool_rows, planes, num_kv_heads, block_size, lanes] HBM
        *refs,
    ):
        sinks_ref = refs[0] if has_sinks else None  # float32[heads, group * q_tile, LANES] VMEM
        (
            out_ref,  # [heads, 1, group * q_tile, lanes] VMEM
            buffers_ref,  # [num_buffers, planes, heads, fetch, lanes] VMEM
            *state_refs,
            cursor_ref,  # int32[4] SMEM
            semaphores,
        ) = refs[has_sinks:]
        state = StateRefs(*state_refs)
        group, pair = pl.program_id(0), pl.program_id(1)
        heads, _, num_queries, _ = q_ref.shape
        num_pairs = scalars_ref[1]

        def queries_at(pair):
            return _Queries.of(rows_ref[pair], tiles_ref[pair], q_tile, cu_q_lens_ref, kv_lens_ref)

        def item_at(pair):
            queries = queries_at(pair)
            end = queries.last - queries.origin + 1
            first = jnp.int32(0)
            if options.window is not None:
                earliest = queries.first - queries.origin
                first = jnp.maximum(earliest - (options.window - 1), 0)
            return Item(rows_ref[pair], first, end)

        stream = KVStream(
            tiles,
            item_at,
            num_pairs,
            pool_ref,
            tables_ref,
            scalars_ref[0],
            group * heads,
            buffers_ref,
            cursor_ref,
            semaphores,
        )

        @pl.when(pair == 0)
        def _():
            stream.start()

        @pl.when(pair < num_pairs)
        def _():
            item, queries, tile = item_at(pair), queries_at(pair), tiles_ref[pair]

            @pl.when((pair == 0) | (tiles_ref[jnp.maximum(pair - 1, 0)] != tile))
            def _():
                state.start(sinks_ref)

            def compute_tile(kv_tile, _):
                buffer = stream.wait(item, kv_tile)
                attend_tile(
                    tiles,
                    options,
                    item,
                    kv_tile,
                    buffers_ref.at[buffer],
                    lambda head: q_ref[head, 0],
                    lambda position: queries.visible(
                        tile * q_tile, position, (num_queries, tiles.compute), q_tile, options
                    ),
                    state,
                )
                stream.release()

            lax.fori_loop(*stream.tile_range(item), compute_tile, None)

            @pl.when((pair == num_pairs - 1) | (tiles_ref[pair + 1] != tile))
            def _():
                for head in range(heads):
                    out_ref[head, 0] = state.finish(head).astype(out_ref.dtype)

    return kernel


class _Queries(NamedTuple):
    """A row's tokens in a query tile: `first` .. `last` in the batch; position = token - origin."""

    first: Any
    last: Any
    origin: Any

    @classmethod
    def of(cls, row: Any, tile: Any, q_tile: int, cu_q_lens_ref: Any, kv_lens_ref: Any):
        stop = cu_q_lens_ref[row + 1]
        first = jnp.maximum(tile * q_tile, cu_q_lens_ref[row])
        last = jnp.minimum((tile + 1) * q_tile, stop) - 1
        return cls(first, last, stop - kv_lens_ref[row])

    def visible(
        self, start: Any, position: Any, shape: tuple[int, int], q_tile: int, options: Any
    ) -> jax.Array:
        """bool[queries, keys]: causal, in the window, and of this row."""
        # q_tile is a power of two; a query's head stands in the higher bits.
        token = start + (lax.broadcasted_iota(jnp.int32, shape, 0) & (q_tile - 1))
        key = position + lax.broadcasted_iota(jnp.int32, shape, 1)
        query = token - self.origin
        visible = (token >= self.first) & (token <= self.last) & (key <= query)
        if options.window is not None:
            visible &= key > query - options.window
        return visible
