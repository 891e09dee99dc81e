"""Programs for an H200 that is not here, compiled from descriptions of the arrays alone."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.executables import Executables
from jaxpaged.runner.sampling import Variant
from jaxpaged.runner.sharding import AXIS_NAME
from jaxpaged.runner.step import BatchState, forward_step, sample_step
from jaxpaged.runner.weight_structure import Parameter, WeightStructure
from jaxpaged.runner.weights import Weights
from kernels_pallas import ops
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool, pool_bytes_per_block

POOL_BYTES = 20 * 2**30
# What the GPU's own XLA client says of it; its form is XLA's GpuTargetConfigProto.
_TARGET_CONFIG = Path(__file__).with_name("h200_target_config.txtpb")
_COPYING = ("copy", "copy-start", "fusion", "transpose", "convert")
_UPDATING = re.compile("scatter|dynamic.update.slice")
_WHOLE = PartitionSpec()
_BLOCK_SIZE = 16
_LAUNCH_FILES = "*.thunk_sequence_after_thunk_passes.txt"


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      pool: ShapeDtypeStruct of its pool's array; None where it has none.
      spill_bytes: stores of spilled registers, of each of our kernels that was assembled.
      registers: the same, registers a thread.
      launches: what the host starts in a run of a step, in XLA's words; None for a lone kernel.
      num_slices: kernels of a step that are handed slices of arguments in place.
      num_unwaited_loops: loops of a step, the host's too, whose condition takes no kernel.
    """

    compiled: jax.stages.Compiled
    seconds: float
    pool: Any
    spill_bytes: tuple[int, ...]
    registers: tuple[int, ...]
    launches: tuple[str, ...] | None = None
    num_slices: int = 0
    num_unwaited_loops: int = 0

    @property
    def pool_bytes(self) -> int:
        return self.pool.size * self.pool.dtype.itemsize

    @property
    def memory(self) -> Any:
        return self.compiled.memory_analysis()

    def pool_copies(self) -> list[str]:
        """Instructions that make an array of the pool's size, other than updates of it.

        These write in place; that they do shows in what is aliased.
        """
        text = self.compiled.as_text()
        assert text is not None
        found = []
        for line in text.splitlines():
            match = re.search(r"= \(?\w+\[([\d,]+)\][^=]*? ([\w-]+)\(", line)
            if match and match[2] in _COPYING and not _UPDATING.search(line.split(" = ")[0]):
                size = int(np.prod([int(axis) for axis in match[1].split(",")]))
                if size * self.pool.dtype.itemsize >= self.pool_bytes:
                    found.append(line.strip()[:100])
        return found


def dump_steps(folder: Path) -> None:
    """Has XLA write what a step launches into `folder`; call it before anything is compiled."""
    names = f"{forward_step.__name__}|{sample_step.__name__}"
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_module_re={names}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"


def _with_launches(program: Program, folder: Path, before: set[Path]) -> Program:
    """Reads the new launch sequence in `folder`; what is in a graph is indented."""
    (file,) = set(folder.glob(_LAUNCH_FILES)) - before
    text = file.read_text()
    num_loops = text.count(": kWhile")
    num_waited = len(re.findall(r"^condition:\s+\d+: kCustomKernel", text, re.MULTILINE))
    assert num_waited <= num_loops, f"XLA has other words for loops in {file}"
    return replace(
        program,
        launches=tuple(re.findall(r"^\d+: (\w+)", text, re.MULTILINE)),
        num_slices=text.count("kDynamicSliceFusion"),
        num_unwaited_loops=num_loops - num_waited,
    )


