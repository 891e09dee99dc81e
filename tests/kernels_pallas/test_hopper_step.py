"""The Hopper kernels behind `ops.paged_attention`, in the GPU interpreter: the quick part."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import Shape, make_case, oracle, with_block_dropped, with_layout

from kernels_pallas import ops
from kernels_pallas.tuning import HopperDecodeTuning, HopperPrefillTuning, HopperTuning

TUNING = HopperTuning(HopperDecodeTuning(num_programs=2), HopperPrefillTuning(num_programs=2))
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
