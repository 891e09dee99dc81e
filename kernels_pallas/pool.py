"""The KV pool: device arrays that hold keys and values in blocks, and the only place, beside the
implementations of the operations, that knows their layout.

One array, `[num_layers * (num_blocks + 1), planes, num_kv_heads, block_size, lanes]`:

    row of the first axis = layer * (num_blocks + 1) + block id

Flat over layers, so that a scan over layers can carry it and update it in place. Block 0 of each
layer is the null block: padding reads and writes there, and what it holds means nothing.

Layouts; they differ in the last axis alone. A TPU keeps it in whole registers of 128, Hopper's
matrix unit reads it in tiles of 64:

    plain                  planes | K | V |   lanes | head_dim |               (CPU, other GPUs)
    hopper                 planes | K | V |   lanes | head_dim | 0 to 64, 128 or 256 |
    tpu, head_dim <= 64    planes | KV |      lanes | K to 64 | V to 64 |      (joined)
    tpu, head_dim > 64     planes | K | V |   lanes | head_dim | 0 to 128s |

So only head_dim 64, 128 and 256 cost no padding anywhere; `pool_bytes_per_block` counts it.
"""

import typing
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import Array, Float, Int32

PoolLayout = Literal["plain", "hopper", "tpu"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Keys and values of all layers.

    Inside `shard_map` it describes one device's share, so `num_kv_heads` is the local count.

    Attributes:
      data: see the module's text. Donate it; one owner at a time.
      num_layers: layers that share the first axis.
      head_dim: of a key or a value, without padding.
    """

    data: Float[Array, "pool_rows planes num_kv_heads block_size lanes"]
    num_layers: int = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})

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
        layout: PoolLayout = "plain",
    ) -> "KVPool":
        """Makes a pool of zeros.

        Args:
          num_blocks: usable blocks a layer; the null block comes on top.
          layout: the one that the implementation reads (`ops.pool_layout`).
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
        planes, lanes = _planes_and_lanes(head_dim, layout)
        shape = (num_layers * (num_blocks + 1), planes, num_kv_heads, block_size, lanes)
        return cls(jnp.zeros(shape, dtype, device=sharding), num_layers, head_dim)

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
    def is_joined(self) -> bool:
        """Whether K and V lie side by side in one plane."""
        return self.data.shape[1] == 1

    @property
    def is_plain(self) -> bool:
        return not self.is_joined and self.lanes == self.head_dim

    @property
    def lanes(self) -> int:
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
        value_start = self.data.shape[4] // 2 if self.is_joined else 0
        k, v = data[:, 0], data[:, -1, ..., value_start:]
        return k[..., : self.head_dim], v[..., : self.head_dim]

    def with_layer_kv(
        self,
        layer: int | Int32[Array, ""],
        k: Float[Array, "blocks num_kv_heads block_size head_dim"],
        v: Float[Array, "blocks num_kv_heads block_size head_dim"],
    ) -> "KVPool":
        """The pool with one layer's K and V replaced: for tests and the oracle."""
        data = self.pack(k, v).astype(self.dtype)
        data = lax.dynamic_update_slice_in_dim(self.data, data, self.first_row(layer), axis=0)
        return replace(self, data=data)

    def pack(
        self, k: Float[Array, "first *middle head_dim"], v: Float[Array, "first *middle head_dim"]
    ) -> Float[Array, "first planes *middle lanes"]:
        """K and V as `data` has them, padding being zeros."""
        lanes = self.data.shape[4] // (2 if self.is_joined else 1)
        padding = [(0, 0)] * (k.ndim - 1) + [(0, lanes - self.head_dim)]
        k, v = jnp.pad(k, padding), jnp.pad(v, padding)
        if self.is_joined:
            return jnp.concatenate([k, v], axis=-1)[:, None]
        return jnp.stack([k, v], axis=1)


def _planes_and_lanes(head_dim: int, layout: PoolLayout) -> tuple[int, int]:
    if layout == "plain":
        return 2, head_dim
    if layout == "hopper":
        return 2, next((lanes for lanes in (64, 128, 256) if lanes >= head_dim), head_dim)
    if head_dim <= 64:
        return 1, 128
    return 2, -(-head_dim // 128) * 128


def pool_bytes_per_block(
    *,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    layout: PoolLayout = "plain",
) -> int:
    """Memory of one more block: K and V, all layers, all devices together, with padding."""
    planes, lanes = _planes_and_lanes(head_dim, layout)
    itemsize = jnp.dtype(dtype).itemsize
    return num_layers * planes * num_kv_heads * block_size * lanes * itemsize


def pool_partition_spec(axis_name: str) -> PartitionSpec:
    """KV heads spread over a mesh axis.

    One spec that stands for the whole pytree: `shard_map` takes it for a KVPool as it is, and
    `NamedSharding(mesh, spec)` is what `KVPool.create` takes.
    """
    return PartitionSpec(None, None, axis_name)
