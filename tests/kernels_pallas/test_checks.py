from dataclasses import replace

import jax.numpy as jnp
import pytest
from helpers.attention_cases import Shape, make_case

from kernels_pallas import ops
from kernels_pallas.checks import check_values
from kernels_pallas.tuning import AttentionTuning, default_tuning

ROWS = [(1, 9), (1, 4), (6, 6), (5, 17)]
SHAPE = Shape(num_tokens=16, num_rows=6)


@pytest.fixture
def case():
    return make_case(ROWS, num_decode_rows=2, shape=SHAPE)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("q", lambda x: x[:, :, 0], r"q\.shape=\(16, 4\) must have 3 axes"),
        ("q", lambda x: x[:, :3], "num_q_heads=3 must be a multiple of num_kv_heads=2"),
        ("q", lambda x: x[..., :8], r"head_dim=8 of q must be pool\.head_dim=16"),
        ("k_new", lambda x: x[:-1], r"k_new\.shape=\(15, 2, 16\) must be \(16, 2, 16\)"),
        ("v_new", lambda x: x[:, :1], r"v_new\.shape=\(16, 1, 16\) must be"),
        ("v_new", lambda x: x.astype(jnp.bfloat16), r"v_new\.dtype=bfloat16 must be pool\.dtype"),
        ("layer", lambda _: 2, r"layer=2 must be in 0 \.\. 1"),
    ],
)
def test_arrays_that_do_not_fit(case, name, change, match):
    arguments = {**vars(case), name: change(getattr(case, name))}
    with pytest.raises(ValueError, match=match):
        ops.paged_attention(**arguments, sm_scale=1.0)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("block_tables", lambda x: x[0], r"block_tables\.shape=\(10,\) must have 2 axes"),
        ("q_lens", lambda x: x[:-1], r"q_lens\.shape=\(5,\) must be \(6,\)"),
        ("kv_lens", lambda x: x.astype(jnp.float32), r"kv_lens\.dtype=float32 must be int32"),
        ("slot_mapping", lambda x: x[:-1], r"slot_mapping\.shape=\(15,\) must be \(16,\)"),
        ("num_decode_rows", lambda x: x[None], r"num_decode_rows\.shape=\(1,\) must be \(\)"),
    ],
)
def test_metadata_that_does_not_fit(case, name, change, match):
    metadata = replace(case.metadata, **{name: change(getattr(case.metadata, name))})
    with pytest.raises(ValueError, match=match):
        ops.paged_attention(**{**vars(case), "metadata": metadata}, sm_scale=1.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sm_scale": 0.0}, r"sm_scale=0\.0 must be finite and above 0"),
        ({"sm_scale": float("nan")}, "sm_scale=nan must be"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"soft_cap": -1.0}, r"soft_cap=-1\.0 must be finite and above 0"),
        ({"sinks": jnp.zeros(3)}, r"sinks\.shape=\(3,\) must be \(4,\)"),
        ({"sinks": jnp.zeros(4, jnp.bfloat16)}, r"sinks\.dtype=.*bfloat16.* must be float32"),
        ({"tuning": AttentionTuning(6, 4)}, r"kv_tile=6 must be a multiple of pool\.block_size=4"),
    ],
)
def test_options_out_of_range(case, options, match):
    with pytest.raises(ValueError, match=match):
        ops.paged_attention(**vars(case), **({"sm_scale": 1.0} | options))


def test_fewer_tokens_than_rows():
    case = make_case([(1, 3)], shape=Shape(num_tokens=2, num_rows=4))
    with pytest.raises(ValueError, match="num_tokens=2 must be at least num_rows=4"):
        ops.paged_attention(**vars(case), sm_scale=1.0)


def test_tiles_below_one():
    with pytest.raises(ValueError, match="q_tile=0 must be at least 1"):
        AttentionTuning(kv_tile=16, q_tile=0)


@pytest.mark.parametrize("block_size", [1, 16, 48, 128, 256])
def test_default_tiles_hold_whole_blocks(block_size):
    assert default_tuning(block_size).kv_tile % block_size == 0


class TestValues:
    """`make_case` has checked the unbroken case already."""

    @pytest.mark.parametrize(
        ("name", "index", "value", "match"),
        [
            ("block_tables", (2, 0), 49, r"block ids 0 \.\. 49: num_blocks=48"),
            ("block_tables", (5, 9), -1, r"block ids -1 \.\. "),
            ("block_tables", (3, 2), 0, "row=3 with q_len=5 and kv_len=17 reads the null block"),
            ("slot_mapping", 0, 3, r"slot_mapping \[3, .*must be \["),
            ("slot_mapping", 15, 4, r"slots \[.*4\] of padding must be in the null block"),
            ("kv_lens", 0, 0, r"q_lens=.* must be at least 0 and at most kv_lens="),
            ("kv_lens", 3, 41, r"row=3 with kv_len=41 needs 11 blocks: tables\.shape=\(6, 10\)"),
            ("kv_lens", 5, 1, r"padded rows must come last, with kv_lens=.* 0"),
            ("q_lens", 1, 0, "padded rows must come last"),
            ("q_lens", 3, 9, r"must sum to at most num_tokens=16"),
            ("num_decode_rows", (), 3, r"num_decode_rows=3 leading rows must have 1 token"),
            ("num_decode_rows", (), 7, "num_decode_rows=7 leading rows"),
        ],
    )
    def test_broken_metadata(self, case, name, index, value, match):
        array = getattr(case.metadata, name).at[index].set(value)
        metadata = replace(case.metadata, **{name: array})
        with pytest.raises(ValueError, match=match):
            check_values(metadata, num_blocks=48, block_size=4)

    def test_two_rows_writing_one_slot(self):
        metadata = make_case([(1, 3), (1, 3)], num_decode_rows=2).metadata
        metadata = replace(
            metadata,
            block_tables=metadata.block_tables.at[1].set(metadata.block_tables[0]),
            slot_mapping=metadata.slot_mapping.at[1].set(metadata.slot_mapping[0]),
        )
        with pytest.raises(ValueError, match="two tokens write into one slot"):
            check_values(metadata, num_blocks=48, block_size=4)

    def test_one_token_a_row_where_tokens_equal_rows(self):
        with pytest.raises(ValueError, match="num_tokens=4 equal to num_rows=4 means 1 token"):
            make_case([(4, 4)], shape=Shape(num_tokens=4, num_rows=4))

    def test_null_blocks_only_before_the_window(self):
        metadata = make_case([(1, 20)], num_decode_rows=1, window=6).metadata
        assert metadata.block_tables[0, :3].tolist() == [0, 0, 0]
        check_values(metadata, num_blocks=48, block_size=4, window=6)
        with pytest.raises(ValueError, match="reads the null block"):
            check_values(metadata, num_blocks=48, block_size=4, window=9)
