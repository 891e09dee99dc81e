"""The KV pool: device arrays that hold keys and values in blocks, and the only place, beside the
implementations of the operations, that knows their layout.

One array, `[num_layers * (num_blocks + 1), 2, num_kv_heads, block_size, head_dim]`:

    row of the first axis = layer * (num_blocks + 1) + block id;  0 = K, 1 = V on the second

Flat over layers, so that a scan over layers can carry it and update it in place. Block 0 of each
layer is the null block: padding reads and writes there, and what it holds means nothing.
"""

import typing
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import Array, Float, Int32


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Keys and values of all layers.

    Inside `shard_map` it describes one device's share, so `num_kv_heads` is the local count.

    Attributes:
      data: see the module's text. Donate it; one owner at a time.
      num_layers: layers that share the first axis.
    """

    data: Float[Array, "pool_rows 2 num_kv_heads block_size head_dim"]
    num_layers: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: jax.typing.DTypeLike,
        sharding: Sharding | None = None,
    ) -> "KVPool":
        """Makes a pool of zeros.

        Args:
          num_blocks: usable blocks a layer; the null block comes on top.
          sharding: where it lives, for instance
            `NamedSharding(mesh, pool_partition_spec(axis_name))`.

        Raises:
          ValueError: a size is below 1.
        """
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "num_kv_heads": num_kv_heads,
            "block_size": block_size,
            "head_dim": head_dim,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        shape = (num_layers * (num_blocks + 1), 2, num_kv_heads, block_size, head_dim)
        return cls(jnp.zeros(shape, dtype, device=sharding), num_layers)

    @property
    def num_blocks(self) -> int:
        """Usable blocks a layer, the null block apart."""
        return self.data.shape[0] // self.num_layers - 1

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    @property
    def head_dim(self) -> int:
        return self.data.shape[4]

    @property
    def dtype(self) -> jnp.dtype:
        return self.data.dtype

    def first_row(self, layer: int | Int32[Array, ""]) -> Int32[Array, ""]:
        """Where the layer's null block lies on the first axis; add a block id to find a block."""
        return jnp.int32(self.num_blocks + 1) * jnp.asarray(layer, jnp.int32)

    def layer_kv(
        self, layer: int | Int32[Array, ""]
    ) -> tuple[
        Float[Array, "blocks num_kv_heads block_size head_dim"],
        Float[Array, "blocks num_kv_heads block_size head_dim"],
    ]:
        """A copy of one layer's K and V, indexed by block id: for tests and the oracle."""
        blocks = self.num_blocks + 1
        data = lax.dynamic_slice_in_dim(self.data, self.first_row(layer), blocks)
        return data[:, 0], data[:, 1]

    def with_layer_kv(
        self,
        layer: int | Int32[Array, ""],
        k: Float[Array, "blocks num_kv_heads block_size head_dim"],
        v: Float[Array, "blocks num_kv_heads block_size head_dim"],
    ) -> "KVPool":
        """The pool with one layer's K and V replaced: for tests and the oracle."""
        data = jnp.stack([k, v], axis=1).astype(self.dtype)
        data = lax.dynamic_update_slice_in_dim(self.data, data, self.first_row(layer), axis=0)
        return replace(self, data=data)


def pool_bytes_per_block(
    *,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
) -> int:
    """Memory of one more block: K and V, all layers, all devices together."""
    return 2 * num_layers * num_kv_heads * block_size * head_dim * jnp.dtype(dtype).itemsize


def pool_partition_spec(axis_name: str) -> PartitionSpec:
    """KV heads spread over a mesh axis.

    One spec that stands for the whole pytree: `shard_map` takes it for a KVPool as it is, and
    `NamedSharding(mesh, spec)` is what `KVPool.create` takes.
    """
    return PartitionSpec(None, None, axis_name)
