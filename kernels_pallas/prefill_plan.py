"""Which query tiles a step's prompt chunks make, longest first."""

import enum
import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kernels_pallas.metadata import AttentionMetadata


class TileColumn(enum.IntEnum):
    """Columns of `PrefillPlan.tiles`."""

    ROW = 0
    TOKEN = 1  # its first query's, of all of the step's
    NUM_QUERIES = 2  # 0: no tile
    POSITION = 3  # its first query's, in the row


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillPlan:
    """The same for all layers of a step.

    Attributes:
      tiles: per query tile, by `TileColumn`. Tiles that see most keys come first, so that
        programs end together.
      num_tiles: how many of them are real.
    """

    tiles: Int32[Array, "max_tiles 4"]
    num_tiles: Int32[Array, " 1"]


def make_prefill_plan(metadata: AttentionMetadata, q_tile: int) -> PrefillPlan:
    """Cuts the chunk of every row after the decode rows into tiles of `q_tile` queries."""
    num_rows = metadata.num_rows
    max_tiles = metadata.num_tokens // q_tile + num_rows
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    q_lens = jnp.where(rows < metadata.num_decode_rows, 0, metadata.q_lens)
    ends = jnp.cumsum((q_lens + q_tile - 1) // q_tile, dtype=jnp.int32)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    # Counting beats searching on a GPU: a loop would run from the host.
    row = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    before = ends[row] - (q_lens[row] + q_tile - 1) // q_tile
    begin = (tile - before) * q_tile
    count = jnp.where(tile < ends[-1], jnp.minimum(q_lens[row] - begin, q_tile), 0)
    position = metadata.kv_lens[row] - q_lens[row] + begin
    token = metadata.cu_q_lens[row] + begin
    order = jnp.argsort(jnp.where(count > 0, -position, 2**30), stable=True)
    columns = {
        TileColumn.ROW: row,
        TileColumn.TOKEN: token,
        TileColumn.NUM_QUERIES: count,
        TileColumn.POSITION: position,
    }
    tiles = jnp.stack([columns[column] for column in TileColumn], axis=1)[order]
    return PrefillPlan(tiles=tiles, num_tiles=ends[-1:])
