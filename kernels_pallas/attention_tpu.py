"""Paged attention on a TPU: operands as the kernels want them, and who computes which rows.

    rows     | decode rows              | other rows                         | padded |
    write    | in the decode kernel     | write_kv_tpu, before the attention |        |
    attend   | attention_tpu_decode     | attention_tpu_prefill              | zeros  |

Both kernels stream the pool's blocks through `attention_tpu_tiles`.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.attention_tpu_decode import decode
from kernels_pallas.attention_tpu_prefill import find_pairs, prefill
from kernels_pallas.attention_tpu_tiles import LANES
from kernels_pallas.metadata import AttentionMetadata, AttentionOptions, Shaped
from kernels_pallas.pool import KVPool
from kernels_pallas.tuning import (
    TPU_GENERATIONS,
    TPUPhaseTuning,
    TPUTuning,
    default_tpu_tuning,
    phase_vmem_bytes,
    shrink_to,
)
from kernels_pallas.write_kv_tpu import write_prefill_kv

_DTYPES = (jnp.float32, jnp.bfloat16)
# Lengths, starts, and the pairs and units that a row can begin.
_SCALARS_PER_ROW = 12
# For what the compiler spills and for the write's staging.
_VMEM_SLACK_BYTES = 4 * 2**20


def unsupported(q: Shaped, pool: KVPool, *, interpreted: bool) -> list[str]:
    """Every reason why the kernels cannot take these arrays."""
    reasons = []
    if q.dtype not in _DTYPES:
        reasons.append(f"q.dtype={q.dtype.name} is not float32 or bfloat16")
    if q.dtype != pool.dtype:
        reasons.append(f"q.dtype={q.dtype.name} is not pool.dtype={pool.dtype.name}")
    if pool.data.shape[4] % LANES:
        reasons.append("the pool has not the layout of the TPU kernels")
    # The interpreter's memory has no tiles: small blocks keep tests small.
    unit = _sublanes(pool.dtype)
    if pool.block_size % unit and not interpreted:
        reasons.append(f"{pool.block_size=} is not a multiple of {unit}")
    return reasons


def tuning_for(q: Float[Array, "num_tokens num_q_heads head_dim"], pool: KVPool) -> TPUTuning:
    """The default tiles for these arrays on the device that the program is for."""
    _, planes, num_kv_heads, block_size, lanes = pool.data.shape
    return default_tpu_tuning(
        _device_kind(),
        token_bytes=planes * num_kv_heads * lanes * pool.dtype.itemsize,
        num_kv_heads=num_kv_heads,
        group=q.shape[1] // num_kv_heads,
        block_size=block_size,
    )


def paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    v_new: Float[Array, "num_tokens num_kv_heads head_dim"],
    pool: KVPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: Float32[Array, " num_q_heads"] | None,
    tuning: TPUTuning,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVPool]:
    """See `ops.paged_attention`.

    Args:
      interpret: False, or `pltpu.InterpretParams`.
    """
    _check_scalar_memory(metadata)
    max_tokens = metadata.block_tables.shape[1] * pool.block_size
    tuning = replace(
        tuning,
        decode=shrink_to(tuning.decode, max_tokens, pool.block_size),
        prefill=shrink_to(tuning.prefill, max_tokens, pool.block_size),
    )
    num_tokens, num_rows = q.shape[0], metadata.num_rows
    call = _Call(pool, pool.first_row(layer), metadata, options, sinks, tuning, interpret)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None, None]
    if metadata.is_decode_step:
        # One token a row at most, and real rows come first.
        num_real = jnp.sum(metadata.q_lens, dtype=jnp.int32)
        out, data = call.decode(q, k_new, v_new, pool.data, num_real)
        return jnp.where(token < num_real, out, 0), replace(pool, data=data)
    num_decode_rows = metadata.num_decode_rows
    data = write_prefill_kv(
        pool,
        call.first_row,
        k_new,
        v_new,
        metadata,
        write_unit=_write_unit(pool),
        interpret=interpret,
    )
    decoded, data = call.decode(
        q[:num_rows], k_new[:num_rows], v_new[:num_rows], data, num_decode_rows
    )
    out = call.prefill(q, data)
    decoded = jnp.pad(decoded, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    out = jnp.where(token < num_decode_rows, decoded, out)
    return jnp.where(token < metadata.cu_q_lens[-1], out, 0), replace(pool, data=data)


class _Call:
    """The arguments of one call that both kernels take, and how arrays are laid out for them."""

    def __init__(
        self,
        pool: KVPool,
        first_row: Array,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Array | None,
        tuning: TPUTuning,
        interpret: Any,
    ):
        self.pool = pool
        self.first_row = first_row
        self.metadata = metadata
        self.options = options
        self.sinks = sinks
        self.tuning = tuning
        self.interpret = interpret
        self.tables = metadata.block_tables.reshape(-1)
        self.lanes = pool.data.shape[4]

    def decode(
        self, q: Array, k_new: Array, v_new: Array, data: Array, num_rows: Array
    ) -> tuple[Array, Array]:
        """The first `num_rows` rows, one token each."""
        phase = self.tuning.decode
        group = q.shape[1] // self.pool.num_kv_heads
        # Whole register tiles of query rows; whole grid steps of rows.
        missing_queries = -group % _sublanes(q.dtype)
        missing_rows = -q.shape[0] % phase.queries
        heads = self._by_kv_head(q)
        heads = jnp.pad(heads, ((0, missing_rows), (0, 0), (0, missing_queries), (0, 0)))
        new_kv = self.pool.pack(k_new[:, :, None], v_new[:, :, None])
        new_kv = jnp.pad(new_kv, ((0, missing_rows), *[(0, 0)] * 4))
        sinks = self._spread_sinks(lambda sinks: jnp.pad(sinks, ((0, 0), (0, missing_queries))))
        tables = jnp.pad(self.metadata.block_tables, ((0, missing_rows), (0, 0)))
        out, data = decode(
            heads.swapaxes(0, 1),
            new_kv,
            data,
            sinks,
            jnp.stack([self.first_row, num_rows]),
            jnp.pad(self.metadata.kv_lens, (0, missing_rows)),
            tables.reshape(-1),
            options=self.options,
            tuning=phase,
            write_unit=_write_unit(self.pool),
            head_groups=self.tuning.head_groups,
            vmem_limit_bytes=self._vmem_limit(phase, heads.shape[2], phase.queries),
            interpret=self.interpret,
        )
        return self._to_tokens(out.swapaxes(0, 1)[: q.shape[0], :, :group], q), data

    def prefill(self, q: Array, data: Array) -> Array:
        """All rows after the decode rows; anything in other tokens."""
        num_tokens, q_tile = q.shape[0], self.tuning.prefill.queries
        num_kv_heads, group = self.pool.num_kv_heads, q.shape[1] // self.pool.num_kv_heads
        num_tiles = -(-num_tokens // q_tile)
        heads = self._by_kv_head(q)
        missing = num_tiles * q_tile - num_tokens
        heads = jnp.pad(heads, ((0, missing), *[(0, 0)] * 3))
        heads = heads.reshape(num_tiles, q_tile, num_kv_heads, group, self.lanes)
        heads = heads.transpose(2, 0, 3, 1, 4)
        pairs = find_pairs(self.metadata, q_tile, num_tiles)
        out = prefill(
            heads.reshape(num_kv_heads, num_tiles, group * q_tile, self.lanes),
            data,
            self._spread_sinks(lambda sinks: jnp.repeat(sinks, q_tile, axis=1)),
            jnp.stack([self.first_row, pairs.num_pairs]),
            pairs,
            self.metadata.cu_q_lens,
            self.metadata.kv_lens,
            self.tables,
            options=self.options,
            tuning=self.tuning.prefill,
            head_groups=self.tuning.head_groups,
            vmem_limit_bytes=self._vmem_limit(self.tuning.prefill, group * q_tile, 1),
            interpret=self.interpret,
        )
        out = out.reshape(num_kv_heads, num_tiles, group, q_tile, self.lanes)
        out = out.transpose(1, 3, 0, 2, 4).reshape(-1, num_kv_heads, group, self.lanes)
        return self._to_tokens(out[:num_tokens], q)

    def _vmem_limit(self, phase: TPUPhaseTuning, num_queries: int, num_blocks: int) -> int:
        """What the kernel may take; XLA fills the rest with weights that it fetches ahead."""
        _, planes, num_kv_heads, _, lanes = self.pool.data.shape
        num_heads, itemsize = num_kv_heads // self.tuning.head_groups, self.pool.dtype.itemsize
        needed = phase_vmem_bytes(
            phase,
            token_bytes=planes * num_heads * lanes * itemsize,
            num_heads=num_heads,
            num_queries=num_queries,
            num_blocks=num_blocks,
            lanes=lanes,
            itemsize=itemsize,
        )
        return needed + _VMEM_SLACK_BYTES

    def _by_kv_head(self, q: Array) -> Array:
        """[num_tokens, num_kv_heads, group, lanes]; zeros where V lies beside K, and in padding."""
        num_tokens, num_q_heads, head_dim = q.shape
        num_kv_heads = self.pool.num_kv_heads
        heads = q.reshape(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
        return jnp.pad(heads, (*[(0, 0)] * 3, (0, self.lanes - head_dim)))

    def _to_tokens(self, out: Array, q: Array) -> Array:
        """The lanes of V, head after head."""
        start = self.lanes // 2 if self.pool.is_joined else 0
        return out[..., start : start + q.shape[2]].reshape(q.shape)

    def _spread_sinks(self, arrange: Any) -> Array | None:
        if self.sinks is None:
            return None
        sinks = arrange(self.sinks.reshape(self.pool.num_kv_heads, -1))
        return jnp.broadcast_to(sinks[..., None], (*sinks.shape, LANES))


def max_blocks_per_row(*, num_rows: int, num_tokens: int) -> int:
    """The widest block tables that scalar memory holds, beside lengths and what kernels count with.

    Args:
      num_rows, num_tokens: of the largest step.
    """
    return (_scalar_memory_bytes() // 4 - num_tokens) // num_rows - _SCALARS_PER_ROW


def _check_scalar_memory(metadata: AttentionMetadata) -> None:
    """Raises ValueError where block tables and lengths do not fit beside each other in SMEM."""
    num_rows, width = metadata.block_tables.shape
    if width > max_blocks_per_row(num_rows=num_rows, num_tokens=metadata.num_tokens):
        needed = 4 * (num_rows * (width + _SCALARS_PER_ROW) + metadata.num_tokens)
        raise ValueError(
            f"block tables of {num_rows} rows x {width} blocks need {needed} bytes of scalar "
            f"memory, limit {_scalar_memory_bytes()}: lower max_num_seqs or max_model_len, or "
            "raise block_size"
        )


def _scalar_memory_bytes() -> int:
    return TPU_GENERATIONS.get(_device_kind(), TPU_GENERATIONS["TPU v5 lite"]).smem_bytes


def _write_unit(pool: KVPool) -> int:
    """Tokens of one tile of the pool's memory; all of a block that is smaller."""
    return math.gcd(_sublanes(pool.dtype), pool.block_size)


def _sublanes(dtype: jnp.dtype) -> int:
    """Rows of a whole register tile."""
    return 32 // dtype.itemsize


def _device_kind() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
