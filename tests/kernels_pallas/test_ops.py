"""Which implementation runs, and what a named one refuses."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import (
    Shape,
    assert_close,
    assert_same_pool,
    make_case,
    oracle,
    with_layout,
)

from kernels_pallas import ops, xla

ROWS = [(1, 9), (1, 4), (6, 6)]


@pytest.fixture
def case():
    return make_case(ROWS, num_decode_rows=2, shape=Shape(num_tokens=10, num_rows=4))


def test_none_takes_the_platforms_own(case, monkeypatch):
    calls = []
    original = xla.paged_attention
    monkeypatch.setattr(xla, "paged_attention", lambda *a: calls.append(1) or original(*a))
    out, _ = ops.paged_attention(*case.args, sm_scale=0.3)
    assert calls == [1]
    assert_close(out, oracle(case, sm_scale=0.3)[0])


def test_the_oracle_runs_inside_jit(case):
    sinks = jnp.arange(4.0)
    out, pool = jax.jit(
        lambda args: ops.paged_attention(
            *args, sm_scale=0.3, window=7, soft_cap=5.0, sinks=sinks, impl="reference"
        )
    )(case.args)
    expected, expected_pool = oracle(case, sm_scale=0.3, window=7, soft_cap=5.0, sinks=sinks)
    np.testing.assert_array_equal(out, expected.astype(np.float32))
    assert_same_pool(pool, expected_pool)


@pytest.mark.parametrize(("impl", "platform"), [("hopper", "gpu"), ("tpu", "tpu")])
def test_a_named_implementation_never_falls_back(case, impl, platform):
    match = f"impl='{impl}': .*; platform='cpu' is not {platform}"
    with pytest.raises(NotImplementedError, match=match):
        ops.paged_attention(*case.args, sm_scale=0.3, impl=impl)


@pytest.mark.parametrize(
    ("impl", "q_dtype", "pool_dtype", "reason"),
    [
        ("tpu_interpret", jnp.float32, jnp.float16, "q.dtype=float32 is not pool.dtype=float16"),
        ("hopper_interpret", jnp.int32, jnp.bfloat16, "q.dtype=int32 is neither"),
    ],
    ids=["another type than the pool's", "queries that are no floats"],
)
def test_dtypes_that_no_kernel_takes_are_refused(impl, q_dtype, pool_dtype, reason):
    case = make_case([(6, 6)], shape=Shape(4, 2, 64, 16, num_tokens=8, dtype=pool_dtype))
    pool = with_layout(case.pool, ops.pool_layout(impl))
    case = replace(case, q=case.q.astype(q_dtype), pool=pool)
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        ops.paged_attention(*case.args, sm_scale=0.3, impl=impl)


@pytest.mark.parametrize("shape", [(8, 64), (0, 8, 64), (3, 8, 64)])
def test_operands_have_one_term_or_two(shape):
    for multiply in (ops.matmul, ops.matmul_in_parts, ops.gated_matmul):
        with pytest.raises(ValueError, match=re.escape(f"x.shape={shape} must ")):
            multiply(jnp.zeros(shape), jnp.zeros((64, 64)))


def test_xla_names_every_reason(case):
    args = (case.q.astype(jnp.float8_e4m3fn), *case.args[1:])
    match = (
        "impl='xla': q.dtype=float8_e4m3fn is not float32, bfloat16 or float16; "
        "q.dtype=float8_e4m3fn is neither pool.dtype=float32 nor float32"
    )
    with pytest.raises(NotImplementedError, match=match):
        ops.paged_attention(*args, sm_scale=0.3)


def test_float32_queries_of_a_narrow_pool_are_not_rounded():
    case = make_case(ROWS, num_decode_rows=2, shape=Shape(num_tokens=10, dtype=jnp.bfloat16))
    case = replace(case, q=case.q.astype(jnp.float32) * 1.01)
    out, _ = ops.paged_attention(*case.args, sm_scale=0.3, impl="xla")
    assert out.dtype == jnp.float32
    assert_close(out, oracle(case, sm_scale=0.3)[0])
    with pytest.raises(NotImplementedError, match=r"q\.dtype=float32 is not pool\.dtype"):
        ops.paged_attention(*case.args, sm_scale=0.3, impl="tpu_interpret")


def test_unknown_names_are_refused(case):
    with pytest.raises(ValueError, match=r"impl='cuda' must be one of \('xla', "):
        ops.paged_attention(*case.args, sm_scale=0.3, impl="cuda")


def test_cu_q_lens(case):
    assert case.metadata.cu_q_lens.tolist() == [0, 1, 2, 8, 8]
