"""What the interpreter cannot show, for it has no layouts and no warps: the programs do.

Buffers whose layout Mosaic chooses are stored whole. Its warpgroup lowering gives shared memory
without transforms a layout of its own, swizzled perhaps, and does not heed it where a value goes to
some of the columns alone (JAX 0.11.2, seen on an H200: keys of head_dim 128 were scrambled).

One warpgroup of a program at most reduces across its warps: for that Mosaic has memory which all
warpgroups share (JAX 0.11.2, seen on an H200: two of them took each other's maxima).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import attention_hopper, write_qkv_hopper
from kernels_pallas.metadata import AttentionMetadata, AttentionOptions
from kernels_pallas.norm_rope import HeadNorms, RopeTables
from kernels_pallas.pool import KVPool
from kernels_pallas.terms import num_terms_of


def equations(jaxpr: Any, names: frozenset[str]) -> Iterator[Any]:
    """All equations of these primitives, inner programs' included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in names:
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, names)


def warpgroup_kernels(jaxpr: Any) -> list[Any]:
    """Those in which Mosaic chooses layouts, as something that has equations."""
    kernels = []
    for kernel in equations(jaxpr, frozenset({"mpmd_map", "core_map"})):
        settings = kernel.params["compiler_params"] or plgpu.CompilerParams()
        if settings.lowering_semantics is plgpu.LoweringSemantics.Warpgroup:
            kernels.append(SimpleNamespace(eqns=[kernel]))
    return kernels


def stores(kernel: Any) -> list[Any]:
    """To shared memory."""
    found = equations(kernel, frozenset({"swap", "store"}))
    return [store for store in found if "<smem>" in str(store.invars[0].aval)]


def stores_of_some_columns(jaxpr: Any) -> list[str]:
    """Stores to columns of shared memory whose layout Mosaic chooses."""
    found = []
    for kernel in warpgroup_kernels(jaxpr):
        for store in stores(kernel):
            ref, _, *leaves = store.invars
            transforms = jax.tree.unflatten(store.params["tree"], leaves)
            if not transforms or any("Unswizzle" in type(t).__name__ for t in transforms):
                continue
            indices = [t.indices for t in transforms if hasattr(t, "indices")]
            if not indices:  # turned around at most
                continue
            last = indices[-1][-1]
            if not isinstance(last, pl.Slice) or last.size < ref.aval.shape[-1]:
                found.append(f"{ref.aval} at {last}")
    return found


def kernels_that_mix_maxima(jaxpr: Any) -> list[str]:
    """Kernels with more than a loading and one other warpgroup, that reduce across warps.

    A warp has some of the rows of every matrix, in all layouts that the matrix unit makes.
    """
    found = []
    for kernel in warpgroup_kernels(jaxpr):
        (mesh,) = kernel.eqns[0].params["meshes"]
        reductions = equations(kernel, frozenset({"reduce_max", "reduce_sum", "reduce_min"}))
        axes = [r.params["axes"] for r in reductions if r.invars[0].aval.ndim == 2]
        if (mesh.num_threads or 1) > 2 and any(0 in reduced for reduced in axes):
            found.append(f"{mesh.num_threads} warpgroups reduce {axes}")
    return found


def step_jaxpr(head_dim: int, num_tokens: int, heads_dtype: Any) -> Any:
    """Of the write and both attention kernels, in a step of 8 rows.

    Args:
      heads_dtype: float32 for queries in two terms.
    """
    group, num_kv_heads, num_rows = 4, 2, 8
    metadata = AttentionMetadata(
        block_tables=jnp.zeros((num_rows, 4), jnp.int32),
        q_lens=jnp.ones(num_rows, jnp.int32),
        kv_lens=jnp.ones(num_rows, jnp.int32),
        slot_mapping=jnp.zeros(num_tokens, jnp.int32),
        num_decode_rows=jnp.int32(4),
    )
    pool = KVPool.create(
        num_layers=1,
        num_blocks=4,
        num_kv_heads=num_kv_heads,
        block_size=16,
        head_dim=head_dim,
        dtype=jnp.bfloat16,
        layout="hopper",
    )
    num_terms = num_terms_of(heads_dtype, pool.dtype)
    tuning = attention_hopper.tuning_for(pool, metadata, num_terms)

    def step(heads, q, scale, angles, pool, metadata):
        if head_dim <= 128:
            norms, rope = HeadNorms(scale, scale, 1e-6), RopeTables(angles, angles)
            first_row, slots = pool.first_row(0), metadata.slot_mapping
            _, pool = write_qkv_hopper.write_qkv(
                heads, norms, rope, pool, first_row, slots, q_rows=8
            )
        options = AttentionOptions(sm_scale=0.1)
        return attention_hopper.attend(q, group, pool, 0, metadata, options, None, tuning), pool

    return jax.make_jaxpr(step)(
        jnp.zeros((num_tokens, num_kv_heads, group + 2, head_dim), heads_dtype),
        jnp.zeros(
            (num_terms, num_tokens, num_kv_heads * group, head_dim),
            pool.dtype,
        ),
        jnp.zeros(head_dim, jnp.bfloat16),
        jnp.zeros((num_tokens, head_dim // 2)),
        pool,
        metadata,
    ).jaxpr


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_tokens", [8, 96])
@pytest.mark.parametrize("heads_dtype", [jnp.bfloat16, jnp.float32])
def test_no_kernel_does_what_mosaic_gets_wrong(head_dim, num_tokens, heads_dtype):
    jaxpr = step_jaxpr(head_dim, num_tokens, heads_dtype)
    num_stores = [len(stores(kernel)) for kernel in warpgroup_kernels(jaxpr)]
    # Decode and combine, of which the latter has no shared memory, and prefill.
    assert sum(n > 0 for n in num_stores) == (1 if num_tokens == 8 else 2), num_stores
    assert stores_of_some_columns(jaxpr) == []
    assert kernels_that_mix_maxima(jaxpr) == []


@pytest.mark.parametrize("columns", [pl.ds(64, 64), 3])
@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
def test_such_a_store_is_found(semantics, columns):
    def program(in_ref, out_ref):
        def store(buffer):
            values = plgpu.load(in_ref, layout=plgpu.Layout.WGMMA, optimized=False)
            buffer[:, columns] = values if columns != 3 else values[:, 0]
            plgpu.copy_smem_to_gmem(buffer, out_ref)

        pl.run_scoped(store, plgpu.SMEM((64, 128), jnp.bfloat16))

    kernel = plgpu.kernel(
        program,
        out_type=jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    jaxpr = jax.make_jaxpr(kernel)(jnp.zeros((64, 64), jnp.bfloat16)).jaxpr
    num_found = 1 if semantics is plgpu.LoweringSemantics.Warpgroup else 0
    assert len(stores_of_some_columns(jaxpr)) == num_found


@pytest.mark.parametrize(("num_warpgroups", "axis"), [(3, 0), (3, 1), (2, 0)])
def test_such_a_reduction_is_found(num_warpgroups, axis):
    def program(in_ref, out_ref):
        values = plgpu.load(in_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        out_ref[...] = values.max(axis=axis)

    kernel = plgpu.kernel(
        program,
        out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
    )
    jaxpr = jax.make_jaxpr(kernel)(jnp.zeros((64, 64), jnp.float32)).jaxpr
    is_mixed = num_warpgroups == 3 and axis == 0
    assert len(kernels_that_mix_maxima(jaxpr)) == is_mixed
