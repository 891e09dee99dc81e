"""The Hopper kernels behind `ops.paged_attention`, in the GPU interpreter: the quick part."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import Shape, make_case, oracle, with_block_dropped, with_layout

from kernels_pallas import attention_hopper, ops
from kernels_pallas.norm_rope import RopeTables
from kernels_pallas.terms import sum_of
from kernels_pallas.tuning import HopperDecodeTuning, HopperPrefillTuning, HopperTuning

TUNING = HopperTuning(HopperDecodeTuning(num_workers=4), HopperPrefillTuning(num_programs=2))
TOLERANCE = 1e-2  # bf16, relative
MIXED = [(1, 30), (1, 1), (1, 16), (6, 6), (1, 9), (10, 31)]


def relative_error(case, expected):
    pool = with_layout(case.pool, ops.pool_layout("hopper_interpret"))
    out, _ = ops.paged_attention(
        *replace(case, pool=pool).args, sm_scale=0.125, impl="hopper_interpret", tuning=TUNING
    )
    actual = np.asarray(out, np.float64)
    assert np.isfinite(actual).all()
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def shape(head_dim, num_tokens, num_rows):
    return Shape(6, 2, head_dim, 16, num_tokens=num_tokens, num_rows=num_rows, dtype=jnp.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_mixed_step_equals_the_oracle(head_dim):
    case = make_case(MIXED, num_decode_rows=3, shape=shape(head_dim, 40, 8))
    expected, _ = oracle(case, sm_scale=0.125)
    assert relative_error(case, expected) < TOLERANCE


def test_a_decode_step_equals_the_oracle_and_a_dropped_block_shows():
    rows = [(1, 1), (1, 40), (1, 17)]
    case = make_case(rows, num_decode_rows=3, shape=shape(64, 4, 4))
    expected, _ = oracle(case, sm_scale=0.125)
    assert relative_error(case, expected) < TOLERANCE
    # The null block stands in for a dropped one, and holds NaN: no error is below the tolerance.
    other, _ = oracle(with_block_dropped(case, 1, 1), sm_scale=0.125)
    assert not relative_error(case, other) < TOLERANCE


def qkv_step(case, impl, dtype):
    """A step from the qkv product on, without norms: real tokens' output, and the layer's pool.

    Args:
      dtype: of the product.
    """
    pool = with_layout(case.pool, ops.pool_layout(impl))
    num_tokens, num_kv_heads, head_dim = case.k_new.shape
    grouped = case.q.reshape(num_tokens, num_kv_heads, -1, head_dim)
    heads = jnp.concatenate([grouped, case.k_new[:, :, None], case.v_new[:, :, None]], axis=2)
    angles = np.random.default_rng(0).uniform(0, 6, (num_tokens, head_dim // 2))
    rope = RopeTables(jnp.float32(np.cos(angles)), jnp.float32(np.sin(angles)))
    step = jax.jit(partial(ops.qkv_attention, sm_scale=0.125, impl=impl))
    out, pool = step(heads.astype(dtype), None, rope, pool, jnp.int32(case.layer), case.metadata)
    num_real = int(case.metadata.cu_q_lens[-1])
    return np.asarray(sum_of(out)[:num_real], np.float64), pool.layer_kv(case.layer)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("rows", "num_decode_rows", "num_tokens", "num_heads"),
    [
        (MIXED, 3, 40, (6, 2)),  # 3 * 64 elements: units that do not fill whole rows
        ([(1, 30), (1, 1), (1, 16)], 3, 8, (2, 2)),
    ],
    ids=["mixed", "decode"],
)
def test_a_step_from_the_qkv_product_on(
    rows, num_decode_rows, num_tokens, num_heads, dtype, monkeypatch
):
    monkeypatch.setattr(attention_hopper, "tuning_for", lambda *_: TUNING)
    q_heads, kv_heads = num_heads
    step = Shape(q_heads, kv_heads, 64, 16, num_tokens=num_tokens, num_rows=8, dtype=jnp.bfloat16)
    case = make_case(rows, num_decode_rows=num_decode_rows, shape=step)
    (out, blocks), (expected, expected_blocks) = (
        qkv_step(case, impl, dtype) for impl in ("hopper_interpret", "xla")
    )
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < TOLERANCE
    for found, wanted in zip(blocks, expected_blocks, strict=True):
        np.testing.assert_allclose(
            np.asarray(found[1:], np.float32), np.asarray(wanted[1:], np.float32), rtol=2**-7
        )
