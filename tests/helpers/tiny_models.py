"""Tiny models: configs, checkpoints in memory, and rows of tokens packed as a step wants them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpaged.models import expected_names
from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.forward import forward
from jaxpaged.runner.sharding import AXIS_NAME
from jaxpaged.runner.weights import Weights
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool, pool_partition_spec

BLOCK_SIZE = 4
NUM_BLOCKS = 64

_BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def hf_config(**changes: Any) -> dict[str, Any]:
    """A tiny Llama's config.json; a change to None leaves the field out."""
    return {name: value for name, value in (_BASE | changes).items() if value is not None}


def tiny_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(**changes))


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint made of arrays."""

    tensors: Mapping[str, np.ndarray]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def random_checkpoint(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    """Random tensors under Hugging Face names, scaled so that every one of them matters."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_names(config).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        is_norm = name.endswith("norm.weight")
        values = 1 + 0.2 * noise if is_norm else 2 * noise / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32)
    return MemoryCheckpoint(tensors)


def make_pool(
    config: ModelConfig, mesh: Mesh, num_blocks: int = NUM_BLOCKS, dtype: str = "float32"
) -> KVPool:
    return KVPool.create(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=config.head_dim,
        dtype=dtype,
        sharding=NamedSharding(mesh, pool_partition_spec(AXIS_NAME)),
    )


@dataclass(frozen=True)
class Row:
    """A row of a step: new tokens after `num_computed_tokens` old ones."""

    token_ids: Sequence[int]
    block_table: Sequence[int]
    num_computed_tokens: int = 0


@dataclass(frozen=True)
class StepInputs:
    token_ids: jax.Array
    positions: jax.Array
    metadata: AttentionMetadata
    logit_positions: jax.Array


def pack(rows: Sequence[Row], *, num_tokens: int, num_rows: int) -> StepInputs:
    """Packs rows, those with one token first, and pads to the sizes given.

    The logits asked for are those of each row's last token.
    """
    width = max(len(row.block_table) for row in rows)
    tokens, positions, slots = np.zeros((3, num_tokens), np.int32)
    tables = np.zeros((num_rows, width), np.int32)
    q_lens, kv_lens, last = np.zeros((3, num_rows), np.int32)
    start = 0
    for idx, row in enumerate(rows):
        count = len(row.token_ids)
        span = slice(start, start + count)
        tokens[span] = row.token_ids
        positions[span] = row.num_computed_tokens + np.arange(count)
        table = np.asarray(row.block_table)
        tables[idx, : len(table)] = table
        slots[span] = table[positions[span] // BLOCK_SIZE] * BLOCK_SIZE + (
            positions[span] % BLOCK_SIZE
        )
        q_lens[idx], kv_lens[idx] = count, row.num_computed_tokens + count
        last[idx] = start + count - 1
        start += count
    is_decode = [len(row.token_ids) == 1 for row in rows]
    num_decode_rows = is_decode.index(False) if False in is_decode else len(rows)
    metadata = AttentionMetadata(
        *(jnp.asarray(array) for array in (tables, q_lens, kv_lens, slots)),
        num_decode_rows=jnp.int32(num_decode_rows),
    )
    return StepInputs(jnp.asarray(tokens), jnp.asarray(positions), metadata, jnp.asarray(last))


jitted_forward = jax.jit(forward, static_argnames="impl")


def run_step(weights: Weights, inputs: StepInputs, pool: KVPool) -> tuple[np.ndarray, KVPool]:
    """Logits of each row's last token."""
    logits, pool, _ = jitted_forward(
        weights,
        inputs.token_ids,
        inputs.positions,
        pool,
        inputs.metadata,
        inputs.logit_positions,
    )
    return np.asarray(logits), pool


def prompt_logits(weights: Weights, token_ids: Sequence[int], mesh: Mesh) -> np.ndarray:
    """Logits of every position of a prompt that is computed in one chunk."""
    count = len(token_ids)
    row = Row(token_ids, range(1, count // BLOCK_SIZE + 2))
    # why one more: as many tokens as rows would mean one token a row
    inputs = pack([row], num_tokens=count + 1, num_rows=1)
    inputs = replace(inputs, logit_positions=jnp.arange(count))
    pool = make_pool(weights.structure.config, mesh, dtype=weights.structure.dtype)
    return run_step(weights, inputs, pool)[0]
