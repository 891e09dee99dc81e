"""Two kinds of checks, apart: shapes and types while tracing, values on the host.

The static ones run in every call of `ops`. The value checks are for tests and debugging: nothing
on the device looks at ids (JAX clips an index that is out of range, silently).
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_pallas.metadata import AttentionMetadata, AttentionOptions, Shaped
from kernels_pallas.pool import KVPool
from kernels_pallas.tuning import AttentionTuning, HopperTuning, TPUTuning


def check_attention(
    q: Shaped,
    k_new: Shaped,
    v_new: Shaped,
    pool: KVPool,
    layer: int | Array,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Array | None,
    tuning: AttentionTuning | HopperTuning | TPUTuning,
) -> None:
    """Raises ValueError unless the arguments of `ops.paged_attention` fit each other."""
    _check_rank("q", q, 3)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = pool.num_kv_heads
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    if head_dim != pool.head_dim:
        raise ValueError(f"{head_dim=} of q must be {pool.head_dim=}")
    for name, array in (("k_new", k_new), ("v_new", v_new)):
        _check_shape(name, array, (num_tokens, num_kv_heads, head_dim))
        if array.dtype != pool.dtype:
            raise ValueError(f"{name}.dtype={array.dtype} must be {pool.dtype=}")
    if isinstance(layer, int) and not 0 <= layer < pool.num_layers:
        raise ValueError(f"{layer=} must be in 0 .. {pool.num_layers - 1}")
    _check_metadata(metadata, num_tokens)
    _check_options(options)
    if sinks is not None:
        _check_shape("sinks", sinks, (num_q_heads,))
        if sinks.dtype != jnp.float32:
            raise ValueError(f"{sinks.dtype=} must be float32")
    _check_tiles(tuning, pool)


def check_operand(x: Shaped) -> None:
    """Raises ValueError unless this can be multiplied by weights: in one term or two."""
    _check_rank("x", x, 3)
    if x.shape[0] not in (1, 2):
        raise ValueError(f"x.shape={x.shape} must begin with 1 or 2 terms")


def check_copy(sources: Array, destinations: Array) -> None:
    """Raises ValueError unless the arguments of `ops.copy_blocks` fit each other."""
    _check_rank("sources", sources, 1)
    _check_shape("destinations", destinations, sources.shape)
    _check_int32({"sources": sources, "destinations": destinations})


def _check_metadata(metadata: AttentionMetadata, num_tokens: int) -> None:
    _check_rank("block_tables", metadata.block_tables, 2)
    num_rows = metadata.num_rows
    _check_shape("q_lens", metadata.q_lens, (num_rows,))
    _check_shape("kv_lens", metadata.kv_lens, (num_rows,))
    _check_shape("slot_mapping", metadata.slot_mapping, (num_tokens,))
    _check_shape("num_decode_rows", metadata.num_decode_rows, ())
    if num_tokens < num_rows:
        raise ValueError(f"{num_tokens=} must be at least {num_rows=}")
    _check_int32(vars(metadata))


def _check_options(options: AttentionOptions) -> None:
    if not (math.isfinite(options.sm_scale) and options.sm_scale > 0):
        raise ValueError(f"{options.sm_scale=} must be finite and above 0")
    if options.window is not None and options.window < 1:
        raise ValueError(f"{options.window=} must be at least 1, or None")
    if options.soft_cap is not None and not (
        math.isfinite(options.soft_cap) and options.soft_cap > 0
    ):
        raise ValueError(f"{options.soft_cap=} must be finite and above 0, or None")


def _check_tiles(tuning: AttentionTuning | HopperTuning | TPUTuning, pool: KVPool) -> None:
    if isinstance(tuning, AttentionTuning):
        if tuning.kv_tile % pool.block_size:
            raise ValueError(f"{tuning.kv_tile=} must be a multiple of {pool.block_size=}")
        return
    if isinstance(tuning, HopperTuning):
        for phase in (tuning.decode, tuning.prefill):
            if phase.kv_tile % pool.block_size and pool.block_size % phase.kv_tile:
                raise ValueError(f"{phase.kv_tile=} and {pool.block_size=} do not divide")
        return
    for phase in (tuning.decode, tuning.prefill):
        if phase.fetch % pool.block_size:
            raise ValueError(f"{phase.fetch=} must be a multiple of {pool.block_size=}")
    if pool.num_kv_heads % tuning.head_groups:
        raise ValueError(f"{pool.num_kv_heads=} must be a multiple of {tuning.head_groups=}")


def _check_rank(name: str, array: Shaped, rank: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"{name}.shape={array.shape} must have {rank} axes")


def _check_shape(name: str, array: Shaped, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}.shape={array.shape} must be {shape}")


def _check_int32(arrays: Mapping[str, Array]) -> None:
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={array.dtype} must be int32")


def check_values(
    metadata: AttentionMetadata, *, num_blocks: int, block_size: int, window: int | None = None
) -> None:
    """Raises ValueError unless a step's metadata, read back to the host, holds together.

    Args:
      num_blocks: usable blocks; ids go up to it.
      window: the narrowest window that all layers have; blocks before it may be the null block.
    """
    tables, q_lens, kv_lens, slots = (
        np.asarray(array)
        for array in (
            metadata.block_tables,
            metadata.q_lens,
            metadata.kv_lens,
            metadata.slot_mapping,
        )
    )
    _check_lengths(q_lens, kv_lens, int(metadata.num_decode_rows), len(slots))
    if tables.min() < 0 or tables.max() > num_blocks:
        raise ValueError(f"block ids {tables.min()} .. {tables.max()}: {num_blocks=}")
    expected = []
    for row, (q_len, kv_len) in enumerate(zip(q_lens.tolist(), kv_lens.tolist(), strict=True)):
        num_used = -(-kv_len // block_size)
        if num_used > tables.shape[1]:
            raise ValueError(f"{row=} with {kv_len=} needs {num_used} blocks: {tables.shape=}")
        first = 0 if window is None else max(0, kv_len - q_len - window + 1)
        if (tables[row, first // block_size : num_used] == 0).any():
            raise ValueError(f"{row=} with {q_len=} and {kv_len=} reads the null block")
        positions = np.arange(kv_len - q_len, kv_len)
        expected += (
            tables[row, positions // block_size] * block_size + positions % block_size
        ).tolist()
    _check_slots(slots, expected, block_size)


def _check_lengths(
    q_lens: np.ndarray, kv_lens: np.ndarray, num_decode_rows: int, num_tokens: int
) -> None:
    num_rows = len(q_lens)
    if (q_lens < 0).any() or (kv_lens < q_lens).any():
        raise ValueError(f"{q_lens=} must be at least 0 and at most {kv_lens=}")
    is_real = q_lens > 0
    if (kv_lens[~is_real] != 0).any() or (is_real[1:] & ~is_real[:-1]).any():
        raise ValueError(f"padded rows must come last, with {kv_lens=} 0 as {q_lens=}")
    if not 0 <= num_decode_rows <= num_rows or (q_lens[:num_decode_rows] != 1).any():
        raise ValueError(f"{num_decode_rows=} leading rows must have 1 token: {q_lens=}")
    if q_lens.sum() > num_tokens:
        raise ValueError(f"{q_lens=} must sum to at most {num_tokens=}")
    if num_tokens == num_rows and (q_lens > 1).any():
        raise ValueError(f"{num_tokens=} equal to {num_rows=} means 1 token a row: {q_lens=}")


def _check_slots(slots: np.ndarray, expected: list[int], block_size: int) -> None:
    """`expected` are the slots of the real tokens, in order; padding follows them."""
    real, padding = slots[: len(expected)], slots[len(expected) :]
    if real.tolist() != expected:
        raise ValueError(f"slot_mapping {real.tolist()} must be {expected}, as the tables have it")
    if len(set(expected)) < len(expected):
        raise ValueError(f"two tokens write into one slot: slot_mapping {expected}")
    if ((padding < 0) | (padding >= block_size)).any():
        raise ValueError(f"slots {padding.tolist()} of padding must be in the null block")
