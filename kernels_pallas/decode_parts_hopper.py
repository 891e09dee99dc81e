"""What the Hopper decode kernel's loaders and attenders share: sizes, memory, the walk."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from kernels_pallas.decode_plan import RowColumn, WorkerColumn
from kernels_pallas.metadata import AttentionOptions


@dataclass(frozen=True)
class DecodeShape:
    num_kv_heads: int
    group: int  # query heads a KV head
    padded_group: int  # rows of a query box and of a partial result, columns of a matrix product
    out_group: int  # rows that a unit writes: `combine` wants whole warpgroups of elements
    has_sinks: bool
    head_dim: int
    block_size: int
    dtype: jnp.dtype
    num_terms: int  # of queries and results (`terms.py`)


@dataclass(frozen=True)
class DecodeRefs:
    """The kernel's memory and barriers, in the order in which a program is handed them."""

    q_ref: Any  # [num_terms, num_rows, kv heads * padded_group, head_dim] GMEM
    pool_ref: Any  # [pool_rows, 2, kv heads, block_size, head_dim] GMEM
    tables_ref: Any  # i32[num_rows, max_blocks_per_row] GMEM
    first_row_ref: Any  # i32[1] GMEM
    rows_ref: Any  # i32[num_rows, 4] GMEM
    workers_ref: Any  # i32[num_workers, 8] GMEM
    sinks_ref: Any  # f32[kv heads, padded_group] GMEM

    out_ref: Any  # [num_terms, num_rows, kv heads * out_group, head_dim] GMEM
    partials_ref: Any  # [places, 2, padded_group, head_dim] GMEM
    stats_ref: Any  # f32[places, 2 (m and l), padded_group] GMEM

    q_sm: Any  # [2, num_terms, padded_group, head_dim] SMEM: of this segment and the next
    k_sm: Any  # [stages, kv_tile, head_dim] SMEM
    v_sm: Any  # [stages, kv_tile, head_dim] SMEM
    out_sm: Any  # [padded_group, head_dim] SMEM, unswizzled: fewer rows can leave it
    stats_sm: Any  # f32[padded_group] SMEM: m, then l
    p_sm: Any  # [padded_group, kv_tile] SMEM
    q_there: Any  # [2], one arrival a term
    k_there: Any  # [stages], one arrival a box
    v_there: Any  # [stages], one arrival a box
    q_read: Any  # [2]
    k_read: Any  # [stages]
    v_read: Any  # [stages]


@dataclass(frozen=True)
class Segment:
    """What a worker has of one unit: of one KV head of one row.

    Attributes:
      number: segments that the worker had before.
      kv_len: the row's keys.
      first_tile: of the row, the first one that is the worker's.
      count: tiles.
      is_whole: whether these are all tiles of the unit that a query sees.
      done: tiles of the segments before.
    """

    number: Any
    row: Any
    kv_len: Any
    head: Any
    first_tile: Any
    count: Any
    is_whole: Any
    done: Any


class Walk:
    """A worker's segments, which its loader and its attender walk alike.

    Attributes:
      worker: its number in the plan.
      begin, end: of its stretch of the line of tiles.
      num_segments: that it cuts the line into.
    """

    def __init__(self, refs: DecodeRefs, shape: DecodeShape):
        self._refs, self._shape = refs, shape
        self.worker = lax.axis_index("worker")
        self.begin, self.end, self._first_row, self.num_segments = (
            refs.workers_ref[self.worker, column] for column in WorkerColumn
        )

    def for_each(self, visit: Callable[[Segment], None], *, looks_ahead: bool) -> None:
        """Calls `visit` for one segment after the other.

        Args:
          looks_ahead: asks for the next row's entries while a segment is under way.
        """
        rows_ref, workers_ref = self._refs.rows_ref, self._refs.workers_ref

        def entries_of(row):
            last = rows_ref.shape[0] - 1
            return [rows_ref[jnp.minimum(row, last), column] for column in RowColumn]

        def at(number, carry):
            position, row, *entries = carry
            row_begin, row_end, first_tile, kv_len = entries or entries_of(row)
            next_entries = entries_of(row + 1) if looks_ahead else ()
            tiles = lax.div(row_end - row_begin, jnp.int32(self._shape.num_kv_heads))
            head = lax.div(position - row_begin, tiles)
            tile = position - row_begin - head * tiles
            count = jnp.minimum(tiles - tile, self.end - position)
            is_whole = count == tiles
            first_tile, done = first_tile + tile, position - self.begin
            visit(Segment(number, row, kv_len, head, first_tile, count, is_whole, done))
            position += count
            is_over = position == row_end
            entries = map(functools.partial(jnp.where, is_over), next_entries, entries)
            return position, jnp.where(is_over, row + 1, row), *entries

        first_entries = ()
        if looks_ahead:
            columns = [WorkerColumn.of_first_row(column) for column in RowColumn]
            first_entries = [workers_ref[self.worker, column] for column in columns]
        carry = self.begin, self._first_row, *first_entries
        lax.fori_loop(0, self.num_segments, at, carry)


def visible(kv_len: Any, tile_begin: Any, options: AttentionOptions) -> tuple[Any, Any]:
    """Which keys of a tile the row's query sees: those from low on, below high."""
    low = 0 if options.window is None else kv_len - options.window - tile_begin
    return low, kv_len - tile_begin
