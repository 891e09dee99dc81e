"""One class of tests over every implementation of `paged_attention`.

Every case has NaN in all slots that no query may see (`helpers.attention_cases`), so a comparison
with the oracle also proves that nothing else was read.
"""

import functools
from dataclasses import replace
from typing import Any

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
    with_block_dropped,
    with_layout,
    with_rows_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import ops
from kernels_pallas.tuning import AttentionTuning, TPUPhaseTuning, TPUTuning

# The interpreter takes seconds to compile each size; test_attention_tpu.py is its quick part.
IMPLEMENTATIONS = ["xla", pytest.param("tpu_interpret", marks=pytest.mark.long)]
SM_SCALE = 0.3
# Several tiles a row, q tiles that end inside a row, a table that is not whole tiles wide.
SMALL_TILES = AttentionTuning(kv_tile=12, q_tile=4)

DECODE = [(1, 1), (1, 4), (1, 5), (1, 17), (1, 40)]
PREFILL = [(3, 3), (9, 9), (1, 1), (16, 16)]
CHUNKED = [(5, 12), (4, 4), (7, 40), (1, 33), (8, 9)]
MIXED = [(1, 30), (1, 1), (1, 16), (6, 6), (1, 9), (10, 31)]

BUCKET = Shape(num_tokens=32, num_rows=8)

RAGGED = {
    "decode": (DECODE, 5, Shape()),
    "decode_padded_rows": (DECODE, 5, Shape(num_tokens=8, num_rows=8)),
    "decode_in_mixed_bucket": (DECODE, 5, Shape(num_tokens=16, num_rows=8)),
    "one_row": ([(1, 23)], 1, Shape()),
    "prefill": (PREFILL, 0, Shape()),
    "prefill_padded": (PREFILL, 0, Shape(num_tokens=40, num_rows=6)),
    "one_long_prompt": ([(37, 37)], 0, Shape(num_tokens=40, num_rows=2)),
    "chunked_with_cached_prefix": (CHUNKED, 0, Shape()),
    "mixed": (MIXED, 3, Shape()),
    "mixed_padded": (MIXED, 3, BUCKET),
    "no_rows": ([], 0, Shape(num_tokens=8, num_rows=4)),
    "no_rows_decode_bucket": ([], 0, Shape(num_tokens=4, num_rows=4)),
}


def run(args, sinks=None, *, impl, tuning=None, **options):
    q, k_new, v_new, pool, layer, metadata = args
    args = q, k_new, v_new, with_layout(pool, ops.pool_layout(impl)), layer, metadata
    if tuning is not None and impl == "tpu_interpret":
        tuning = tpu_tuning(tuning)
    return _run(args, sinks, impl=impl, tuning=tuning, **options)


def tpu_tuning(tuning):
    """The same tiles as nearly as the TPU's kernels have them, and few of everything else."""
    q_tile = 1 << (tuning.q_tile - 1).bit_length()
    tile = tuning.kv_tile
    return TPUTuning(TPUPhaseTuning(tile, tile, 2, 2), TPUPhaseTuning(tile, tile, 2, q_tile))


