"""The oracle against cases computed by hand: it shares nothing with what it judges."""

import math

import numpy as np
import pytest
from helpers.attention_cases import make_case, oracle
from helpers.row_oracle import row_oracle

from kernels_pallas.reference import paged_attention_reference, write_kv_reference

LOG2, LOG3 = math.log(2.0), math.log(3.0)


def attend(q, k_blocks, v_blocks, tables, q_lens, kv_lens, **options):
    defaults = {"sm_scale": 1.0, "window": None, "soft_cap": None, "sinks": None}
    return paged_attention_reference(
        np.asarray(q, np.float32),
        np.asarray(k_blocks, np.float32),
        np.asarray(v_blocks, np.float32),
        np.asarray(tables, np.int32),
        np.asarray(q_lens, np.int32),
        np.asarray(kv_lens, np.int32),
        **(defaults | options),
    )


# Two blocks of two slots, one head of width 1; block 2 comes first in the table.
# Keys 0, log 2, log 3 with values 6, 12, 18 at positions 0, 1, 2.
K = [[[[99], [99]]], [[[LOG3], [99]]], [[[0], [LOG2]]]]
V = [[[[-1], [-1]]], [[[18], [-1]]], [[[6], [12]]]]
TABLE = [[2, 1]]


def test_one_query_over_a_permuted_table():
    # Weights 1 : 2 : 3.
    out = attend([[[1]]], K, V, TABLE, [1], [3])
    assert out.item() == pytest.approx((6 * 1 + 12 * 2 + 18 * 3) / 6)


def test_causal_within_a_chunk():
    out = attend([[[1]], [[1]]], K, V, TABLE, [2], [3])
    assert out.ravel() == pytest.approx([(6 + 24) / 3, (6 + 24 + 54) / 6])


def test_scale():
    # Twice the scores: weights 1 : 4 : 9.
    out = attend([[[1]]], K, V, TABLE, [1], [3], sm_scale=2.0)
    assert out.item() == pytest.approx((6 + 12 * 4 + 18 * 9) / 14)


@pytest.mark.parametrize(("window", "expected"), [(1, 18), (2, (24 + 54) / 5), (3, 14), (4, 14)])
def test_window_counts_the_query_itself(window, expected):
    assert attend([[[1]]], K, V, TABLE, [1], [3], window=window).item() == pytest.approx(expected)


def test_soft_cap():
    weights = [math.exp(0.5 * math.tanh(score / 0.5)) for score in (0, LOG2, LOG3)]
    expected = np.dot(weights, [6, 12, 18]) / sum(weights)
    assert attend([[[1]]], K, V, TABLE, [1], [3], soft_cap=0.5).item() == pytest.approx(expected)


def test_sink_takes_probability_and_is_not_scaled():
    # Weights 1 : 4 : 9 and the sink's 4.
    sinks = np.asarray([2 * LOG2])
    out = attend([[[1]]], K, V, TABLE, [1], [3], sm_scale=2.0, sinks=sinks)
    assert out.item() == pytest.approx((6 + 48 + 162) / 18)


def test_query_heads_share_kv_heads():
    k = np.zeros((2, 2, 1, 1))
    v = np.zeros((2, 2, 1, 1))
    v[1, :, 0, 0] = [5, 7]
    out = attend(np.ones((1, 4, 1)), k, v, [[1]], [1], [1])
    assert out.ravel().tolist() == [5, 5, 7, 7]


def test_rows_of_length_zero_and_padding_tokens():
    out = attend([[[1]], [[1]], [[np.nan]]], K, V, [[2, 1], [0, 0], [2, 0]], [1, 0, 1], [3, 0, 1])
    assert out.ravel() == pytest.approx([14, 6, 0])


def test_write_puts_each_token_in_its_slot_and_nothing_else():
    k = np.zeros((3, 1, 2, 1))
    new = np.asarray([[[1.0]], [[2.0]]])
    k_after, v_after = write_kv_reference(k, k, new, -new, np.asarray([5, 2]))
    assert k_after.ravel().tolist() == [0, 0, 2, 0, 0, 1]
    assert v_after.ravel().tolist() == [0, 0, -2, 0, 0, -1]
    assert not k.any()


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"soft_cap": 0.7}, {"sinks": np.linspace(-1, 1, 4)}, {"window": 1}],
    ids=str,
)
def test_row_by_row_equals_key_by_key(options):
    """What scripts/test_gpu compares with."""
    window = options.get("window")
    rows = [(1, 9), (1, 1), (7, 20), (4, 4)]
    case = make_case(rows, num_decode_rows=2, window=window)
    expected, _ = oracle(case, sm_scale=0.3, **options)
    np.testing.assert_allclose(row_oracle(case, sm_scale=0.3, **options), expected, atol=1e-12)
    assert not np.allclose(row_oracle(case, sm_scale=0.4, **options), expected, atol=1e-3) or (
        window == 1
    )
