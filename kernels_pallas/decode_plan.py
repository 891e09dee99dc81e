"""Who computes what in a decode step: KV boxes dealt out evenly to a fixed number of workers.

A box is what one TMA copy brings: a block, or a part of a large one. All boxes of all (row, kv
head) units stand in one line, row after row, head after head. Worker w takes the w-th of equal
stretches, whatever the lengths of the rows, so that all end together ("stream-K"; Osama et al.,
2023). A stretch cuts the line into segments, one a unit it touches:

    units     | row 0 head 0 | row 0 head 1 | row 1 head 0 | row 1 head 1 |
    workers   |     w0      |      w1      |      w2      |      w3       |
                              ^ unit (0, 1) is shared by w0 and w1: two partial results

A segment is worked on in tiles of several boxes from its beginning; only its last may be less than
whole. Only a worker's first and last segment can be partial. They go to places 0 and 1 of that
worker, and `decode_combine_hopper` merges them.
"""

import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kernels_pallas.metadata import AttentionMetadata


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The same for all layers of a step.

    Attributes:
      rows: per row: begin and end of its boxes in the line, the first box of it that a query sees
        (0 without a window), its number of keys.
      workers: per worker: begin and end in the line, its first row, its number of segments, of
        tiles, and that row's entries of `rows`: a kernel that begins waits for memory once less.
    """

    rows: Int32[Array, "num_rows 4"]
    workers: Int32[Array, "num_workers 9"]


def make_decode_plan(
    metadata: AttentionMetadata,
    num_rows: Int32[Array, ""],
    *,
    num_kv_heads: int,
    box: int,
    kv_tile: int,
    num_workers: int,
    window: int | None,
) -> DecodePlan:
    """Deals out the boxes of the first `num_rows` rows; a row of length 0 gets one empty box.

    Nobody gets less than a tile of boxes, as long as there are some: partial results cost, too.

    Args:
      box, kv_tile: keys; a tile is some whole boxes.
    """
    kv_lens, width = metadata.kv_lens, kv_tile // box
    first = 0 * kv_lens if window is None else jnp.maximum(kv_lens - window, 0) // box
    boxes = jnp.maximum(_ceil_div(kv_lens, box) - first, 1)
    boxes = jnp.where(jnp.arange(metadata.num_rows, dtype=jnp.int32) < num_rows, boxes, 0)
    cu_boxes = jnp.pad(jnp.cumsum(boxes * num_kv_heads, dtype=jnp.int32), (1, 0))
    total = cu_boxes[-1]
    share = jnp.maximum(_ceil_div(total, num_workers), width)
    begin = jnp.minimum(jnp.arange(num_workers, dtype=jnp.int32) * share, total)
    end = jnp.minimum(begin + share, total)
    first_row, first_head = _unit_at(cu_boxes, boxes, begin, num_kv_heads)
    last_row, last_head = _unit_at(cu_boxes, boxes, jnp.maximum(end - 1, 0), num_kv_heads)
    num_segments = (last_row - first_row) * num_kv_heads + last_head - first_head + 1
    # Whole units lie between the first and the last; their tiles by row, then by head.
    tiles = _ceil_div(boxes, width)
    cu_tiles = jnp.pad(jnp.cumsum(tiles * num_kv_heads, dtype=jnp.int32), (1, 0))[:-1]
    between = cu_tiles[last_row] + last_head * tiles[last_row]
    between -= cu_tiles[first_row] + (first_head + 1) * tiles[first_row]
    first_end = cu_boxes[first_row] + (first_head + 1) * boxes[first_row]
    last_begin = cu_boxes[last_row] + last_head * boxes[last_row]
    num_tiles = jnp.where(
        num_segments == 1,
        _ceil_div(end - begin, width),
        _ceil_div(first_end - begin, width) + between + _ceil_div(end - last_begin, width),
    )
    rows = jnp.stack([cu_boxes[:-1], cu_boxes[1:], first, kv_lens], axis=1)
    counts = jnp.where(end > begin, jnp.stack([num_segments, num_tiles]), 0)
    workers = jnp.stack([begin, end, first_row, *counts], axis=1)
    return DecodePlan(rows=rows, workers=jnp.concatenate([workers, rows[first_row]], axis=1))


def _ceil_div(dividend: Array, divisor: int) -> Array:
    return (dividend + divisor - 1) // divisor


def _unit_at(
    cu_boxes: Int32[Array, " num_rows+1"],
    boxes: Int32[Array, " num_rows"],
    position: Int32[Array, " num_workers"],
    num_kv_heads: int,
) -> tuple[Int32[Array, " num_workers"], Int32[Array, " num_workers"]]:
    """The row and the head of a place in the line."""
    # Counting beats searching on a GPU: a loop would run from the host.
    row = jnp.sum(cu_boxes[None, 1:] <= position[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, boxes.shape[0] - 1)
    head = (position - cu_boxes[row]) // jnp.maximum(boxes[row], 1)
    return row, jnp.minimum(head, num_kv_heads - 1)
