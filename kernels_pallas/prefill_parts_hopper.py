"""What the Hopper prefill kernel's loader and attenders share: sizes, memory, the walk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.prefill_plan import TileColumn
from kernels_pallas.tuning import HopperPrefillTuning


@dataclass(frozen=True)
class PrefillShape:
    num_terms: int  # of queries and of results: see `terms`
    num_padded_tokens: int
    num_q_heads: int
    group: int  # query heads a KV head
    head_dim: int
    block_size: int
    dtype: jnp.dtype
    has_sinks: bool

    def tokens(self, term: Any, begin: Any, size: int) -> Any:
        """The slice of one term's tokens, of the terms that lie one behind the other."""
        return pl.ds(begin + term * self.num_padded_tokens, size)


@dataclass(frozen=True)
class PrefillRefs:
    """The kernel's memory and barriers, in the order in which a program is handed them."""

    q_ref: Any  # [num_terms * num_padded_tokens, q heads, head_dim] GMEM
    pool_ref: Any  # [pool_rows, 2, kv heads, block_size, head_dim] GMEM
    tables_ref: Any  # i32[num_rows, max_blocks_per_row] GMEM
    kv_lens_ref: Any  # i32[num_rows] GMEM
    first_row_ref: Any  # i32[1] GMEM
    tiles_ref: Any  # i32[max_tiles, 4] GMEM
    num_tiles_ref: Any  # i32[1] GMEM
    sinks_ref: Any  # f32[q heads] GMEM

    out_ref: Any  # [num_terms * num_padded_tokens, q heads, head_dim] GMEM

    q_sm: Any  # [q_slots * attenders, num_terms, MMA_ROWS, head_dim] SMEM: q, swizzled results
    k_sm: Any  # [stages, kv_tile, head_dim] SMEM
    v_sm: Any  # [stages, kv_tile, head_dim] SMEM
    plain_sm: Any  # [attenders, MMA_ROWS, part_size] SMEM: q and results, unswizzled
    p_sm: Any  # [attenders, MMA_ROWS, kv_tile] SMEM, or None
    q_there: Any  # [q_slots * attenders], one arrival a term
    plain_there: Any  # [attenders]
    k_there: Any  # [stages]
    v_there: Any  # [stages]
    q_free: Any  # [q_slots * attenders]
    k_read: Any  # [stages], one arrival an attender
    v_read: Any  # [stages], one arrival an attender
    v_cleared: Any  # [1]
    turn: Any  # whose turn it is on the matrix unit


@dataclass(frozen=True)
class Item:
    """One query head of one query tile. Steps are the KV tiles of the row that it sees.

    Attributes:
      number: items that the program had before.
      token: the tile's first, of all of the step's.
      position: the tile's first query's, in the row.
      first, end: the steps.
      done: steps of the items before.
    """

    number: Any
    row: Any
    head: Any
    token: Any
    num_queries: Any
    position: Any
    first: Any
    end: Any
    done: Any


class Walk:
    """The items of this program, which the loader and every attender walk alike.

    Attributes:
      count: how many.
    """

    def __init__(
        self,
        refs: PrefillRefs,
        shape: PrefillShape,
        options: AttentionOptions,
        tuning: HopperPrefillTuning,
    ):
        self._refs, self._shape, self._options, self._tuning = refs, shape, options, tuning
        self._program = lax.axis_index("program")
        num_items = refs.num_tiles_ref[0] * shape.num_q_heads
        self._programs = programs = jnp.int32(tuning.num_programs)
        self.count = jnp.maximum(lax.div(num_items - self._program + (programs - 1), programs), 0)

    def for_each(self, visit: Callable[[Item], None]) -> Any:
        """Calls `visit` for one item after the other; returns the number of all steps."""
        refs, window, kv_tile = self._refs, self._options.window, self._tuning.kv_tile

        def at(number, done):
            index = self._program + number * self._programs
            tile = lax.div(index, jnp.int32(self._shape.num_q_heads))
            head = lax.rem(index, jnp.int32(self._shape.num_q_heads))
            row, token, num_queries, position = (
                refs.tiles_ref[tile, column] for column in TileColumn
            )
            first = 0
            if window is not None:
                first = lax.div(jnp.maximum(position - (window - 1), 0), jnp.int32(kv_tile))
            seen = jnp.minimum(refs.kv_lens_ref[row], position + self._tuning.q_tile)
            end = ceil_div(seen, kv_tile)
            visit(Item(number, row, head, token, num_queries, position, first, end, done))
            return done + end - first

        return lax.fori_loop(0, self.count, at, jnp.zeros((), jnp.int32))


def ceil_div(dividend: Any, divisor: int) -> Any:
    return lax.div(dividend + (divisor - 1), jnp.int32(divisor))
