"""What attention must know about a step's tokens, and how scores become weights."""

import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

# An array, or a description: enough to see whether arguments fit.
Shaped = jax.Array | jax.ShapeDtypeStruct


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Where the rows of one step find their keys, and which tokens are theirs.

    Tokens are joined row after row, padding tokens last. Decode rows come first, then the other
    rows, then padded ones (`q_len` and `kv_len` 0):

        rows    | decode: one token each | chunks of prompts | padded |
        tokens  | 0 .. num_decode_rows   | row after row     | padding|

    `checks.check_values` proves all of it on the host.

    Attributes:
      block_tables: block ids of each row in the order of positions; anything past the row's last
        block, and blocks that lie before its window, may be the null block.
      q_lens: new tokens of each row.
      kv_lens: valid KV tokens of each row after this step's write, new ones included.
      slot_mapping: block id * block_size + offset of each new token; padding tokens point into
        the null block.
      num_decode_rows: leading rows that have one token. A row with one token may also stand
        further back.
    """

    block_tables: Int32[Array, "num_rows max_blocks_per_row"]
    q_lens: Int32[Array, " num_rows"]
    kv_lens: Int32[Array, " num_rows"]
    slot_mapping: Int32[Array, " num_tokens"]
    num_decode_rows: Int32[Array, ""]

    @property
    def num_rows(self) -> int:
        return self.block_tables.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def is_decode_step(self) -> bool:
        """Whether every row has at most one token: what as many tokens as rows mean."""
        return self.num_tokens == self.num_rows

    @property
    def cu_q_lens(self) -> Int32[Array, "num_rows+1"]:
        """Index of each row's first token; the last entry is the number of real tokens."""
        return jnp.pad(jnp.cumsum(self.q_lens, dtype=jnp.int32), (1, 0))


@dataclass(frozen=True)
class AttentionOptions:
    """How scores become weights; the same for all rows of a call.

    Attributes:
      sm_scale: factor on q . k.
      window: a query at position p sees the keys at positions > p - window; None = all of them.
      soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None = off.
    """

    sm_scale: float
    window: int | None = None
    soft_cap: float | None = None
