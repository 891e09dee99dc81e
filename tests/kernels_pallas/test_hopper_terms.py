"""Float32 queries over a narrow pool: the Hopper decode kernel reads and writes two terms."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import AttentionCase, Shape, make_case, oracle
from helpers.hopper_interpreter import interpret, reports_race

from kernels_pallas.metadata import AttentionOptions

OPTIONS = AttentionOptions(0.125)
# The second worker's segments begin and end inside units: whole results, and parts to be merged.
DECODE = ((1, 70), (1, 1), (1, 200), (1, 129))


@dataclass(frozen=True)
class Variant:
    group: int = 3
    head_dim: int = 64
    dtype: Any = jnp.bfloat16

    def case(self, factor: float) -> AttentionCase:
        """Its queries, random ones times `factor`, are float32."""
        num_rows = len(DECODE) + 1
        shape = Shape(
            num_q_heads=2 * self.group,
            num_kv_heads=2,
            head_dim=self.head_dim,
            block_size=16,
            num_blocks=13 * num_rows,
            table_width=13,
            num_rows=num_rows,
            num_tokens=num_rows,
            dtype=self.dtype,
        )
        case = make_case(list(DECODE), num_decode_rows=len(DECODE), shape=shape)
        return replace(case, q=case.q.astype(jnp.float32) * factor)


VARIANTS = {
    "decode": Variant(),
    "decode of 128, float16": Variant(group=4, head_dim=128, dtype=jnp.float16),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_queries_are_not_rounded(name, capsys):
    """Scores of tens: what rounding queries takes from them shows."""
    variant = VARIANTS[name]
    case = variant.case(8.04)
    found = []
    assert not reports_race(lambda: found.append(error_of(case, case)), capsys)
    rounded = replace(case, q=case.q.astype(variant.dtype).astype(jnp.float32))
    assert 5 * found[0] < error_of(rounded, case)


@pytest.mark.parametrize("name", VARIANTS)
def test_results_are_not_rounded(name):
    """Of queries that are 0 all weights are 1, and only the result could be rounded."""
    case = VARIANTS[name].case(0.0)
    error = error_of(case, case)
    narrow = replace(case, q=case.q.astype(VARIANTS[name].dtype))
    assert error < 2e-5
    assert error_of(narrow, case) > 10 * error


def error_of(case: AttentionCase, wanted: AttentionCase) -> float:
    """Of the kernels' answer to one step, relative to the oracle's to another."""
    out, _ = interpret(case, OPTIONS)
    assert out.dtype == case.q.dtype
    expected, _ = oracle(wanted, sm_scale=OPTIONS.sm_scale)
    actual = np.asarray(out, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
