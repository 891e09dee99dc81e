from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import ops
from kernels_pallas.pool import KVPool

NUM_LAYERS, NUM_BLOCKS = 3, 6


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool.create(
        num_layers=NUM_LAYERS,
        num_blocks=NUM_BLOCKS,
        num_kv_heads=2,
        block_size=4,
        head_dim=8,
        dtype=jnp.float32,
    )
    values = np.random.default_rng(0).standard_normal(pool.data.shape)
    return replace(pool, data=jnp.asarray(values, jnp.float32))


def copied(pool: KVPool, pairs: list[tuple[int, int]]) -> KVPool:
    sources, destinations = jnp.asarray(pairs, jnp.int32).T
    return jax.jit(ops.copy_blocks)(pool, sources, destinations)


def assert_blocks_come_from(pool: KVPool, before: KVPool, origin: list[int]) -> None:
    """Block i of `pool` is block origin[i] of `before`, in all layers, K and V."""
    for layer in range(NUM_LAYERS):
        for after, old in zip(pool.layer_kv(layer), before.layer_kv(layer), strict=True):
            np.testing.assert_array_equal(after, np.asarray(old)[origin])


@pytest.mark.parametrize(
    ("pairs", "origin"),
    [
        ([(2, 5)], [0, 1, 2, 3, 4, 2, 6]),
        ([(1, 4), (1, 5), (1, 6)], [0, 1, 2, 3, 1, 1, 1]),
        ([(1, 2), (2, 3), (3, 4)], [0, 1, 1, 2, 3, 5, 6]),
        ([(3, 4), (2, 3), (1, 2)], [0, 1, 1, 2, 3, 5, 6]),
        ([(1, 2), (2, 1)], [0, 2, 1, 3, 4, 5, 6]),
        ([(6, 1), (0, 0), (0, 0)], [0, 6, 2, 3, 4, 5, 6]),
        ([(0, 0)], [0, 1, 2, 3, 4, 5, 6]),
    ],
    ids=["one", "fan_out", "chain", "chain_reversed", "swap", "padded", "only_padding"],
)
def test_all_layers_k_and_v_reads_before_writes(pool, pairs, origin):
    assert_blocks_come_from(copied(pool, pairs), pool, origin)


def test_negative_control(pool):
    with pytest.raises(AssertionError):
        assert_blocks_come_from(copied(pool, [(2, 5)]), pool, [0, 1, 2, 3, 4, 3, 6])


def test_bad_arguments(pool):
    pair = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"destinations\.shape=\(1,\) must be \(2,\)"):
        ops.copy_blocks(pool, pair, pair[:1])
    with pytest.raises(ValueError, match=r"sources\.dtype=float32 must be int32"):
        ops.copy_blocks(pool, pair.astype(jnp.float32), pair)
