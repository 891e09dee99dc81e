"""x @ w for the few rows of a decode step on Hopper GPUs, Pallas Mosaic GPU; x may have two terms.

The time is what reading the weights takes, if enough of them are on their way at any moment. A
program multiplies all rows by a tile of columns: one warpgroup streams rows and weights through a
ring of TMA boxes, the other multiplies. Where tiles are too few for all multiprocessors, several
programs share a tile's inner axis; their sums stay apart, float32, for whoever reads them adds them
up together with what it does anyway (a residual, a norm).

Results stand columns by rows: the matrix unit reads 64 columns of the weights once for all rows of
x, terms (see `terms.py`) below each other, and works no more than there are rows. With rows first
it would work for 64 of them, and read them, and the weights once more for each term: from shared
memory, whose rate is not much above what the weights come in at.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.hopper_parts import (
    interpreted_options,
    mma_accumulator,
    split_off,
    store_transposed,
    swizzled_smem,
)
from kernels_pallas.metadata import Shaped

STEP = 64  # of the inner axis, and columns: one swizzle pattern
MAX_ROWS = 64  # of terms
WIDE_ROWS = 64  # of terms: where tiles outnumber multiprocessors, fewer of them read so many rows


@dataclass(frozen=True)
class ProductTiling:
    """How a product is cut.

    Attributes:
      tile: columns of a program; of a gated product, as many gates and their ups.
      split: programs that share the inner axis.
      stages: STEPs of the inner axis in shared memory.
    """

    tile: int
    split: int
    stages: int


def can_multiply(x: Shaped, w: Shaped, *, is_gated: bool = False) -> bool:
    """Whether the kernel takes these arrays: `[num_terms, num_rows, inner]` and weights."""
    num_terms, num_rows, inner = x.shape
    columns = w.shape[1] // (2 if is_gated else 1)
    return (
        x.dtype == w.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and num_rows % 8 == 0
        and 0 < num_terms * num_rows <= MAX_ROWS
        and inner % STEP == 0
        and columns % STEP == 0
    )


def product_tiling(x: Shaped, columns: int, *, is_gated: bool, num_programs: int) -> ProductTiling:
    """What was fastest on an H200 for the shapes of docs/performance.md.

    Args:
      x: `[num_terms, num_rows, inner]`.
      columns: of the result.
      num_programs: multiprocessors.
    """
    num_terms, num_rows, inner = x.shape
    tiles, num_x_rows = columns // STEP, num_terms * num_rows
    if is_gated:  # few stages: two programs fit on a multiprocessor
        return ProductTiling(STEP, 1, 4)
    if tiles > num_programs and num_x_rows >= WIDE_ROWS and columns % (2 * STEP) == 0:
        return ProductTiling(2 * STEP, 1, 6)
    split = max(1, min(round(num_programs / tiles), inner // STEP))
    return ProductTiling(STEP, split, 8 if tiles * split <= num_programs else 6)


def product(
    x: Float[Array, "num_terms num_rows inner"],
    w: Float[Array, "inner num_columns"],
    tiling: ProductTiling,
    out_dtype: DTypeLike,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "split num_rows num_columns"]:
    """x @ w.

    Args:
      x, w: see `can_multiply`.
      interpret: run on the CPU.

    Returns:
      Sums over each program's share of the inner axis, float32, to be added up; of `out_dtype`
      where the axis is not shared.
    """
    out_type = jax.ShapeDtypeStruct(
        (tiling.split, x.shape[1], w.shape[1]), out_dtype if tiling.split == 1 else jnp.float32
    )
    return _run(x, w, tiling, out_type, ups_begin=None, interpret=interpret)


def gated_product(
    x: Float[Array, "num_terms num_rows inner"],
    w: Float[Array, "inner num_columns"],
    tiling: ProductTiling,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "num_terms num_rows half_of_num_columns"]:
    """silu(gate) * up of x @ w, where gates are the first half of its columns; in as many terms.

    Args:
      x, w: see `can_multiply`.
      tiling: not split.
      interpret: run on the CPU.
    """
    columns = w.shape[1] // 2
    out_type = jax.ShapeDtypeStruct((*x.shape[:2], columns), x.dtype)
    return _run(x, w, tiling, out_type, ups_begin=columns, interpret=interpret)


def _run(
    x: Array,
    w: Array,
    tiling: ProductTiling,
    out_type: jax.ShapeDtypeStruct,
    *,
    ups_begin: int | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> Array:
    num_terms, num_rows, inner = x.shape
    num_matrices = 1 if ups_begin is None else 2
    kernel = plgpu.kernel(
        functools.partial(_program, tiling=tiling, num_terms=num_terms, ups_begin=ups_begin),
        out_type=out_type,
        grid=(out_type.shape[2] // tiling.tile, tiling.split),
        grid_names=("tile", "share"),
        kernel_name=f"product_{inner}x{w.shape[1]}",
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(
            swizzled_smem((tiling.stages, num_terms * num_rows, STEP), x.dtype),
            swizzled_smem((tiling.stages, num_matrices, STEP, tiling.tile), x.dtype),
            plgpu.SMEM((num_rows, tiling.tile), out_type.dtype),
            plgpu.Barrier(num_arrivals=1 + num_matrices, num_barriers=tiling.stages),
            plgpu.Barrier(num_barriers=tiling.stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **interpreted_options(interpret),
    )
    # why a barrier: XLA hands a kernel part of an array in place, here of the attention's output
    return kernel(lax.optimization_barrier(x.reshape(-1, inner)), w)


def _program(
    x_ref,  # [num_terms * num_rows, inner] GMEM
    w_ref,  # [inner, num_columns] GMEM
    out_ref,  # [split or num_terms, num_rows, columns] GMEM
    x_sm,  # [stages, num_terms * num_rows, STEP] SMEM
    w_sm,  # [stages, 1 or gates and ups, STEP, tile] SMEM
    out_sm,  # [num_rows, tile] SMEM
    there,
    read,
    *,
    tiling: ProductTiling,
    num_terms: int,
    ups_begin: int | None,  # a column; None: not gated
):
    num_rows, stages = out_ref.shape[1], jnp.int32(tiling.stages)
    share, first_column = lax.axis_index("share"), lax.axis_index("tile") * tiling.tile
    num_steps, split = x_ref.shape[1] // STEP, jnp.int32(tiling.split)
    begin = lax.div(share * num_steps, split)
    total = lax.div((share + 1) * num_steps, split) - begin
    offsets = (0,) if ups_begin is None else (0, ups_begin)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _load():
        @pl.loop(0, total)
        def _(i):
            slot, inner = lax.rem(i, stages), pl.ds((begin + i) * STEP, STEP)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(read.at[slot]))
            for matrix, offset in enumerate(offsets):
                columns = pl.ds(first_column + offset, tiling.tile)
                plgpu.copy_gmem_to_smem(
                    w_ref.at[inner, columns], w_sm.at[slot, matrix], there.at[slot]
                )
            plgpu.copy_gmem_to_smem(x_ref.at[:, inner], x_sm.at[slot], there.at[slot])

    def write(values, place):
        store_transposed(out_sm, values)
        plgpu.commit_smem()
        columns = pl.ds(first_column, tiling.tile)
        plgpu.copy_smem_to_gmem(out_sm, out_ref.at[place, :, columns])

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _multiply():
        def add_up(*accs):
            @pl.loop(0, total)
            def _(i):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(there.at[slot])
                for matrix, acc in enumerate(accs):
                    weights, rows = w_sm.at[slot, matrix], x_sm.at[slot]
                    plgpu.wgmma(acc, weights.transpose((1, 0)), rows.transpose((1, 0)))
                plgpu.wgmma_wait(len(accs))
                # The products before these have read their operands.
                pl.when((i > 0) & (i - 1 + stages < total))(
                    lambda: plgpu.barrier_arrive(read.at[lax.rem(i - 1, stages)])
                )

            return tuple(sum_of_terms(acc[...]) for acc in accs)

        def sum_of_terms(products):
            if num_terms == 1:
                return products
            return products[:, :num_rows] + products[:, num_rows:]

        accumulator = mma_accumulator(tiling.tile, num_terms * num_rows)
        sums = pl.run_scoped(add_up, *[accumulator] * len(offsets))
        if ups_begin is None:
            write(sums[0].astype(out_sm.dtype), share)
        else:
            rest = _gated(*sums)
            for term in range(num_terms):
                if term:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                rounded, rest = split_off(rest, out_sm.dtype)
                write(rounded, term)
        plgpu.wait_smem_to_gmem(0)


def _gated(gate, up):
    return gate / (1.0 + jnp.exp(-gate)) * up
