"""What both phases of attention on a TPU share: KV tiles streamed ahead, the softmax over them.

A kernel works through items in order (decode: rows; prefill: pairs of a query tile and a row).
Each item reads a range of keys, cut into fetch tiles: what one buffer in VMEM holds. Copies run
`num_buffers` tiles ahead, over the ends of items and of grid steps, so that memory never waits
for arithmetic. A fetch tile is computed in smaller compute tiles.

    positions of a row    | fetch tile 0      | fetch tile 1      | ...
    computed as           | c0 | c1 | c2 | c3 | c0 | c1 | ...
    copied as             | a block each: [planes, heads, block_size, lanes], one descriptor

No ref is reshaped or bitcast, so the interpreter runs all of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.metadata import AttentionOptions

# Width of a TPU register's last axis; m and l are kept in whole registers, one value a row.
LANES = 128
# Heads of up to so many queries are computed in one stretch of code, so many at a time.
_UNROLLED_QUERIES = 64
_UNROLLED_HEADS = 8


@dataclass(frozen=True)
class KVTiles:
    """Static sizes of the stream.

    Attributes:
      fetch: KV tokens of a buffer; a multiple of `block_size` and of `compute`.
      compute: KV tokens of one online-softmax update.
      table_width: blocks of a row in the flat block table.
    """

    fetch: int
    compute: int
    num_buffers: int
    block_size: int
    table_width: int


class Item(NamedTuple):
    """A row's keys at positions `first` .. `end` - 1; none where `end` is 0."""

    row: Any
    first: Any
    end: Any


