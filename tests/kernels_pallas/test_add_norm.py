"""Sums of parts and their norms: the Hopper kernel, interpreted, and XLA's operations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hopper_interpreter import reports_race
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import ops
from kernels_pallas.add_norm_hopper import add_norm, can_add_norm
from kernels_pallas.terms import num_terms_of, sum_of

EPS = 1e-5


def operands(
    num_parts: int, num_rows: int, size: int, dtype: Any = jnp.bfloat16
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((num_rows, size)), jnp.float32)
    parts = jnp.asarray(rng.standard_normal((num_parts, num_rows, size)), jnp.float32)
    return x, parts, jnp.asarray(1 + rng.standard_normal(size) / 8, dtype)


def expected(x: jax.Array, parts: jax.Array, scale: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The sum and its norm, in float64."""
    total = np.asarray(x, np.float64) + np.asarray(parts, np.float64).sum(axis=0)
    root = np.sqrt(np.square(total).mean(axis=1, keepdims=True) + EPS)
    return total, total / root * np.asarray(scale, np.float64)


def assert_right(found: tuple[Any, Any], arrays: tuple[Any, Any, Any], rounding: float) -> None:
    total, normed = expected(*arrays)
    np.testing.assert_allclose(found[0], total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sum_of(found[1]), normed, rtol=rounding, atol=1e-5)


def rounding_of(num_terms: int, dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) / 2 * 1.01 if num_terms == 1 else 2.0**-16


@pytest.mark.parametrize(
    ("num_terms", "num_parts", "num_rows", "size", "dtype"),
    [
        (1, 3, 8, 256, jnp.bfloat16),
        (2, 1, 8, 512, jnp.bfloat16),
        (2, 2, 3, 384, jnp.bfloat16),
        (1, 2, 2, 128, jnp.float16),
    ],
)
def test_the_kernel_is_right_and_no_race_is_reported(
    num_terms, num_parts, num_rows, size, dtype, capsys
):
    arrays = operands(num_parts, num_rows, size, dtype)

    def check():
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        found = add_norm(*arrays, EPS, num_terms=num_terms, interpret=interpret)
        assert found[1].shape == (num_terms, num_rows, size)
        assert found[1].dtype == dtype
        assert_right(found, arrays, rounding_of(num_terms, dtype))

    assert not reports_race(check, capsys)


@pytest.mark.parametrize("operand_dtype", [jnp.bfloat16, jnp.float32])
def test_xlas_operations_give_the_same(operand_dtype):
    arrays = operands(3, 5, 96)
    found = ops.add_norm(*arrays, EPS, operand_dtype=operand_dtype, impl="xla")
    num_terms = num_terms_of(operand_dtype, jnp.bfloat16)
    assert len(found[1]) == num_terms
    assert_right(found, arrays, rounding_of(num_terms, jnp.bfloat16))


@pytest.mark.parametrize("operand_dtype", [jnp.bfloat16, jnp.float32])
def test_a_hopper_gpu_gets_the_kernel(operand_dtype, monkeypatch):
    interpreted = functools.partial(add_norm, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(ops.implementations, "hopper_multiprocessors", lambda impl: 132)
    monkeypatch.setattr(ops.add_norm_hopper, "add_norm", interpreted)
    arrays = operands(3, 8, 128)
    found = ops.add_norm(*arrays, EPS, operand_dtype=operand_dtype)
    assert_right(found, arrays, rounding_of(len(found[1]), jnp.bfloat16))
    assert len(found[1]) == num_terms_of(operand_dtype, jnp.bfloat16)


def test_a_part_or_a_term_that_is_left_out_shows():
    x, parts, scale = operands(3, 5, 128)
    total, terms = ops.add_norm(x, parts, scale, EPS, operand_dtype=jnp.float32, impl="xla")
    for found, arrays in (
        ((total, terms), (x, parts[:2], scale)),
        ((total, terms[:1]), (x, parts, scale)),
    ):
        with pytest.raises(AssertionError):
            assert_right(found, arrays, rounding_of(2, jnp.bfloat16))


def test_x_keeps_its_type():
    """Of long steps it is the model's: they are added to it rounded."""
    x, parts, scale = operands(1, 5, 96)
    x, parts = x.astype(jnp.bfloat16), parts.astype(jnp.bfloat16)
    total, terms = ops.add_norm(x, parts, scale, EPS, operand_dtype=jnp.bfloat16, impl="xla")
    assert total.dtype == terms.dtype == jnp.bfloat16
    np.testing.assert_array_equal(total, x + parts[0])


def test_what_the_kernel_takes():
    def takes(num_rows: int, size: int, x_dtype: Any = jnp.float32) -> bool:
        x = jax.ShapeDtypeStruct((num_rows, size), x_dtype)
        return can_add_norm(x, jax.ShapeDtypeStruct((2, num_rows, size), jnp.float32))

    assert takes(64, 2560)
    assert takes(8, 8192)
    assert not takes(65, 2560)
    assert not takes(64, 576)
    assert not takes(64, 8192 + 128)
    assert not takes(64, 2560, jnp.bfloat16)
