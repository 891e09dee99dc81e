"""What the parts of the Hopper write kernel share: sizes, memory, what a program is to do."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.hopper_parts import MMA_ROWS

RUN = 16  # tokens in slots side by side that leave in one copy: divides every block size


@dataclass(frozen=True)
class WriteShape:
    group: int  # query heads a KV head
    q_rows: int  # rows of the output a KV head
    half: int  # of head_dim
    block_size: int
    num_tokens: int
    box: int  # tokens that one TMA box takes
    parts: int  # programs that share the keys or values of one head and tile
    loads_early: bool
    has_runs: bool
    eps: float | None  # None: no norms
    heads_dtype: jnp.dtype
    dtype: jnp.dtype  # of the pool
    num_terms: int  # of a query, each of `dtype`

    @property
    def halves(self) -> list[Any]:
        """Slices of a head's columns."""
        return [pl.ds(i * self.half, self.half) for i in range(2)]


@dataclass(frozen=True)
class WriteRefs:
    """The kernel's memory and barrier, in the order in which a program is handed them."""

    heads_ref: Any  # heads_dtype[num_tokens, heads, head_dim] GMEM
    cos_ref: Any  # f32[tiles * MMA_ROWS, half] GMEM
    sin_ref: Any  # f32[tiles * MMA_ROWS, half] GMEM
    q_scale_ref: Any  # [head_dim] GMEM
    k_scale_ref: Any  # [head_dim] GMEM
    slots_ref: Any  # i32[tiles * MMA_ROWS] GMEM
    first_row_ref: Any  # i32[1] GMEM
    pool_ref: Any  # [pool_rows, 2, kv heads, block_size, head_dim] GMEM

    q_ref: Any  # [num_terms, num_tokens, kv heads * q_rows, head_dim] GMEM

    halves_sm: Any  # heads_dtype[2, MMA_ROWS, half] SMEM
    rows_sm: Any  # [MMA_ROWS, head_dim] SMEM, unswizzled: single rows can leave it
    terms_sm: Any  # [num_terms, 2, MMA_ROWS, half] SMEM; None where halves_sm has that type
    slots_sm: Any  # i32[MMA_ROWS] SMEM
    there: Any


class Work:
    """What a program is to do.

    Of each KV head a program a query head, then `parts` for its key, then as many for its value.

    Attributes:
      kind: which of its queries, then `group` for its key, `group + 1` for its value.
      part: which rows of a tile's keys or values.
      head: of the qkv product.
      first_token: of the tile.
    """

    def __init__(self, shape: WriteShape):
        group, parts = jnp.int32(shape.group), jnp.int32(shape.parts)
        index, per_kv_head = lax.axis_index("part"), group + 2 * parts
        self.kv_head, index = lax.div(index, per_kv_head), lax.rem(index, per_kv_head)
        self.part = lax.rem(index - group, parts)
        self.kind = jnp.where(index < group, index, group + lax.div(index - group, parts))
        self.head = self.kv_head * (group + 2) + self.kind
        self.first_token = lax.axis_index("tile") * MMA_ROWS
