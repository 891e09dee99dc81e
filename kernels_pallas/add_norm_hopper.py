"""A sum of parts, and its RMS norm, in one kernel for Hopper GPUs, Pallas Mosaic GPU.

A program takes a row: all that it reads is on its way at once. XLA needs two kernels from 32 rows
on, which wait for each other's launch and memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from kernels_pallas.hopper_parts import WARPGROUP, interpreted_options, split_off
from kernels_pallas.metadata import Shaped

MAX_ROWS = 64
MAX_PER_THREAD = 64  # elements of a row: sums stay in registers


def can_add_norm(x: Shaped, parts: Shaped) -> bool:
    """Whether the kernel takes these arrays: few rows, float32, that fill whole warpgroups."""
    num_rows, size = x.shape
    is_wide = x.dtype == parts.dtype == jnp.float32
    fits = size % WARPGROUP == 0 and size <= MAX_PER_THREAD * WARPGROUP
    return is_wide and fits and num_rows <= MAX_ROWS


# why jitted: all norms of a step share one compiled kernel
@functools.partial(jax.jit, static_argnames=("eps", "num_terms", "interpret"))
def add_norm(
    x: Float32[Array, "num_rows size"],
    parts: Float32[Array, "num_parts num_rows size"],
    scale: Float[Array, " size"],
    eps: float,
    *,
    num_terms: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float32[Array, "num_rows size"], Float[Array, "num_terms num_rows size"]]:
    """x + all parts, and its `norm_rope.rms_norm` in terms (`terms.py`) of the type of `scale`.

    Args:
      x, parts: `can_add_norm` must hold.
      interpret: run on the CPU.
    """
    num_rows, size = x.shape
    kernel = plgpu.kernel(
        functools.partial(_add_norm_row, eps=eps),
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((num_terms, num_rows, size), scale.dtype),
        ),
        grid=(num_rows,),
        grid_names=("row",),
        kernel_name="add_norm",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **interpreted_options(interpret),
    )
    return kernel(x, parts, scale)


def _add_norm_row(
    x_ref,  # f32[num_rows, size] GMEM
    parts_ref,  # f32[num_parts, num_rows, size] GMEM
    scale_ref,  # [size] GMEM
    sum_ref,  # f32[num_rows, size] GMEM
    terms_ref,  # [num_terms, num_rows, size] GMEM
    *,
    eps: float,
):
    row, size = lax.axis_index("row"), x_ref.shape[1]
    per_thread = size // WARPGROUP
    vec_size = next(n for n in (4, 2, 1) if per_thread % n == 0)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vec_size)

    def load(ref):
        return plgpu.load(ref, layout=layout)

    x, scale = load(x_ref.at[row]), load(scale_ref)
    parts = [load(parts_ref.at[part, row]) for part in range(parts_ref.shape[0])]
    total = x + functools.reduce(jnp.add, parts)
    sum_ref[row] = total
    mean_square = (total * total).sum() / size
    rest = total * lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)
    for term in range(terms_ref.shape[0]):
        rounded, rest = split_off(rest, terms_ref.dtype)
        terms_ref[term, row] = rounded
