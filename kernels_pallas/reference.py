"""The oracle: paged attention in float64 NumPy, one query and one head at a time.

It shares nothing with the rest, not even the pool's layout: it takes one layer's K and V indexed
by block id. Slow on purpose; read it to learn what the operation means.
"""

import math

import numpy as np


def write_kv_reference(
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    k_new: np.ndarray,
    v_new: np.ndarray,
    slot_mapping: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """New arrays with every token's K and V in its slot.

    Args:
      k_blocks: [num_blocks + 1, num_kv_heads, block_size, head_dim]; `v_blocks` likewise.
      k_new: [num_tokens, num_kv_heads, head_dim]; `v_new` likewise.
      slot_mapping: [num_tokens].
    """
    k_blocks, v_blocks = k_blocks.copy(), v_blocks.copy()
    block_size = k_blocks.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        k_blocks[block, :, offset] = k_new[token]
        v_blocks[block, :, offset] = v_new[token]
    return k_blocks, v_blocks


def paged_attention_reference(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    block_tables: np.ndarray,
    q_lens: np.ndarray,
    kv_lens: np.ndarray,
    *,
    sm_scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attention of every token over its row's keys; the new K and V are in the blocks already.

    Args:
      q: [num_tokens, num_q_heads, head_dim]; query head h reads KV head
        h // (num_q_heads // num_kv_heads).
      k_blocks: [num_blocks + 1, num_kv_heads, block_size, head_dim]; `v_blocks` likewise.
      block_tables, q_lens, kv_lens, sm_scale, window, soft_cap: as in `metadata.py`.
      sinks: [num_q_heads] or None.

    Returns:
      float64 [num_tokens, num_q_heads, head_dim]; zeros for padding tokens.
    """
    num_q_heads = q.shape[1]
    queries_per_kv_head = num_q_heads // k_blocks.shape[1]
    out = np.zeros(q.shape, np.float64)
    token = 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens.tolist(), kv_lens.tolist(), strict=True)):
        for position in range(kv_len - q_len, kv_len):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_q_heads):
                out[token, head] = _attend(
                    q[token, head].astype(np.float64),
                    k_blocks[:, head // queries_per_kv_head],
                    v_blocks[:, head // queries_per_kv_head],
                    block_tables[row],
                    range(first, position + 1),
                    sm_scale,
                    soft_cap,
                    None if sinks is None else float(sinks[head]),
                )
            token += 1
    return out


def _attend(
    q: np.ndarray,
    k_blocks: np.ndarray,
    v_blocks: np.ndarray,
    block_table: np.ndarray,
    positions: range,
    sm_scale: float,
    soft_cap: float | None,
    sink: float | None,
) -> np.ndarray:
    """One query of one head over the keys at `positions`."""
    block_size = k_blocks.shape[1]
    scores, values = [], []
    for position in positions:
        block, offset = block_table[position // block_size], position % block_size
        score = float(np.dot(q, k_blocks[block, offset].astype(np.float64))) * sm_scale
        if soft_cap is not None:
            score = soft_cap * math.tanh(score / soft_cap)
        scores.append(score)
        values.append(v_blocks[block, offset].astype(np.float64))
    largest = max(scores if sink is None else [*scores, sink])
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - largest))
    out = np.zeros(q.shape, np.float64)
    for weight, value in zip(weights, values, strict=True):
        out += weight / total * value
    return out
