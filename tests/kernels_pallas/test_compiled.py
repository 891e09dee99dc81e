"""What the compiled step does with the pool: in place, and never a copy that grows with it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from kernels_pallas import ops
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 9, 3, 64, 16


@functools.partial(jax.jit, donate_argnames="pool")
def scanned(q, pool, metadata):
    """Attention in a scan over layers, as a model on the CPU has it."""

    def layer_step(carry, layer):
        q, pool = carry
        k, v = q[:, :NUM_KV_HEADS], q[:, -NUM_KV_HEADS:]
        out, pool = ops.paged_attention(q, k, v, pool, layer, metadata, sm_scale=0.125)
        return (out, pool), None

    return lax.scan(layer_step, (q, pool), jnp.arange(NUM_LAYERS, dtype=jnp.int32))[0]


@functools.partial(jax.jit, donate_argnames="pool")
def copied(pool, sources, destinations):
    return ops.copy_blocks(pool, sources, destinations)


def pool_shape(num_blocks: int) -> KVPool:
    return jax.eval_shape(
        functools.partial(
            KVPool.create,
            num_layers=NUM_LAYERS,
            num_blocks=num_blocks,
            num_kv_heads=NUM_KV_HEADS,
            block_size=BLOCK_SIZE,
            head_dim=HEAD_DIM,
            dtype=jnp.float32,
        )
    )


def int32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def assert_in_place(compiled: list[tuple[KVPool, jax.stages.Compiled]]) -> None:
    """`compiled`: the same program over a small and a large pool."""
    temporaries = []
    for pool, program in compiled:
        memory = program.memory_analysis()
        assert memory is not None
        pool_bytes = pool.data.size * pool.data.dtype.itemsize
        assert memory.alias_size_in_bytes >= pool_bytes
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[1] <= temporaries[0] + 4096


# A table as wide as one kv tile (8 blocks) is where XLA was seen to copy a pool at batch 1.
@pytest.mark.parametrize("table_width", [8, 40])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (8, 8), (32, 8)])
def test_attention_never_copies_the_pool(num_tokens, num_rows, table_width):
    q = jnp.zeros((num_tokens, NUM_Q_HEADS, HEAD_DIM))
    metadata = AttentionMetadata(
        block_tables=int32(num_rows, table_width),
        q_lens=int32(num_rows),
        kv_lens=int32(num_rows),
        slot_mapping=int32(num_tokens),
        num_decode_rows=int32(),
    )
    pools = [pool_shape(64), pool_shape(1024)]
    assert_in_place([(pool, scanned.lower(q, pool, metadata).compile()) for pool in pools])


def test_copy_blocks_never_copies_the_pool():
    pools = [pool_shape(64), pool_shape(1024)]
    assert_in_place([(pool, copied.lower(pool, int32(4), int32(4)).compile()) for pool in pools])


def test_negative_control():
    """A pool that is read again after the write must be copied, and the check sees it."""

    @functools.partial(jax.jit, donate_argnames="pool")
    def copying(pool, sources, destinations):
        return ops.copy_blocks(pool, sources, destinations), pool.data[0, 0, 0, 0, 0] + pool.data

    pools = [pool_shape(64), pool_shape(1024)]
    programs = [(pool, copying.lower(pool, int32(4), int32(4)).compile()) for pool in pools]
    with pytest.raises(AssertionError):
        assert_in_place(programs)
