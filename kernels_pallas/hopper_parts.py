"""What the Hopper kernels share. Scores are in base 2 everywhere, so that weights are exp2."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.metadata import AttentionOptions

LOG2E = math.log2(math.e)
NEVER = -1e30  # below every score, and finite: -inf less NEVER is -inf, never NaN
SMALL = 1e-30  # what rows that saw no key divide their zeros by
WARPGROUP = 128  # threads
MMA_ROWS = 64  # of one warpgroup's matrix instruction


def mma_accumulator(rows: int, columns: int) -> plgpu.WGMMAAccumulatorRef:
    """Registers that a matrix instruction adds up in, float32."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def swizzled_smem(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory in the layout that the matrix unit reads and a TMA box writes.

    Args:
      shape: the last axis has 64 bytes, or a multiple of 128.
    """
    itemsize = jnp.dtype(dtype).itemsize
    columns = min(shape[-1], 128 // itemsize)
    # pyright takes JAX's transforms for abstract.
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, columns)), swizzle(itemsize * columns)))


def interpreted_options(interpret: plgpu.InterpretGPUParams | None) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` that run it on the CPU; none to run it on the device."""
    return {} if interpret is None else {"interpret": interpret}


def store_slowly(ref, values) -> None:
    """Stores registers in shared memory that is not laid out for them."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, which otherwise refuses such a store
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def split_off(values, dtype: jnp.dtype):
    """(the first term of values, what it leaves for the next): see `terms.in_terms`."""
    rounded = values.astype(dtype)
    return rounded, values - rounded.astype(values.dtype)


def transposed(values):
    """The same values, in registers that make for stores into a transposed array."""
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)


def store_transposed(ref, values) -> None:
    """Stores registers in shared memory whose axes are the other way round, unswizzled."""
    store_slowly(ref.transpose((1, 0)), transposed(values))


def kv_boxes(tables_ref, row, tile, first_row, block_size: int, kv_tile: int):
    """(pool row, offset, size) of each part of a KV tile that one TMA box can take."""
    size, last = block_size, tables_ref.shape[1] - 1  # a tile may reach past the table
    if size >= kv_tile:
        position = tile * kv_tile
        block = tables_ref[row, jnp.minimum(lax.div(position, jnp.int32(size)), last)]
        return [(first_row + block, lax.rem(position, jnp.int32(size)), kv_tile)]
    width = kv_tile // size
    idxs = [jnp.minimum(tile * width + j, last) for j in range(width)]
    return [(first_row + tables_ref[row, idx], 0, size) for idx in idxs]


def capped_scores(scores, options: AttentionOptions):
    """(scores, factor that makes them base-2 scores): the factor is left for a fused multiply."""
    if options.soft_cap is None:
        return scores, options.sm_scale * LOG2E
    capped = jnp.tanh(scores * (options.sm_scale / options.soft_cap))
    return capped, options.soft_cap * LOG2E


def is_wide(head_dim: int) -> bool:
    """Whether the output's accumulator takes half of a thread's registers: little else fits."""
    return head_dim > 128


def part_size(head_dim: int) -> int:
    """Columns that are moved through registers at once, of values other than the accumulator."""
    return 64 if is_wide(head_dim) else head_dim


def column_parts(head_dim: int) -> list[Any]:
    """Slices of `part_size` columns that cover a head."""
    size = part_size(head_dim)
    return [pl.ds(begin, size) for begin in range(0, head_dim, size)]


def clear_invisible(v_sm, low, high):
    """Zeros where no query looks: a weight of 0 does not hide NaN."""
    for columns in column_parts(v_sm.shape[1]):
        part = v_sm.at[:, columns]
        key = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
        v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where((key >= low) & (key < high), v, jnp.zeros_like(v))
    plgpu.commit_smem()
