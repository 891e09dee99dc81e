"""The Hopper kernel's products, interpreted: against float32 products, without a race."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hopper_interpreter import never_wait_for, reports_race
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import product_hopper
from kernels_pallas.product_hopper import (
    ProductTiling,
    can_multiply,
    gated_product,
    product,
    product_tiling,
)
from kernels_pallas.terms import in_terms, result_dtype, sum_of


@dataclass(frozen=True)
class Case:
    """A product, and how it is cut."""

    num_rows: int
    inner: int
    columns: int
    tiling: ProductTiling
    is_gated: bool = False
    dtype: Any = jnp.bfloat16
    num_terms: int = 1

    def operands(self) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(0)
        width = self.columns * (2 if self.is_gated else 1)
        x = jnp.asarray(rng.standard_normal((self.num_rows, self.inner)) / 8, jnp.float32)
        w = jnp.asarray(rng.standard_normal((self.inner, width)) / 8, self.dtype)
        return in_terms(x if self.num_terms == 2 else x.astype(self.dtype), self.dtype), w

    def run(self) -> np.ndarray:
        """The shares' sums, or the terms of a gated product; interpreted."""
        params = plgpu.InterpretGPUParams(detect_races=True)
        x, w = self.operands()
        if self.is_gated:
            return np.asarray(gated_product(x, w, self.tiling, interpret=params), np.float32)
        out = product(x, w, self.tiling, result_dtype(x), interpret=params)
        return np.asarray(out, np.float32)

    def expected(self, num_terms: int = 2) -> np.ndarray:
        """Float32, of no more than so many terms of x."""
        x, w = self.operands()
        y = np.asarray(sum_of(x[:num_terms])) @ np.asarray(w, np.float32)
        if not self.is_gated:
            return y
        gate, up = np.split(y, 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up


CASES = {
    "whole": Case(64, 192, 128, ProductTiling(64, 1, 2)),
    "few rows": Case(8, 192, 128, ProductTiling(64, 1, 2)),
    "split unevenly": Case(16, 320, 128, ProductTiling(64, 2, 2)),
    "wide tile, float16": Case(64, 192, 256, ProductTiling(128, 1, 2), dtype=jnp.float16),
    "gated": Case(24, 256, 128, ProductTiling(64, 1, 3), is_gated=True),
    "two terms": Case(24, 192, 128, ProductTiling(64, 1, 2), num_terms=2),
    "two terms, split": Case(8, 192, 64, ProductTiling(64, 2, 2), num_terms=2),
    "two terms, gated": Case(8, 192, 64, ProductTiling(64, 1, 2), is_gated=True, num_terms=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_are_right_and_no_race_is_reported(case, capsys):
    def check():
        found = case.run()
        num_outputs = case.num_terms if case.is_gated else case.tiling.split
        assert found.shape == (num_outputs, case.num_rows, case.columns)
        expected = case.expected()
        # Of a split product, and with two terms, sums in float32; of others, rounded once.
        rounding = float(jnp.finfo(case.dtype).eps)
        if case.num_terms > 1:
            rounding = 1e-5
        elif case.tiling.split > 1:
            rounding = 1e-6
        np.testing.assert_allclose(
            found.sum(axis=0), expected, rtol=rounding, atol=1e-5 * np.abs(expected).max()
        )

    assert not reports_race(check, capsys)


def test_a_share_that_is_left_out_shows():
    case = CASES["split unevenly"]
    assert np.abs(case.run()[:1].sum(axis=0) - case.expected()).max() > 0.1


@pytest.mark.parametrize("name", ["two terms", "two terms, gated"])
def test_a_second_term_that_is_left_out_shows(name):
    case = CASES[name]
    found, expected = case.run().sum(axis=0), case.expected()
    error = np.abs(found - expected).max()
    assert np.abs(found - case.expected(num_terms=1)).max() > 50 * error
    if case.is_gated:
        assert np.abs(case.run()[0] - expected).max() > 50 * error


@pytest.mark.parametrize("barrier", ["there", "read"])
def test_a_missing_wait_is_reported(barrier, monkeypatch, capsys):
    never_wait_for(barrier, product_hopper, monkeypatch)
    assert reports_race(CASES["whole"].run, capsys)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("x", "w", "is_gated"),
    [
        (array(1, 72, 128), array(128, 64), False),
        (array(2, 40, 128), array(128, 64), False),
        (array(1, 12, 128), array(128, 64), False),
        (array(1, 8, 96), array(96, 64), False),
        (array(1, 8, 128), array(128, 96), False),
        (array(1, 8, 128), array(128, 192), True),
        (array(1, 8, 128, dtype=jnp.float32), array(128, 64, dtype=jnp.float32), False),
        (array(1, 8, 128), array(128, 64, dtype=jnp.float16), False),
    ],
    ids=[
        "rows",
        "rows of two terms",
        "odd rows",
        "inner",
        "columns",
        "half of the columns",
        "float32",
        "dtypes",
    ],
)
def test_what_the_kernel_does_not_take(x, w, is_gated):
    assert can_multiply(array(1, 8, 128), array(128, 128), is_gated=is_gated)
    assert not can_multiply(x, w, is_gated=is_gated)


@pytest.mark.parametrize(
    ("num_terms", "num_rows"), [(1, 8), (1, 32), (1, 64), (2, 8), (2, 16), (2, 32)]
)
@pytest.mark.parametrize(
    ("inner", "columns"),
    [(2560, 6144), (4096, 2560), (9728, 2560), (576, 960), (64, 64), (5120, 10240), (3072, 1024)],
)
def test_a_tiling_covers_columns_and_shares_have_steps(num_terms, num_rows, inner, columns):
    x = array(num_terms, num_rows, inner)
    tiling = product_tiling(x, columns, is_gated=False, num_programs=132)
    assert columns % tiling.tile == 0
    assert 1 <= tiling.split <= inner // product_hopper.STEP
    # Shared memory of a Hopper multiprocessor, and no more programs than run at once where it can.
    slot = (num_terms * num_rows + tiling.tile) * product_hopper.STEP * 2
    assert tiling.stages * slot + num_rows * tiling.tile * 4 < 227 << 10
    programs = columns // tiling.tile * tiling.split
    assert programs <= 132 or 2 * tiling.stages * slot < 227 << 10


def test_a_gated_tiling_is_whole():
    tiling = product_tiling(array(1, 8, 2560), 9728, is_gated=True, num_programs=132)
    assert tiling.split == 1
