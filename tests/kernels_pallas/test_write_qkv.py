"""The kernel from the qkv product to the pool, interpreted: against `split_heads` and a scatter."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hopper_interpreter import never_wait_for, reports_race
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import write_qkv_hopper
from kernels_pallas.norm_rope import HeadNorms, RopeTables, split_heads
from kernels_pallas.pool import KVPool
from kernels_pallas.terms import num_terms_of, sum_of
from kernels_pallas.write_kv import write_kv
from kernels_pallas.write_qkv_hopper import can_write, write_qkv

NUM_BLOCKS, LAYER = 12, 1
TERMS_ERROR = 2e-5  # of a query in two terms, which have 16 bits; one has 8, or 11 of float16


@dataclass(frozen=True)
class Case:
    """A step; its last `num_padding` tokens are padding.

    Attributes:
      first_run: so many tokens have slots side by side, the others any; 0 = all any.
      before_run: tokens before them.
      has_runs: what the kernel is told of that.
      max_programs: as many as may run at once, which says how many share a head's tokens.
      heads_dtype: None = the pool's.
    """

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    q_rows: int
    num_padding: int = 0
    has_norms: bool = True
    first_run: int = 0
    before_run: int = 1
    has_runs: bool = True
    max_programs: int = write_qkv_hopper.MAX_PROGRAMS
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    heads_dtype: Any = None

    def arguments(self) -> tuple:
        rng = np.random.default_rng(0)
        shape = (self.num_tokens, self.num_kv_heads, self.group + 2, self.head_dim)

        def draw(*shape: int, dtype: Any = None) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), dtype or self.dtype)

        angles = rng.uniform(0, 100, (self.num_tokens, self.head_dim // 2))
        rope = RopeTables(
            jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
        )
        norms = HeadNorms(1 + draw(self.head_dim), draw(self.head_dim), 1e-6)
        size = self.block_size
        pool_shape = (2 * (NUM_BLOCKS + 1), 2, self.num_kv_heads, size, self.head_dim)
        slots = rng.permutation(NUM_BLOCKS * size)[: self.num_tokens] + size
        if self.first_run:
            slots = np.roll(np.arange(len(slots)) + size, self.before_run)
            end = self.before_run + self.first_run
            slots[end:] = slots[end:][::-1]
        slots[self.num_tokens - self.num_padding :] = 3
        pool = KVPool(draw(*pool_shape), 2, self.head_dim)
        slots = jnp.asarray(slots, jnp.int32)
        heads = draw(*shape, dtype=self.heads_dtype)
        return heads, norms if self.has_norms else None, rope, pool, slots

    def run(self) -> tuple[jax.Array, KVPool]:
        """The terms of the queries, and the pool."""
        heads, norms, rope, pool, slots = self.arguments()
        with patch.object(write_qkv_hopper, "MAX_PROGRAMS", self.max_programs):
            q, pool = write_qkv(
                heads,
                norms,
                rope,
                pool,
                pool.first_row(LAYER),
                slots,
                q_rows=self.q_rows,
                has_runs=self.has_runs,
                interpret=plgpu.InterpretGPUParams(detect_races=True),
            )
        q = q.reshape(-1, self.num_tokens, self.num_kv_heads, self.q_rows, self.head_dim)
        q = q[..., : self.group, :].reshape(len(q), self.num_tokens, -1, self.head_dim)
        return jax.block_until_ready((q, pool))

    def expected(self) -> tuple[jax.Array, KVPool]:
        heads, norms, rope, pool, slots = self.arguments()
        q, k, v = split_heads(heads, norms, rope)
        return q, write_kv(pool, LAYER, k.astype(pool.dtype), v.astype(pool.dtype), slots)


def assert_close(actual: jax.Array, expected: jax.Array, error: float) -> None:
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=error, atol=error
    )


def assert_one_rounding_apart(actual: jax.Array, expected: jax.Array) -> None:
    """Products and sums may be fused: a value may round to the next one of its type.

    So may a normed value, which is about 1, and the turn may leave a small difference of two.
    """
    assert_close(actual, expected, float(jnp.finfo(expected.dtype).eps))


DECODE = Case(8, 2, 2, 128, q_rows=8, num_padding=2, has_runs=False)
# Of 40 tokens 32 are two runs, which two of four programs copy whole.
RUNS = Case(40, 1, 1, 64, q_rows=1, first_run=32, before_run=0)
WIDE_DECODE = replace(DECODE, heads_dtype=jnp.float32)


@pytest.mark.parametrize(
    "case",
    [
        DECODE,
        Case(70, 1, 2, 64, q_rows=2, num_padding=3),  # a second tile, hardly begun
        Case(5, 1, 3, 64, q_rows=8, has_norms=False),
        RUNS,
        Case(70, 1, 1, 64, q_rows=1, first_run=38),  # two whole runs, each cut between programs
        Case(70, 1, 1, 64, q_rows=1, first_run=38, max_programs=0),  # the same with one program
        Case(40, 1, 1, 64, q_rows=1, first_run=32, before_run=0, max_programs=5, block_size=32),
        Case(16, 1, 1, 128, q_rows=8, dtype=jnp.float16),
        Case(40, 1, 1, 128, q_rows=1, first_run=20, num_padding=3),  # through registers, and a run
        Case(70, 1, 2, 64, q_rows=8, num_padding=3, has_runs=False),
        WIDE_DECODE,
        Case(5, 1, 3, 64, q_rows=8, has_norms=False, heads_dtype=jnp.float32),
        Case(70, 1, 3, 64, q_rows=3, num_padding=3, first_run=38, heads_dtype=jnp.float32),
        Case(16, 1, 1, 128, q_rows=8, dtype=jnp.float16, heads_dtype=jnp.float32),
    ],
    ids=str,
)
def test_equals_separate_operations(case: Case, capsys):
    found = []
    assert not reports_race(lambda: found.append(case.run()), capsys)
    (q, pool), (expected_q, expected_pool) = found[0], case.expected()
    assert q.dtype == pool.dtype and len(q) == num_terms_of(expected_q.dtype, q.dtype)
    if len(q) == 1:
        assert_one_rounding_apart(q[0], expected_q)
    else:
        assert_close(sum_of(q), expected_q, TERMS_ERROR)
    for layer in range(2):
        for blocks, wanted in zip(pool.layer_kv(layer), expected_pool.layer_kv(layer), strict=True):
            assert_one_rounding_apart(blocks[1:], wanted[1:])


def test_runs_leave_in_one_copy_each(monkeypatch):
    """One by one they would come to the same result, only slower: such copies are left out here."""
    copy = plgpu.copy_smem_to_gmem

    def copy_runs(source: Any, destination: Any) -> None:
        if source.shape[0] > 1:
            copy(source, destination)

    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", copy_runs)
    (_, pool), (_, expected) = RUNS.run(), RUNS.expected()
    *_, before, _ = RUNS.arguments()
    for blocks, wanted, old in zip(
        *(p.layer_kv(LAYER) for p in (pool, expected, before)), strict=True
    ):
        assert_one_rounding_apart(blocks[1:3], wanted[1:3])
        np.testing.assert_array_equal(
            np.asarray(blocks[3], np.float32), np.asarray(old[3], np.float32)
        )


def test_padding_is_not_written():
    _, _, _, before, _ = DECODE.arguments()
    _, after = DECODE.run()
    null_row = int(before.first_row(LAYER))
    np.testing.assert_array_equal(
        np.asarray(after.data[null_row], np.float32), np.asarray(before.data[null_row], np.float32)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_missing_term_is_noticed(dtype):
    case = replace(WIDE_DECODE, num_kv_heads=1, group=1, dtype=dtype)
    (q, _), (expected, _) = case.run(), case.expected()
    assert_close(sum_of(q), expected, TERMS_ERROR)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_close(q[0], expected, TERMS_ERROR)


@pytest.mark.parametrize("case", [DECODE, WIDE_DECODE], ids=["narrow", "wide"])
def test_a_missing_wait_is_reported(monkeypatch, capsys, case: Case):
    never_wait_for("there", write_qkv_hopper, monkeypatch)
    assert reports_race(case.run, capsys)


def test_queries_that_leave_before_they_are_committed_are_reported(monkeypatch, capsys):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    assert reports_race(WIDE_DECODE.run, capsys)


def test_what_it_cannot_take():
    def heads(head_dim: int, dtype=jnp.bfloat16) -> jax.Array:
        return jnp.zeros((8, 1, 3, head_dim), dtype)

    def pool(head_dim: int, block_size: int = 16) -> KVPool:
        return KVPool.create(
            num_layers=1,
            num_blocks=1,
            num_kv_heads=1,
            block_size=block_size,
            head_dim=head_dim,
            dtype=jnp.bfloat16,
            layout="hopper",
        )

    assert can_write(heads(64), pool(64)) and can_write(heads(128), pool(128))
    assert not can_write(heads(80), pool(80)), "its pool is padded"
    assert not can_write(heads(256), pool(256))
    assert can_write(heads(64, jnp.float32), pool(64))
    assert not can_write(heads(64, jnp.float16), pool(64))
    assert not can_write(heads(64), pool(64, block_size=8))
