"""Programs for TPUs that are not here, compiled from descriptions of the arrays alone."""

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import model_shapes
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.executables import COPY_SIZES, Executables
from jaxpaged.runner.sharding import AXIS_NAME
from jaxpaged.runner.step import BatchState
from jaxpaged.runner.weight_structure import Parameter, WeightStructure
from jaxpaged.runner.weights import Weights
from kernels_pallas import ops
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool, pool_bytes_per_block, pool_partition_spec
from kernels_pallas.tuning import TPU_GENERATIONS, TPUGeneration, TPUTuning

LLAMA_8B = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
)
QWEN3_4B = ModelConfig.from_hf(model_shapes.QWEN3_4B)

_COPYING = ("copy", "copy-start", "fusion", "transpose", "convert")
_WHOLE = PartitionSpec()
_MEMORY_FRACTION = 0.9  # as engines have it


@dataclass(frozen=True)
class Program:
    """A compiled program, and what its memory is compared with. Bytes are of one device."""

    compiled: jax.stages.Compiled
    seconds: float
    pool: Any  # ShapeDtypeStruct of its array
    generation: TPUGeneration

    @property
    def pool_bytes(self) -> int:
        shape = self.pool.sharding.shard_shape(self.pool.shape)
        return int(np.prod(shape)) * self.pool.dtype.itemsize

    @property
    def memory(self) -> Any:
        return self.compiled.memory_analysis()

    @property
    def hbm_bytes(self) -> int:
        """Arguments, results and temporaries; what is donated counts once."""
        memory = self.memory
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return total + memory.temp_size_in_bytes - memory.alias_size_in_bytes

    @property
    def vmem_bytes(self) -> int:
        """The most that one of our kernels takes."""
        used = [_vmem_of(line) for line in self._lines() if "tpu_custom_call" in line]
        return max(used, default=0)

    def pool_copies(self) -> list[str]:
        """Instructions that make an array of the pool's size and are no kernel of ours.

        A scatter writes in place; that it does shows in what is aliased.
        """
        found = []
        for line in self._lines():
            match = re.search(r"= \(?\w+\[([\d,]+)\][^=]*? ([\w-]+)\(", line)
            is_scatter = "scatter_fusion" in line.split(" = ")[0]
            if match and match[2] in _COPYING and not is_scatter:
                size = int(np.prod([int(axis) for axis in match[1].split(",")]))
                if size * self.pool.dtype.itemsize >= self.pool_bytes:
                    found.append(line.strip()[:100])
        return found

    def _lines(self) -> list[str]:
        text = self.compiled.as_text()
        assert text is not None
        return text.splitlines()


def _vmem_of(line: str) -> int:
    """XLA gives a kernel the memory from an offset on; before it lie operands of its own."""
    config = r'"%s":\[{"memory_space":"1","offset":"(\d+)","size":"(\d+)"'
    used = re.search(config % "used_scoped_memory_configs", line)
    given = re.search(r"[^_]" + config % "scoped_memory_configs", line)
    if used is None or given is None:
        return 0
    return int(used[1]) + int(used[2]) - int(given[1])


def topology_mesh(topology: str, num_devices: int) -> Mesh:
    """A mesh of devices that are described, not there."""
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    return Mesh(np.array(devices[:num_devices]), (AXIS_NAME,))


def generation_of(mesh: Mesh) -> TPUGeneration:
    return TPU_GENERATIONS[mesh.devices.flat[0].device_kind]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one call of the kernels: a mixed step, which goes through all of them."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    num_tokens: int = 512
    num_rows: int = 64
    max_len: int = 4096
    tuning: TPUTuning | None = None