@functools.partial(jax.jit, static_argnames=("sm_scale", "window", "soft_cap", "impl", "tuning"))
def _run(args, sinks, *, impl, sm_scale=SM_SCALE, window=None, soft_cap=None, tuning=None):
    return ops.paged_attention(
        *args,
        sm_scale=sm_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        impl=impl,
        tuning=tuning,
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
class TestPagedAttention:
    @pytest.mark.parametrize("name", RAGGED)
    def test_ragged_rows(self, impl, name):
        rows, num_decode_rows, shape = RAGGED[name]
        case = make_case(rows, num_decode_rows=num_decode_rows, shape=shape)
        expected, expected_pool = oracle(case, sm_scale=SM_SCALE)
        out, pool = run(case.args, impl=impl, tuning=SMALL_TILES)
        assert_close(out, expected)
        assert_same_pool(pool, expected_pool)

    @pytest.mark.parametrize(("kv_tile", "q_tile"), [(4, 1), (8, 32), (64, 3)])
    def test_tuning_changes_nothing(self, impl, kv_tile, q_tile):
        case = make_case(MIXED, num_decode_rows=3, shape=BUCKET)
        out, _ = run(case.args, impl=impl, tuning=AttentionTuning(kv_tile, q_tile))
        assert_close(out, oracle(case, sm_scale=SM_SCALE)[0])

    def test_padding_tokens_give_zeros(self, impl):
        for num_tokens in (8, 16):
            case = make_case(
                DECODE, num_decode_rows=5, shape=Shape(num_tokens=num_tokens, num_rows=8)
            )
            out, _ = run(case.args, impl=impl, tuning=SMALL_TILES)
            np.testing.assert_array_equal(np.asarray(out[5:]), 0)

    @pytest.mark.parametrize("group", [1, 3, 8])
    def test_grouped_query_heads(self, impl, group):
        shape = Shape(num_q_heads=2 * group)
        case = make_case(MIXED, num_decode_rows=3, shape=shape)
        out, _ = run(case.args, impl=impl, tuning=SMALL_TILES)
        assert_close(out, oracle(case, sm_scale=SM_SCALE)[0])

    @pytest.mark.parametrize(("head_dim", "block_size"), [(8, 1), (64, 16), (80, 8), (256, 2)])
    def test_head_dims_and_block_sizes(self, impl, head_dim, block_size):
        shape = Shape(
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=160 // block_size,
            table_width=40 // block_size + 1,
        )
        rows = [(1, 30), (1, 1), (6, 6), (10, 31)]
        case = make_case(rows, num_decode_rows=2, shape=shape)
        out, _ = run(case.args, impl=impl, sm_scale=head_dim**-0.5)
        assert_close(out, oracle(case, sm_scale=head_dim**-0.5)[0])

    @pytest.mark.parametrize("window", [1, 8, 13])
    def test_window_never_reads_blocks_before_it(self, impl, window):
        for rows, num_decode_rows in ((DECODE, 5), (MIXED, 3), (CHUNKED, 0)):
            shape = Shape() if rows is DECODE else BUCKET
            case = make_case(rows, num_decode_rows=num_decode_rows, shape=shape, window=window)
            out, _ = run(case.args, impl=impl, window=window, tuning=SMALL_TILES)
            assert_close(out, oracle(case, sm_scale=SM_SCALE, window=window)[0])

    def test_soft_cap_and_sinks(self, impl):
        sinks = jnp.asarray([-2.0, 0.5, 3.0, 8.0], jnp.float32)
        for rows, num_decode_rows in ((DECODE, 5), (MIXED, 3)):
            shape = Shape() if rows is DECODE else BUCKET
            case = make_case(rows, num_decode_rows=num_decode_rows, shape=shape)
            cases: list[dict[str, Any]] = [
                {"soft_cap": 0.7},
                {"sinks": sinks},
                {"soft_cap": 2.0, "sinks": sinks, "window": 9},
            ]
            for options in cases:
                out, _ = run(case.args, impl=impl, tuning=SMALL_TILES, **options)
                assert_close(out, oracle(case, sm_scale=SM_SCALE, **options)[0])

    def test_sinks_leave_padding_at_zero(self, impl):
        shape = Shape(num_tokens=8, num_rows=8)
        case = make_case(DECODE, num_decode_rows=5, shape=shape)
        out, _ = run(case.args, jnp.ones(4, jnp.float32), impl=impl)
        np.testing.assert_array_equal(np.asarray(out[5:]), 0)

    def test_large_scores_stay_finite(self, impl):
        case = make_case(MIXED, num_decode_rows=3, shape=BUCKET)
        out, _ = run(case.args, impl=impl, sm_scale=100.0, tuning=SMALL_TILES)
        expected = oracle(case, sm_scale=100.0)[0]
        # Scores of several hundred: float32 leaves their differences about 1e-4.
        np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-3, atol=1e-3)

    def test_bfloat16(self, impl):
        case = make_case(MIXED, num_decode_rows=3, shape=Shape(dtype=jnp.bfloat16))
        out, pool = run(case.args, impl=impl, tuning=SMALL_TILES)
        expected, expected_pool = oracle(case, sm_scale=SM_SCALE)
        assert out.dtype == jnp.bfloat16
        assert_close(out, expected)
        assert_same_pool(pool, expected_pool)

    def test_every_layer_is_its_own(self, impl):
        shape = replace(BUCKET, num_layers=3)
        for layer in range(3):
            case = make_case(MIXED, num_decode_rows=3, shape=shape, layer=layer)
            out, pool = run(case.args, impl=impl, tuning=SMALL_TILES)
            expected, expected_pool = oracle(case, sm_scale=SM_SCALE)
            assert_close(out, expected)
            assert_same_pool(pool, expected_pool)

    def test_python_layer_equals_traced_layer(self, impl):
        case = make_case(DECODE, num_decode_rows=5)
        case = replace(case, pool=with_layout(case.pool, ops.pool_layout(impl)))
        out, _ = ops.paged_attention(**vars(case), sm_scale=SM_SCALE, impl=impl)
        assert_close(out, oracle(case, sm_scale=SM_SCALE)[0])

    def test_two_steps_in_a_row(self, impl):
        """What one step writes, the next one reads."""
        first = make_case([(6, 6), (5, 5)], num_decode_rows=0, seed=3)
        _, pool = run(first.args, impl=impl)
        second = make_case([(1, 7), (1, 6)], num_decode_rows=2, seed=3)
        np.testing.assert_array_equal(
            np.asarray(first.metadata.block_tables)[:, 0],
            np.asarray(second.metadata.block_tables)[:, 0],
        )
        second = replace(second, pool=pool)
        out, _ = run(second.args, impl=impl)
        assert_close(out, oracle(second, sm_scale=SM_SCALE)[0])

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(data=st.data())
    def test_random_steps(self, impl, data):
        """One bucket, any contents: the oracle agrees."""
        num_decode_rows = data.draw(st.integers(0, 4))
        rows = [(1, data.draw(st.integers(1, 40))) for _ in range(num_decode_rows)]
        for _ in range(data.draw(st.integers(0, 6 - num_decode_rows))):
            q_len = data.draw(st.integers(1, 9))
            rows.append((q_len, q_len + data.draw(st.integers(0, 31))))
        case = make_case(
            rows,
            num_decode_rows=num_decode_rows,
            shape=Shape(num_blocks=64, num_tokens=56, num_rows=6),
            seed=data.draw(st.integers(0, 99)),
        )
        out, pool = run(case.args, impl=impl, tuning=SMALL_TILES)
        expected, expected_pool = oracle(case, sm_scale=SM_SCALE)
        assert_close(out, expected)
        assert_same_pool(pool, expected_pool)

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(lens=st.lists(st.integers(1, 40), min_size=5, max_size=5))
    def test_neighbours_change_nothing(self, impl, lens):
        """A decode row and a chunk, among other decode rows of any length."""
        shape = Shape(num_blocks=64, num_tokens=24, num_rows=8)
        small = make_case([(1, 19), (6, 21)], num_decode_rows=1, shape=shape)
        rows = [(1, 19), *((1, length) for length in lens), (6, 21)]
        large = make_case(rows, num_decode_rows=6, shape=shape)
        large = with_rows_of(small, large, {0: 0, 1: 6})
        alone, _ = run(small.args, impl=impl, tuning=SMALL_TILES)
        among, _ = run(large.args, impl=impl, tuning=SMALL_TILES)
        np.testing.assert_allclose(among[0], alone[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(among[6:12], alone[1:7], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
class TestNegativeControls:
    """Each of these faults must fail the comparison that the tests above rely on."""

    CASES = ((DECODE, 5), (CHUNKED, 0))

    def case(self, rows, num_decode_rows):
        shape = Shape() if rows is DECODE else BUCKET
        return make_case(rows, num_decode_rows=num_decode_rows, shape=shape)

    def assert_fails(self, impl, broken, case, **options):
        out, _ = run(broken.args, impl=impl, tuning=SMALL_TILES, **options)
        with pytest.raises(AssertionError):
            assert_close(out, oracle(case, sm_scale=SM_SCALE)[0])

    @pytest.mark.parametrize(("rows", "num_decode_rows"), CASES)
    def test_dropped_block(self, impl, rows, num_decode_rows):
        case = self.case(rows, num_decode_rows)
        row = int(np.argmax(np.asarray(case.metadata.kv_lens)))
        self.assert_fails(impl, with_block_dropped(case, row, 3), case)

    @pytest.mark.parametrize(("rows", "num_decode_rows"), CASES)
    def test_swapped_k_and_v(self, impl, rows, num_decode_rows):
        case = self.case(rows, num_decode_rows)
        k, v = case.pool.layer_kv(case.layer)
        broken = replace(case, pool=case.pool.with_layer_kv(case.layer, v, k))
        self.assert_fails(impl, broken, case)

    @pytest.mark.parametrize(("rows", "num_decode_rows"), CASES)
    @pytest.mark.parametrize(
        "options", [{"sm_scale": SM_SCALE * 1.01}, {"window": 39}, {"soft_cap": 20.0}]
    )
    def test_wrong_options(self, impl, rows, num_decode_rows, options):
        case = self.case(rows, num_decode_rows)
        self.assert_fails(impl, case, case, **options)

    def test_one_key_too_few(self, impl):
        case = make_case(DECODE, num_decode_rows=5)
        lens = case.metadata.kv_lens.at[4].add(-1)
        broken = replace(case, metadata=replace(case.metadata, kv_lens=lens))
        self.assert_fails(impl, broken, case)

    def test_one_key_too_many_is_nan(self, impl):
        """Shows that the NaN in unused slots would be seen."""
        case = make_case(DECODE, num_decode_rows=5)
        lens = case.metadata.kv_lens.at[3].add(1)
        broken = replace(case, metadata=replace(case.metadata, kv_lens=lens))
        out, _ = run(broken.args, impl=impl, tuning=SMALL_TILES)
        assert np.isnan(np.asarray(out[3])).all()
        assert np.isfinite(np.asarray(out[:3])).all()
