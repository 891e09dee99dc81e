from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.copy_blocks import copy_blocks
from kernels_pallas.pool import KVPool, pool_bytes_per_block, pool_partition_spec
from kernels_pallas.write_kv import write_kv

SIZES: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "block_size": 4, "head_dim": 8}


def make_pool(dtype: Any = jnp.float32, sharding: Any = None, **changes: Any) -> KVPool:
    sizes: dict[str, Any] = {"num_blocks": 5} | SIZES | changes
    return KVPool.create(**sizes, dtype=dtype, sharding=sharding)


def test_sizes_are_read_back():
    pool = make_pool()
    sizes = (pool.num_layers, pool.num_blocks, pool.num_kv_heads, pool.block_size, pool.head_dim)
    assert sizes == (3, 5, 2, 4, 8)
    assert pool.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_per_block_is_what_one_more_block_costs(dtype):
    grown = make_pool(num_blocks=6, dtype=dtype).data.nbytes - make_pool(dtype=dtype).data.nbytes
    assert pool_bytes_per_block(**SIZES, dtype=dtype) == grown


@pytest.mark.parametrize("name", [*SIZES, "num_blocks"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        make_pool(**{name: 0})


def test_it_is_a_pytree_with_one_leaf_and_static_layers():
    pool = make_pool()
    assert len(jax.tree.leaves(pool)) == 1
    assert jax.jit(lambda pool: pool)(pool).num_layers == 3


def test_partition_spec_splits_the_heads():
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    spec = pool_partition_spec("tensor")
    assert spec == PartitionSpec(None, None, "tensor")
    sharding = NamedSharding(mesh, spec)
    assert make_pool(sharding=sharding).data.sharding == sharding


def test_layers_are_apart():
    pool = make_pool()
    k, v = pool.layer_kv(1)
    pool = pool.with_layer_kv(1, k + 1, v + 2)
    for layer, (k_value, v_value) in enumerate([(0, 0), (1, 2), (0, 0)]):
        k, v = pool.layer_kv(layer)
        assert np.unique(k).tolist() == [k_value]
        assert np.unique(v).tolist() == [v_value]


def test_write_kv_touches_its_slots_only():
    k_new = jnp.ones((3, 2, 8)) * jnp.arange(1.0, 4.0)[:, None, None]
    # Block 5 offset 3, block 1 offset 0, and one padding token.
    slots = jnp.asarray([23, 4, 2], jnp.int32)
    pool = jax.jit(write_kv)(make_pool(), jnp.int32(2), k_new, -k_new, slots)
    expected = np.zeros((6, 2, 4, 8))
    expected[5, :, 3], expected[1, :, 0], expected[0, :, 2] = 1, 2, 3
    k, v = pool.layer_kv(2)
    np.testing.assert_array_equal(k, expected)
    np.testing.assert_array_equal(v, -expected)
    assert not np.asarray(pool.layer_kv(1)[0]).any()


@pytest.mark.parametrize(
    ("head_dim", "planes", "lanes"), [(16, 1, 128), (64, 1, 128), (80, 2, 128), (256, 2, 256)]
)
def test_tpu_layout_pads_to_whole_registers(head_dim, planes, lanes):
    sizes = SIZES | {"head_dim": head_dim}
    pool = KVPool.create(num_blocks=5, **sizes, dtype=jnp.float32, layout="tpu")
    assert pool.data.shape == (3 * 6, planes, 2, 4, lanes)
    assert (pool.head_dim, pool.is_joined, pool.is_plain) == (
        head_dim,
        planes == 1,
        lanes == head_dim,
    )
    per_block = pool_bytes_per_block(**sizes, dtype=jnp.float32, layout="tpu")
    assert per_block * 6 == pool.data.nbytes


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_tpu_layout_gives_back_keys_and_values(head_dim):
    sizes = SIZES | {"head_dim": head_dim}
    pool = KVPool.create(num_blocks=5, **sizes, dtype=jnp.float32, layout="tpu")
    k = jax.random.normal(jax.random.key(0), (6, 2, 4, head_dim))
    pool = copy_blocks(
        pool.with_layer_kv(1, k, 2 * k), jnp.asarray([2], jnp.int32), jnp.asarray([4], jnp.int32)
    )
    got_k, got_v = pool.layer_kv(1)
    expected = np.array(k)
    expected[4] = expected[2]
    np.testing.assert_array_equal(got_k, expected)
    np.testing.assert_array_equal(got_v, 2 * expected)