class KVStream:
    """Fetches the tiles of all items, ahead of their use, through the block table.

    Attributes of the cursor (SMEM): tiles used, tiles fetched, the item to fetch next, and which
    of its tiles, counted from its first.
    """

    USED, FETCHED, ITEM, TILE = range(4)

    def __init__(
        self,
        tiles: KVTiles,
        item_at: Callable[[Any], Item],
        num_items: Any,
        pool_ref: Any,  # [pool_rows, planes, num_kv_heads, block_size, lanes] HBM
        tables_ref: Any,  # int32[num_rows * table_width] SMEM
        first_row: Any,
        head_start: Any,
        buffers_ref: Any,  # [num_buffers, planes, heads, fetch, lanes] VMEM
        cursor_ref: Any,  # int32[4] SMEM
        semaphores: Any,  # DMA[num_buffers]
    ):
        self.tiles = tiles
        self.item_at = item_at
        self.num_items = num_items
        self.pool_ref = pool_ref
        self.tables_ref = tables_ref
        self.first_row = first_row
        self.head_start = head_start
        self.buffers_ref = buffers_ref
        self.cursor_ref = cursor_ref
        self.semaphores = semaphores

    def start(self) -> None:
        """Fills all buffers."""
        for entry in range(4):
            self.cursor_ref[entry] = 0
        for _ in range(self.tiles.num_buffers):
            self._fetch_next()

    def wait(self, item: Item, tile: Any) -> Any:
        """The buffer's number, once the tile has arrived in it."""
        buffer = self.cursor_ref[self.USED] % self.tiles.num_buffers
        first, stop = self._blocks(item, tile)
        is_full = stop - first == self.tiles.fetch // self.tiles.block_size

        # A semaphore counts bytes: the copies of a full tile are waited for as if they were one.
        @pl.when(is_full)
        def _():
            whole = self.buffers_ref.at[buffer]
            pltpu.make_async_copy(whole, whole, self.semaphores.at[buffer]).wait()

        @pl.when(jnp.logical_not(is_full))
        def _():
            self._for_each_copy(item, tile, buffer, lambda copy: copy.wait())

        return buffer

    def release(self) -> None:
        """Nothing reads the tile's buffer any more: the next tile goes there."""
        self.cursor_ref[self.USED] = self.cursor_ref[self.USED] + 1
        self._fetch_next()

    def tile_range(self, item: Item) -> tuple[Any, Any]:
        """First tile of an item and the one after its last; one tile where it has no keys."""
        first = item.first // self.tiles.fetch
        return first, jnp.maximum(pl.cdiv(item.end, self.tiles.fetch), first + 1)

    def _fetch_next(self) -> None:
        cursor = self.cursor_ref

        @pl.when(cursor[self.ITEM] < self.num_items)
        def _():
            item = self.item_at(cursor[self.ITEM])
            first, stop = self.tile_range(item)
            tile = first + cursor[self.TILE]
            buffer = cursor[self.FETCHED] % self.tiles.num_buffers
            self._for_each_copy(item, tile, buffer, lambda copy: copy.start())
            cursor[self.FETCHED] = cursor[self.FETCHED] + 1
            is_last = tile + 1 == stop
            cursor[self.TILE] = jnp.where(is_last, 0, cursor[self.TILE] + 1)
            cursor[self.ITEM] = cursor[self.ITEM] + is_last.astype(jnp.int32)

    def _for_each_copy(self, item: Item, tile: Any, buffer: Any, act: Callable[[Any], None]):
        """The blocks of a tile that hold keys of the item, each with its copy."""
        tiles = self.tiles
        start = tile * (tiles.fetch // tiles.block_size)
        num_heads = self.buffers_ref.shape[2]

        def visit(index, _):
            block = self.tables_ref[item.row * tiles.table_width + index]
            offset = pl.multiple_of((index - start) * tiles.block_size, tiles.block_size)
            source = self.pool_ref.at[
                self.first_row + block, :, pl.ds(self.head_start, num_heads), :, :
            ]
            target = self.buffers_ref.at[buffer, :, :, pl.ds(offset, tiles.block_size), :]
            act(pltpu.make_async_copy(source, target, self.semaphores.at[buffer]))

        lax.fori_loop(*self._blocks(item, tile), visit, None)

    def _blocks(self, item: Item, tile: Any) -> tuple[Any, Any]:
        """First entry of the block table that a tile holds for an item, the one after its last."""
        tiles = self.tiles
        blocks_per_tile = tiles.fetch // tiles.block_size
        start = tile * blocks_per_tile
        first = jnp.maximum(item.first // tiles.block_size, start)
        return first, jnp.minimum(pl.cdiv(item.end, tiles.block_size), start + blocks_per_tile)


class StateRefs(NamedTuple):
    """The online-softmax state of `softmax.py`, in VMEM; m and l have equal lanes."""

    m: Any  # float32[heads, queries, LANES]
    l: Any  # noqa: E741  float32[heads, queries, LANES]
    acc: Any  # float32[heads, queries, lanes]

    @staticmethod
    def scratch(num_heads: int, num_queries: int, lanes: int) -> list[Any]:
        rows = (num_heads, num_queries)
        shapes = [(*rows, LANES), (*rows, LANES), (*rows, lanes)]
        return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]

    def start(self, sinks_ref: Any | None) -> None:
        """No key seen yet; a sink is a key without a value, seen first."""
        if sinks_ref is None:
            self.m[...] = jnp.full(self.m.shape, -jnp.inf, jnp.float32)
            self.l[...] = jnp.zeros(self.l.shape, jnp.float32)
        else:
            self.m[...] = sinks_ref[...]
            self.l[...] = jnp.ones(self.l.shape, jnp.float32)
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def finish(self, head: int) -> jax.Array:
        """A head's output; zeros for queries that saw no key."""
        total = self.l[head][:, :1]
        return self.acc[head] / jnp.where(total > 0, total, 1)


def attend_tile(
    tiles: KVTiles,
    options: AttentionOptions,
    item: Item,
    tile: Any,
    kv_ref: Any,
    q_of: Callable[[Any], jax.Array],
    visible_from: Callable[[Any], jax.Array],
    state: StateRefs,
) -> None:
    """Takes one fetch tile into the state.

    Args:
      kv_ref: [planes, heads, fetch, lanes] VMEM; rows without a key of the item may hold anything.
      q_of: head -> [queries, lanes].
      visible_from: position of a compute tile's first key -> bool[queries, compute].
    """
    start = tile * tiles.fetch
    first = jnp.maximum(item.first - start, 0) // tiles.compute
    stop = pl.cdiv(jnp.minimum(item.end - start, tiles.fetch), tiles.compute)

    def compute(index, _):
        offset = pl.multiple_of(index * tiles.compute, tiles.compute)
        keys = pl.ds(offset, tiles.compute)
        position = start + offset
        _clear_unseen(kv_ref, keys, position, tiles.compute, item)
        visible = visible_from(position)

        def compute_head(head, _):
            k, v = kv_ref[0, head, keys, :], kv_ref[-1 % kv_ref.shape[0], head, keys, :]
            _update(state, head, q_of(head), k, v, visible, options)

        # Few queries leave the units idle between heads; many fill them, and code that is
        # unrolled over heads then only takes long to compile.
        num_heads = kv_ref.shape[1]
        is_small = visible.shape[0] <= _UNROLLED_QUERIES
        unroll = math.gcd(num_heads, _UNROLLED_HEADS) if is_small else 1
        lax.fori_loop(0, num_heads, compute_head, None, unroll=unroll)

    lax.fori_loop(first, stop, compute, None)


def _clear_unseen(kv_ref: Any, keys: Any, position: Any, size: int, item: Item) -> None:
    """Zeros V where no key of the item lies: a weight of 0 does not hide NaN."""

    @pl.when((position < item.first) | (position + size > item.end))
    def _():
        planes, num_heads, _, lanes = kv_ref.shape
        positions = position + lax.broadcasted_iota(jnp.int32, (size, lanes), 0)
        is_key = (positions >= item.first) & (positions < item.end)
        for head in range(num_heads):
            v = kv_ref[planes - 1, head, keys, :]
            kv_ref[planes - 1, head, keys, :] = jnp.where(is_key, v, jnp.zeros_like(v))


def _update(
    state: StateRefs,
    head: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    options: AttentionOptions,
) -> None:
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    scores = lax.dot_general(
        q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * options.sm_scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    m_before = state.m[head][:, :1]
    m = jnp.maximum(m_before, jnp.max(scores, axis=1, keepdims=True))
    # -inf - -inf is NaN: queries without a key subtract 0 instead.
    base = jnp.where(m == -jnp.inf, 0.0, m)
    weights = jnp.exp(scores - base)
    decay = jnp.exp(m_before - base)
    total = state.l[head][:, :1] * decay + jnp.sum(weights, axis=1, keepdims=True)
    added = jnp.dot(
        weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    state.acc[head] = state.acc[head] * decay + added
    state.m[head] = jnp.broadcast_to(m, state.m.shape[1:])
    state.l[head] = jnp.broadcast_to(total, state.l.shape[1:])