def h200_mesh() -> Mesh:
    """A mesh of one GPU that is described, not there."""
    description = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET_CONFIG.read_text(), topology="1x1x1"
    )
    return topologies.make_mesh(description, (1,), (AXIS_NAME,))


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one call: a mixed step, or a decode step where tokens are as many as rows.

    Attributes:
      has_wide_queries: queries are float32, whatever the dtype of the pool.
    """

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_wide_queries: bool = False
    num_tokens: int = 512
    num_rows: int = 64
    max_len: int = 4096


def compile_attention(
    mesh: Mesh, shape: AttentionShape, dump_folder: Path, *, donate: bool = True
) -> Program:
    """One call of `ops.paged_attention`."""
    on = partial(_struct, mesh)
    pool = _pool(
        mesh,
        num_layers=1,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    rows, tokens = (shape.num_rows,), (shape.num_tokens,)
    metadata = AttentionMetadata(
        block_tables=on((*rows, shape.max_len // shape.block_size), jnp.int32),
        q_lens=on(rows, jnp.int32),
        kv_lens=on(rows, jnp.int32),
        slot_mapping=on(tokens, jnp.int32),
        num_decode_rows=on((), jnp.int32),
    )
    q_dtype = jnp.float32 if shape.has_wide_queries else shape.dtype
    q = on((*tokens, shape.num_q_heads, shape.head_dim), q_dtype)
    kv = on((*tokens, shape.num_kv_heads, shape.head_dim), shape.dtype)
    sinks = on((shape.num_q_heads,), jnp.float32) if shape.has_sinks else None

    def attend(q, k, v, pool, metadata, sinks):
        return ops.paged_attention(
            q,
            k,
            v,
            pool,
            0,
            metadata,
            sm_scale=shape.head_dim**-0.5,
            window=shape.window,
            soft_cap=shape.soft_cap,
            sinks=sinks,
            impl="hopper",
        )

    jitted = jax.jit(attend, donate_argnums=(3,) if donate else ())

    def compile_it() -> jax.stages.Compiled:
        return jitted.lower(q, kv, kv, pool, metadata, sinks).compile()

    return _compile(mesh, compile_it, pool.data, dump_folder)


def compile_step(
    mesh: Mesh,
    model: ModelConfig,
    bucket: Bucket,
    step_folder: Path,
    dump_folder: Path,
    *,
    max_model_len: int = 4096,
) -> Program:
    """The engine's own `forward` program of a bucket.

    Args:
      step_folder: that of `dump_steps`.
    """
    executables, pool = make_executables(mesh, model, bucket, max_model_len)
    before = set(step_folder.glob(_LAUNCH_FILES))
    program = _compile(mesh, lambda: executables.forward(bucket), pool.data, dump_folder)
    return _with_launches(program, step_folder, before)


def compile_sample(
    mesh: Mesh,
    model: ModelConfig,
    num_rows: int,
    variant: Variant,
    step_folder: Path,
    dump_folder: Path,
) -> Program:
    """The engine's own `sample` program of a number of rows.

    Args:
      step_folder: that of `dump_steps`.
    """
    bucket = Bucket(num_rows, num_rows)
    executables, _ = make_executables(mesh, model, bucket, 4096)
    before = set(step_folder.glob(_LAUNCH_FILES))
    program = _compile(mesh, lambda: executables.sample(bucket, variant), None, dump_folder)
    return _with_launches(program, step_folder, before)


def make_executables(
    mesh: Mesh, model: ModelConfig, bucket: Bucket, max_model_len: int
) -> tuple[Executables, KVPool]:
    weights = _weights(WeightStructure(model, model.dtype, "flat", mesh))
    pool = _pool(
        mesh,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        block_size=_BLOCK_SIZE,
        head_dim=model.head_dim,
        dtype=jnp.dtype(model.dtype),
    )
    num_rows, table_width = bucket.num_rows + 1, max_model_len // _BLOCK_SIZE
    state = BatchState(
        token_ids=_struct(mesh, (num_rows,), jnp.int32),
        block_tables=_struct(mesh, (num_rows, table_width), jnp.int32),
    )
    return Executables(weights, pool, state, _BLOCK_SIZE, "hopper"), pool


def _compile(
    mesh: Mesh, compile_it: Callable[[], jax.stages.Compiled], pool: Any, dump_folder: Path
) -> Program:
    """Compiles with Mosaic's dumps switched on: they have what the assembler said."""
    dump_folder.mkdir(parents=True)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump_folder)
    start = time.monotonic()
    # why the abstract mesh: it tells the kernels which device they are for
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = compile_it()
    seconds = time.monotonic() - start
    spills, registers = [], []
    for file in sorted(dump_folder.glob("*.ptxas")):
        text = file.read_text()
        spills += [int(found) for found in re.findall(r"frame, (\d+) bytes spill stores", text)]
        registers += [int(found) for found in re.findall(r"Used (\d+) registers", text)]
    return Program(compiled, seconds, pool, tuple(spills), tuple(registers))


def _struct(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    """A ShapeDtypeStruct, which stands in for an array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, _WHOLE))


def _pool(mesh: Mesh, **sizes: Any) -> KVPool:
    num_blocks = POOL_BYTES // pool_bytes_per_block(**sizes, layout="plain")
    pool = jax.eval_shape(partial(KVPool.create, num_blocks=num_blocks, **sizes))
    return jax.tree.map(lambda array: _struct(mesh, array.shape, array.dtype), pool)


def _weights(structure: WeightStructure) -> Weights:
    def arrays(parameters: tuple[Parameter, ...]) -> tuple[Any, ...]:
        dtype = jnp.dtype(structure.dtype)
        return tuple(_struct(structure.mesh, p.shape, dtype) for p in parameters)

    groups = tuple(
        (arrays(group.structure.parameters),) * group.num_layers for group in structure.groups
    )
    return Weights(arrays(structure.outer.parameters), groups, structure)
