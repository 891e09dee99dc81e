"""The oracle's answer for large steps: a row and all its heads at once, in float64 NumPy."""

import jax
import numpy as np
from helpers.attention_cases import AttentionCase

from kernels_pallas.reference import write_kv_reference


def row_oracle(
    case: AttentionCase,
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | jax.Array | None = None,
) -> np.ndarray:
    """What `paged_attention_reference` gives, hundreds of times faster."""
    k, v = (np.asarray(blocks) for blocks in case.pool.layer_kv(case.layer))
    metadata = case.metadata
    k, v = write_kv_reference(
        k, v, np.asarray(case.k_new), np.asarray(case.v_new), np.asarray(metadata.slot_mapping)
    )
    q = np.asarray(case.q, np.float64)
    out, start, group = np.zeros(q.shape), 0, q.shape[1] // k.shape[1]
    lens = np.stack([metadata.q_lens, metadata.kv_lens], axis=1).tolist()
    for (q_len, kv_len), table in zip(lens, np.asarray(metadata.block_tables), strict=True):
        if q_len == 0:
            continue
        keys, values = (_keys_of_row(x, table, kv_len, group) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", q[start : start + q_len], keys) * sm_scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        behind = np.arange(kv_len - q_len, kv_len)[:, None] - np.arange(kv_len)
        is_visible = (behind >= 0) & (behind < (window or kv_len))
        scores = np.where(is_visible, scores, -np.inf)
        if sinks is not None:
            sink = np.broadcast_to(
                np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1)
            )
            scores = np.concatenate([scores, sink], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True))[..., :kv_len]
        out[start : start + q_len] = np.einsum("hqk,khd->qhd", weights, values)
        start += q_len
    return out


def _keys_of_row(blocks: np.ndarray, table: np.ndarray, kv_len: int, group: int) -> np.ndarray:
    """float64 [kv_len, query heads, head_dim]; what a window left behind is 0 where it is NaN."""
    positions = np.arange(kv_len)
    block_size = blocks.shape[2]
    keys = blocks[table[positions // block_size], :, positions % block_size].astype(np.float64)
    return np.repeat(np.nan_to_num(keys), group, axis=1)
