"""The model's part of a step: weights, tokens and pool in, logits and pool out. Pure."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxpaged.models.layers import Residual
from jaxpaged.models.llama import DecoderLayer
from jaxpaged.runner.sharding import AXIS_NAME
from jaxpaged.runner.weight_structure import LayerGroup, ModuleStructure
from jaxpaged.runner.weights import GroupArrays, Weights, weight_specs
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.norm_rope import RopeTables
from kernels_pallas.pool import KVPool, pool_partition_spec

Hidden = Float[Array, "num_tokens hidden_size"]


def forward(
    weights: Weights,
    token_ids: Int32[Array, " num_tokens"],
    positions: Int32[Array, " num_tokens"],
    pool: KVPool,
    metadata: AttentionMetadata,
    logit_positions: Int32[Array, " num_logit_rows"],
    *,
    impl: str | None = None,
) -> tuple[Float32[Array, "num_logit_rows vocab_size"], KVPool, Hidden]:
    """Runs all layers on every token, the final norm and the head on `logit_positions` only.

    Jit it with the pool donated. Every device of the mesh works on its share of the heads and of
    the MLP; inputs and logits are whole on each.

    Args:
      token_ids: inside the vocabulary, padding too.
      positions: of the tokens in their sequences.
      pool: cut over KV heads (`pool_partition_spec(AXIS_NAME)`).
      logit_positions: indices into `token_ids`.

    Returns:
      Logits, pool, and what the last layer gave for every token (see `head_logits`).
    """
    whole, pool_spec = PartitionSpec(), pool_partition_spec(AXIS_NAME)
    sharded = jax.shard_map(
        partial(_forward_share, impl=impl),
        mesh=weights.structure.mesh,
        in_specs=(weight_specs(weights.structure), whole, whole, pool_spec, whole, whole),
        out_specs=(whole, pool_spec, whole),
        check_vma=False,
    )
    return sharded(weights, token_ids, positions, pool, metadata, logit_positions)


def head_logits(weights: Weights, hidden: Hidden) -> Float32[Array, "num_tokens vocab_size"]:
    """The final norm and the head on what `forward` gave for some tokens."""

    def share(weights: Weights, hidden: Hidden) -> Float32[Array, "num_tokens vocab_size"]:
        model = weights.structure.outer.rebuild(weights.outer)
        return model.logits(hidden, axis_name=AXIS_NAME)

    whole = PartitionSpec()
    sharded = jax.shard_map(
        share,
        mesh=weights.structure.mesh,
        in_specs=(weight_specs(weights.structure), whole),
        out_specs=whole,
        check_vma=False,
    )
    return sharded(weights, hidden)


def _forward_share(
    weights: Weights,
    token_ids: Int32[Array, " num_tokens"],
    positions: Int32[Array, " num_tokens"],
    pool: KVPool,
    metadata: AttentionMetadata,
    logit_positions: Int32[Array, " num_logit_rows"],
    *,
    impl: str | None,
) -> tuple[Float32[Array, "num_logit_rows vocab_size"], KVPool, Hidden]:
    """What one device does."""
    structure = weights.structure
    model = structure.outer.rebuild(weights.outer)
    x, rope = model.start(token_ids, positions, axis_name=AXIS_NAME)
    if structure.layout == "scan":
        for group, arrays in zip(structure.groups, weights.groups, strict=True):
            x, pool = _scan_group(group, arrays, x, pool, rope, metadata, impl=impl)
    else:
        x, pool = _run_layers(weights, x, pool, rope, metadata, impl=impl)
    return model.logits(x[logit_positions], axis_name=AXIS_NAME), pool, x


def _scan_group(
    group: LayerGroup,
    arrays: GroupArrays,
    x: Hidden,
    pool: KVPool,
    rope: RopeTables,
    metadata: AttentionMetadata,
    *,
    impl: str | None,
) -> tuple[Hidden, KVPool]:
    """One compiled layer, run over the stacked weights; the pool is carried, never sliced."""
    ways: Any = {"impl": impl, "axis_name": AXIS_NAME}

    def body(carry: tuple[Hidden, KVPool], layer_and_arrays: Any):
        layer, layer_arrays = layer_and_arrays
        module = group.structure.rebuild(layer_arrays)
        x, pool = carry
        residual = module.residual_of(x, **ways)
        residual, pool = module(residual, pool, layer, rope, metadata, **ways)
        return (residual.total(), pool), None

    layers = jnp.arange(group.start, group.stop, dtype=jnp.int32)
    carry, _ = jax.lax.scan(body, (x, pool), (layers, arrays))
    return carry


def _run_layers(
    weights: Weights,
    x: Hidden,
    pool: KVPool,
    rope: RopeTables,
    metadata: AttentionMetadata,
    *,
    impl: str | None,
) -> tuple[Hidden, KVPool]:
    """One layer after the other, each with weights of its own."""
    groups = weights.structure.groups
    first = groups[0].structure.rebuild(weights.groups[0][0])
    residual = first.residual_of(x, impl=impl, axis_name=AXIS_NAME)
    for group, arrays in zip(groups, weights.groups, strict=True):
        for idx in range(group.num_layers):
            layer = jnp.int32(group.start + idx)
            residual, pool = _run_layer(
                group.structure, arrays[idx], residual, pool, layer, rope, metadata, impl=impl
            )
    return residual.total(), pool


# why jitted: all layers of a group share one trace and one function in the compiled program
@partial(jax.jit, static_argnums=0, static_argnames="impl")
def _run_layer(
    structure: ModuleStructure[DecoderLayer],
    arrays: tuple[jax.Array, ...],
    residual: Residual,
    pool: KVPool,
    layer: Int32[Array, ""],
    rope: RopeTables,
    metadata: AttentionMetadata,
    *,
    impl: str | None,
) -> tuple[Residual, KVPool]:
    module = structure.rebuild(arrays)
    return module(residual, pool, layer, rope, metadata, impl=impl, axis_name=AXIS_NAME)
