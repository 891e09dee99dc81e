"""Who computes what in a decode step: KV tiles dealt out evenly to a fixed number of workers.

All tiles of all (row, kv head) units stand in one line, row after row, head after head. Worker w
takes the w-th of equal stretches, whatever the lengths of the rows, so that all end together
("stream-K"; Osama et al., 2023). A stretch cuts the line into segments, one a unit it touches:

    units     | row 0 head 0 | row 0 head 1 | row 1 head 0 | row 1 head 1 |
    workers   |     w0      |      w1      |      w2      |      w3       |
                              ^ unit (0, 1) is shared by w0 and w1: two partial results

Only a worker's first and last segment can be partial. They go to places 0 and 1 of that worker, and
`decode_combine_hopper` merges them.
"""

import enum
import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kernels_pallas.metadata import AttentionMetadata


class RowColumn(enum.IntEnum):
    """Columns of `DecodePlan.rows`."""

    BEGIN = 0  # of its tiles in the line
    END = 1
    FIRST_TILE = 2  # the first tile of the row that a query sees: 0 without a window
    KV_LEN = 3


class WorkerColumn(enum.IntEnum):
    """Columns of `DecodePlan.workers`, before those of the worker's first row (`of_first_row`).

    A kernel that begins waits for memory once less with these.
    """

    BEGIN = 0  # of its stretch of the line
    END = 1
    FIRST_ROW = 2
    NUM_SEGMENTS = 3

    @staticmethod
    def of_first_row(column: RowColumn) -> int:
        """Where `workers` has what `rows` has there for the worker's first row."""
        return len(WorkerColumn) + column


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The same for all layers of a step.

    Attributes:
      rows: by `RowColumn`.
      workers: by `WorkerColumn`.
    """

    rows: Int32[Array, "num_rows 4"]
    workers: Int32[Array, "num_workers 8"]


def make_decode_plan(
    metadata: AttentionMetadata,
    num_rows: Int32[Array, ""],
    *,
    num_kv_heads: int,
    kv_tile: int,
    num_workers: int,
    window: int | None,
) -> DecodePlan:
    """Deals out the tiles of the first `num_rows` rows; a row of length 0 gets one empty tile."""
    kv_lens = metadata.kv_lens
    first = 0 * kv_lens if window is None else jnp.maximum(kv_lens - window, 0) // kv_tile
    tiles = jnp.maximum((kv_lens + kv_tile - 1) // kv_tile - first, 1)
    tiles = jnp.where(jnp.arange(metadata.num_rows, dtype=jnp.int32) < num_rows, tiles, 0)
    cu_tiles = jnp.pad(jnp.cumsum(tiles * num_kv_heads, dtype=jnp.int32), (1, 0))
    total = cu_tiles[-1]
    share = (total + num_workers - 1) // num_workers
    begin = jnp.minimum(jnp.arange(num_workers, dtype=jnp.int32) * share, total)
    end = jnp.minimum(begin + share, total)
    first_row, first_unit = _unit_at(cu_tiles, tiles, begin, num_kv_heads)
    _, last_unit = _unit_at(cu_tiles, tiles, jnp.maximum(end - 1, 0), num_kv_heads)
    num_segments = jnp.where(end > begin, last_unit - first_unit + 1, 0)
    of_rows = {
        RowColumn.BEGIN: cu_tiles[:-1],
        RowColumn.END: cu_tiles[1:],
        RowColumn.FIRST_TILE: first,
        RowColumn.KV_LEN: kv_lens,
    }
    of_workers = {
        WorkerColumn.BEGIN: begin,
        WorkerColumn.END: end,
        WorkerColumn.FIRST_ROW: first_row,
        WorkerColumn.NUM_SEGMENTS: num_segments,
    }
    rows = jnp.stack([of_rows[column] for column in RowColumn], axis=1)
    workers = jnp.stack([of_workers[column] for column in WorkerColumn], axis=1)
    return DecodePlan(rows=rows, workers=jnp.concatenate([workers, rows[first_row]], axis=1))


def _unit_at(
    cu_tiles: Int32[Array, " num_rows+1"],
    tiles: Int32[Array, " num_rows"],
    position: Int32[Array, " num_workers"],
    num_kv_heads: int,
) -> tuple[Int32[Array, " num_workers"], Int32[Array, " num_workers"]]:
    """The row of a place in the line, and the number of its unit."""
    # Counting beats searching on a GPU: a loop would run from the host.
    row = jnp.sum(cu_tiles[None, 1:] <= position[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, tiles.shape[0] - 1)
    head = (position - cu_tiles[row]) // jnp.maximum(tiles[row], 1)
    return row, row * num_kv_heads + jnp.minimum(head, num_kv_heads - 1)