def compile_attention(
    mesh: Mesh, shape: AttentionShape, *, pool_bytes: int = 2**31, donate: bool = True
) -> Program:
    """One call of `ops.paged_attention`."""
    on = partial(_struct, mesh)
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": shape.num_kv_heads,
        "block_size": shape.block_size,
        "head_dim": shape.head_dim,
        "dtype": shape.dtype,
        "layout": "tpu",
    }
    num_blocks = pool_bytes // pool_bytes_per_block(**sizes)
    pool = _pool(mesh, num_blocks=num_blocks, **sizes)
    rows, tokens = (shape.num_rows,), (shape.num_tokens,)
    metadata = AttentionMetadata(
        block_tables=on((*rows, shape.max_len // shape.block_size), jnp.int32),
        q_lens=on(rows, jnp.int32),
        kv_lens=on(rows, jnp.int32),
        slot_mapping=on(tokens, jnp.int32),
        num_decode_rows=on((), jnp.int32),
    )
    q = on((*tokens, shape.num_q_heads, shape.head_dim), shape.dtype)
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
            impl="tpu",
            tuning=shape.tuning,
        )

    start = time.monotonic()
    # why the abstract mesh: it tells the kernels which device they are for
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(attend, donate_argnums=(3,) if donate else ())
        lowered = jitted.lower(q, kv, kv, pool, metadata, sinks)
        compiled = lowered.compile()
    return Program(compiled, time.monotonic() - start, pool.data, generation_of(mesh))


def compile_step(
    mesh: Mesh,
    model: ModelConfig,
    bucket: Bucket,
    *,
    block_size: int = 16,
    max_model_len: int = 4096,
) -> Program:
    """The engine's own `forward` program of a bucket, its pool filling the memory left."""
    executables, pool = _engine(mesh, model, bucket, block_size, max_model_len)
    start = time.monotonic()
    compiled = executables.forward(bucket)
    return Program(compiled, time.monotonic() - start, pool, generation_of(mesh))


def compile_block_copies(mesh: Mesh, model: ModelConfig) -> Program:
    """The engine's own program for the most copies of blocks at once."""
    executables, pool = _engine(mesh, model, Bucket(64, 64), 16, 4096)
    start = time.monotonic()
    compiled = executables.copy_blocks(COPY_SIZES[-1])
    return Program(compiled, time.monotonic() - start, pool, generation_of(mesh))


def _engine(
    mesh: Mesh, model: ModelConfig, bucket: Bucket, block_size: int, max_model_len: int
) -> tuple[Executables, Any]:
    """What a runner would call, and the array of its pool."""
    structure = WeightStructure(model, model.dtype, "flat", mesh)
    weights = _weights(structure)
    sizes: dict[str, Any] = {
        "num_layers": model.num_layers,
        "num_kv_heads": model.num_kv_heads,
        "block_size": block_size,
        "head_dim": model.head_dim,
        "dtype": jnp.dtype(model.dtype),
        "layout": "tpu",
    }
    room = generation_of(mesh).hbm_bytes * mesh.size * _MEMORY_FRACTION - _num_bytes(weights)
    # The engine leaves the same for a step's widest arrays (runner/start.py).
    room -= 16 * (bucket.num_tokens * model.intermediate_size + 8 * model.vocab_size)
    num_blocks = int(room // pool_bytes_per_block(**sizes))
    if num_blocks < 1:
        raise ValueError(f"{model.model_type} does not fit {mesh.size} devices: {room=:.3g}")
    pool = _pool(mesh, num_blocks=num_blocks, **sizes)
    num_rows = bucket.num_rows + 1
    tables = _struct(mesh, (num_rows, max_model_len // block_size), jnp.int32)
    state = BatchState(token_ids=_struct(mesh, (num_rows,), jnp.int32), block_tables=tables)
    return Executables(weights, pool, state, block_size, "tpu"), pool.data


def _struct(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = _WHOLE) -> Any:
    """A ShapeDtypeStruct, which stands in for an array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _pool(mesh: Mesh, **sizes: Any) -> KVPool:
    pool = jax.eval_shape(partial(KVPool.create, **sizes))
    spec = pool_partition_spec(AXIS_NAME)
    return jax.tree.map(lambda array: _struct(mesh, array.shape, array.dtype, spec), pool)


def _weights(structure: WeightStructure) -> Weights:
    def arrays(parameters: tuple[Parameter, ...]) -> tuple[Any, ...]:
        dtype = jnp.dtype(structure.dtype)
        return tuple(_struct(structure.mesh, p.shape, dtype, p.spec) for p in parameters)

    groups = tuple(
        (arrays(group.structure.parameters),) * group.num_layers for group in structure.groups
    )
    return Weights(arrays(structure.outer.parameters), groups, structure)


def _num_bytes(arrays: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
