"""The step as pure functions state -> state: `forward_step`, then `sample_step`.

Two programs chained on the device, so that shapes and sampling variants add up instead of
multiplying. The host sends one packed vector to the first and reads one small array from the
second. Where a row asks for more, others join the chain: `adjust_step` (adjust.py) and a user's own
function (processors.py) between the two, `top_logprobs` and `score_step` (logprobs.py) after them.
"""

import typing
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxpaged.runner.forward import Hidden, forward
from jaxpaged.runner.inputs import FED_BACK, StepLayout, read_sample_words, sample_words
from jaxpaged.runner.sampling import Variant, sample_tokens
from jaxpaged.runner.weights import Weights
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchState:
    """What the device remembers of the rows between steps; the last row is the null row.

    Attributes:
      token_ids: the token each row drew last.
      block_tables: unused entries are the null block.
    """

    token_ids: Int32[Array, " max_num_seqs+1"]
    block_tables: Int32[Array, "max_num_seqs+1 max_blocks_per_row"]


def update_tables(state: BatchState, updates: Int32[Array, "num_updates 3"]) -> BatchState:
    """Writes (row, position, block id) entries; padding is (null row, 0, null block)."""
    rows, idxs, blocks = updates.T
    tables = state.block_tables.at[rows, idxs].set(blocks, mode="promise_in_bounds")
    return replace(state, block_tables=tables)


def forward_step(
    weights: Weights,
    pool: KVPool,
    state: BatchState,
    packed: Int32[Array, " packed"],
    results: tuple[Array, ...],
    *,
    layout: StepLayout,
    impl: str | None,
) -> tuple[
    Float32[Array, "num_rows vocab"], KVPool, BatchState, Int32[Array, "words num_rows"], Hidden
]:
    """Computes the step's tokens and the logits of the positions that draw.

    Args:
      pool: donated, and so are `state` and `results`.
      packed: laid out by `layout`.
      results: of an earlier step: logits, words, and with prompts what the last layer gave. The
        new ones take their memory, so that a CUDA graph finds its addresses as it left them.

    Returns:
      Logits, pool, state, what the sampler needs, and what the last layer gave for every token of
      a step with prompts (of a decode step: for none).
    """
    del results
    parts = layout.split(packed)
    updates = jnp.stack([parts["update_rows"], parts["update_idxs"], parts["update_blocks"]], 1)
    state = update_tables(state, updates)
    rows, num_decode_rows = parts["rows"], parts["num_decode_rows"][0]
    tables = state.block_tables[rows]
    metadata, positions, row_of_token = _place_tokens(
        tables,
        parts["q_lens"],
        parts["kv_lens"],
        layout.token_ids,
        num_decode_rows,
        pool.block_size,
    )
    fed_back = state.token_ids[rows[row_of_token]]
    token_ids = jnp.where(parts["token_ids"] == FED_BACK, fed_back, parts["token_ids"])
    sources = parts["sample_sources"]
    logit_positions = jnp.maximum(metadata.cu_q_lens[1:][sources] - 1, 0)
    logits, pool, hidden = forward(
        weights, token_ids, positions, pool, metadata, logit_positions, impl=impl
    )
    words = sample_words(
        rows=parts["sample_rows"],
        positions=parts["kv_lens"][sources],
        last_token_ids=token_ids[logit_positions],
        is_decode=sources < num_decode_rows,
        options=parts["sample_options"],
    )
    has_prompts = layout.token_ids > layout.rows
    return logits, pool, state, words, hidden if has_prompts else hidden[:0]


def sample_step(
    logits: Float32[Array, "num_rows vocab"],
    state: BatchState,
    words: Int32[Array, "words num_rows"],
    *,
    variant: Variant,
) -> tuple[Int32[Array, "2 num_rows"], BatchState]:
    """Draws tokens and keeps each in its row's slot, from where the next step takes it.

    Returns:
      The token ids, and below them 1 where the row's logits were fit to draw from.
    """
    inputs = read_sample_words(words)
    token_ids, is_finite = sample_tokens(logits, inputs, variant)
    slots = state.token_ids.at[inputs.rows].set(token_ids, mode="promise_in_bounds")
    return jnp.stack([token_ids, is_finite.astype(jnp.int32)]), replace(state, token_ids=slots)


def _place_tokens(
    tables: Int32[Array, "num_rows max_blocks_per_row"],
    q_lens: Int32[Array, " num_rows"],
    kv_lens: Int32[Array, " num_rows"],
    num_tokens: int,
    num_decode_rows: Int32[Array, ""],
    block_size: int,
) -> tuple[AttentionMetadata, Int32[Array, " num_tokens"], Int32[Array, " num_tokens"]]:
    """Finds each token's row, position and slot; padding tokens get position 0, the null block."""
    ends = jnp.cumsum(q_lens, dtype=jnp.int32)
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    # Counting beats searching on a GPU: a loop would run from the host.
    row_of_token = jnp.sum(ends[None, :] <= token_idx[:, None], axis=1, dtype=jnp.int32)
    row_of_token = jnp.minimum(row_of_token, q_lens.shape[0] - 1)
    is_real = token_idx < ends[-1]
    # A row's last token sits at kv_len - 1, the ones before it to its left.
    positions = jnp.where(is_real, kv_lens[row_of_token] - (ends[row_of_token] - token_idx), 0)
    blocks = tables[row_of_token, positions // block_size]
    slots = jnp.where(is_real, blocks * block_size + positions % block_size, 0)
    metadata = AttentionMetadata(
        block_tables=tables,
        q_lens=q_lens,
        kv_lens=kv_lens,
        slot_mapping=slots,
        num_decode_rows=num_decode_rows,
    )
    return metadata, positions, row_of_token
