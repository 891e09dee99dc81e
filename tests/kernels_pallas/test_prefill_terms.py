"""The Hopper prefill kernel with queries and results in two terms, in the interpreter.

Where a row's keys are all equal, every visible one has a weight of 1, which no rounding changes:
the result is exact but for its own rounding. A sink's share then still depends on the query, so
that the query's second term shows, too.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import AttentionCase, Shape, make_case
from helpers.hopper_interpreter import interpret_prefill, reports_race
from helpers.row_oracle import row_oracle

from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.terms import in_terms, sum_of
from kernels_pallas.tuning import HopperPrefillTuning, hopper_tuning
from kernels_pallas.write_kv import write_kv

SM_SCALE = 0.3
# Of 2 terms of bfloat16 each (2^-17), of sums in float32 and of exp2. One term leaves 100 times as
# much.
TOLERANCE = 4e-5


@dataclass(frozen=True)
class Variant:
    rows: tuple[tuple[int, int], ...]  # (q_len, kv_len)
    head_dim: int = 64
    dtype: Any = jnp.bfloat16
    window: int | None = None
    soft_cap: float | None = None

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(SM_SCALE, self.window, self.soft_cap)

    @property
    def tuning(self) -> HopperPrefillTuning:
        whole = hopper_tuning(num_units=1, head_dim=self.head_dim, num_programs=2, num_terms=2)
        return whole.prefill


SMALL_STEP = ((20, 90), (5, 5), (7, 140))  # only the first begins at a multiple of 8 tokens
VARIANTS = {
    "few_tokens": Variant(SMALL_STEP),
    "few_tokens_of_128_window": Variant(SMALL_STEP, head_dim=128, window=40),
    "many_tokens_soft_cap": Variant(((70, 100), (75, 80)), soft_cap=2.0),
    "whole_tiles_of_128_float16": Variant(
        ((130, 140), (68, 70)), head_dim=128, dtype=jnp.float16, window=100
    ),
    "few_tokens_of_256": Variant(SMALL_STEP, head_dim=256),
}
SLOW = ("whole_tiles_of_128_float16",)
SINKS = jnp.asarray([-1.0, 0.5])


def prepared(variant: Variant, *, equal_keys: bool) -> AttentionCase:
    """A step whose queries are float32. Unused slots of its pool are NaN."""
    width = -(-max(kv_len for _, kv_len in variant.rows) // 16)
    shape = Shape(
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=variant.head_dim,
        block_size=16,
        num_blocks=len(variant.rows) * width,
        table_width=width,
        num_rows=len(variant.rows) + 1,
        num_tokens=sum(q_len for q_len, _ in variant.rows) + 3,
        dtype=variant.dtype,
    )
    case = make_case(list(variant.rows), shape=shape, window=variant.window)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal(case.q.shape), jnp.float32)
    case = replace(case, q=jnp.where(jnp.isnan(case.q), jnp.nan, q))
    if equal_keys:
        # Small enough that a sink has its share.
        key = jnp.asarray(rng.standard_normal(variant.head_dim) / 2, variant.dtype)

        def equal(k):
            return jnp.where(jnp.isnan(k), k, key)

        k, v = case.pool.layer_kv(case.layer)
        pool = case.pool.with_layer_kv(case.layer, equal(k), v)
        case = replace(case, k_new=equal(case.k_new), pool=pool)
    return case


def computed(variant: Variant, case: AttentionCase, q: jax.Array) -> jax.Array:
    """The kernel's result for q, float[num_terms, num_tokens, num_q_heads, head_dim]."""
    slots = case.metadata.slot_mapping
    pool = write_kv(case.pool, case.layer, case.k_new, case.v_new, slots)
    return interpret_prefill(q, replace(case, pool=pool), variant.options, SINKS, variant.tuning)


def error(case: AttentionCase, variant: Variant, out: jax.Array) -> np.ndarray:
    """Of the sum of a result's terms, for the tokens that are no padding."""
    expected = row_oracle(case, **vars(variant.options), sinks=SINKS)
    num_real = int(case.metadata.cu_q_lens[-1])
    return (np.asarray(sum_of(out), np.float64) - expected)[:num_real]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.long if x in SLOW else ()) for x in VARIANTS]
)
def test_equal_keys_give_nearly_float32(name, capsys):
    """Neither term of queries nor results may be missing anywhere: see the controls below."""
    variant = VARIANTS[name]
    case = prepared(variant, equal_keys=True)
    q = in_terms(case.q, variant.dtype)

    def check():
        np.testing.assert_allclose(
            error(case, variant, computed(variant, case, q)), 0, atol=TOLERANCE
        )

    assert not reports_race(check, capsys)


@pytest.mark.parametrize("name", ["few_tokens", "few_tokens_of_128_window"])
def test_random_keys_leave_what_the_weights_rounding_does(name):
    variant = VARIANTS[name]
    case = prepared(variant, equal_keys=False)

    def rms(num_terms: int) -> float:
        q = case.q if num_terms == 2 else case.q.astype(variant.dtype)
        q = in_terms(q, variant.dtype)
        return float(np.sqrt(np.mean(error(case, variant, computed(variant, case, q)) ** 2)))

    assert rms(2) < rms(1) / 2


@pytest.fixture(scope="module")
def case() -> AttentionCase:
    return prepared(VARIANTS["few_tokens"], equal_keys=True)


class TestNegativeControls:
    """Without one of the four terms the comparison above must fail, by far."""

    @pytest.mark.parametrize("term", [0, 1])
    def test_of_queries(self, case, term):
        variant = VARIANTS["few_tokens"]
        q = in_terms(case.q, variant.dtype).at[term].set(0)
        assert np.abs(error(case, variant, computed(variant, case, q))).max() > 10 * TOLERANCE

    @pytest.mark.parametrize("term", [0, 1])
    def test_of_results(self, case, term):
        variant = VARIANTS["few_tokens"]
        out = computed(variant, case, in_terms(case.q, variant.dtype)).at[term].set(0)
        assert np.abs(error(case, variant, out)).max() > 10 * TOLERANCE
