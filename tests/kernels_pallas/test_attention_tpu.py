"""The TPU kernels in the interpreter: against the oracle, in both DMA modes, without a race.

What the interpreter cannot show (layouts, VMEM, copies of the pool) scripts/check_tpu does.
"""

from dataclasses import dataclass, replace
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
    with_layout,
)
from helpers.tpu_interpreter import interpret, reports_race

from kernels_pallas import attention_tpu, ops
from kernels_pallas.attention_tpu_decode import _Writer
from kernels_pallas.attention_tpu_tiles import KVStream
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.tuning import (
    TPU_GENERATIONS,
    TPUPhaseTuning,
    TPUTuning,
    default_tpu_tuning,
)

SM_SCALE = 0.3
BF16 = jnp.bfloat16
DMA_MODES = ("on_wait", "eager")

# Two compute tiles a fetch tile, more fetch tiles than buffers, grid steps that rows do not fill.
TILES = TPUTuning(TPUPhaseTuning(32, 16, 2, 2), TPUPhaseTuning(16, 8, 3, 8))


@dataclass(frozen=True)
class Variant:
    """One compiled size; the rows are drawn."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 8
    dtype: Any = jnp.float32
    is_decode: bool = False
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    tuning: TPUTuning = TILES

    @property
    def shape(self) -> Shape:
        num_rows = 5
        return Shape(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=num_rows * -(-80 // self.block_size),
            table_width=80 // self.block_size + 1,
            num_tokens=num_rows if self.is_decode else 40,
            num_rows=num_rows,
            dtype=self.dtype,
        )

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(SM_SCALE, self.window, self.soft_cap)

    @property
    def sinks(self) -> jax.Array | None:
        return jnp.linspace(-2.0, 4.0, self.num_q_heads) if self.has_sinks else None


WIDE_BLOCKS = TPUTuning(TPUPhaseTuning(128, 64, 2, 8), TPUPhaseTuning(128, 128, 2, 16))
VARIANTS = {
    "decode": Variant(is_decode=True),
    "decode_bf16_window_sinks": Variant(
        is_decode=True, head_dim=128, block_size=16, dtype=BF16, window=30, has_sinks=True
    ),
    "mixed": Variant(),
    "one_query_head_each": Variant(num_q_heads=2, head_dim=128),
    "sixteen_query_heads": Variant(num_q_heads=16, num_kv_heads=1, head_dim=256),
    "padded_head_dim": Variant(num_q_heads=6, head_dim=80, window=9),
    "bf16": Variant(head_dim=128, block_size=16, dtype=BF16),
    "bf16_all_options": Variant(block_size=16, dtype=BF16, window=13, soft_cap=2.0, has_sinks=True),
    "blocks_of_128": Variant(head_dim=128, block_size=128, tuning=WIDE_BLOCKS, soft_cap=5.0),
    "two_head_groups": Variant(tuning=replace(TILES, head_groups=2), has_sinks=True),
}
# Left to the long test: others go through the same code.
LONG_VARIANTS = ("one_query_head_each", "bf16")


def draw_case(variant: Variant, seed: int):
    rng = np.random.default_rng(seed)
    num_decode_rows = int(rng.integers(0, 6 if variant.is_decode else 4))
    rows = [(1, int(rng.integers(1, 81))) for _ in range(num_decode_rows)]
    if not variant.is_decode:
        for _ in range(rng.integers(0, 6 - num_decode_rows)):
            # A row of one token may stand behind the decode rows.
            q_len = int(rng.choice([1, 3, 8, 12]))
            q_len = min(q_len, 40 - sum(length for length, _ in rows))
            if q_len:
                rows.append((q_len, q_len + int(rng.integers(0, 81 - q_len))))
    return make_case(
        rows,
        num_decode_rows=num_decode_rows,
        shape=variant.shape,
        seed=seed,
        window=variant.window,
    )


def check(variant: Variant, seed: int, dma_mode: Any) -> None:
    case = draw_case(variant, seed)
    out, pool = interpret(
        case, variant.options, variant.tuning, dma_mode=dma_mode, sinks=variant.sinks
    )
    expected, expected_pool = oracle(case, **vars(variant.options), sinks=variant.sinks)
    assert_close(out, expected)
    assert_same_pool(pool, expected_pool)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in LONG_VARIANTS])
def test_ragged_rows(name, capsys):
    """Every variant in one of the modes."""
    index = list(VARIANTS).index(name)
    for seed in range(2):
        mode = DMA_MODES[index % 2]
        assert not reports_race(lambda: check(VARIANTS[name], 2 * index + seed, mode), capsys)  # noqa: B023


@pytest.mark.long
@pytest.mark.parametrize("dma_mode", DMA_MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_many_ragged_rows(name, dma_mode, capsys):
    """100 random steps in all."""
    for seed in range(100, 105):
        assert not reports_race(lambda: check(VARIANTS[name], seed, dma_mode), capsys)  # noqa: B023


@pytest.mark.parametrize("variant", [Variant(is_decode=True), Variant()])
def test_a_step_without_rows_gives_zeros(variant, capsys):
    case = make_case([], shape=variant.shape)
    results = []
    run = lambda: results.append(  # noqa: E731
        interpret(case, variant.options, variant.tuning, dma_mode="eager")
    )
    assert not reports_race(run, capsys)
    np.testing.assert_array_equal(np.asarray(results[0][0]), 0)


class TestPlantedRaces:
    """A removed wait must be reported."""

    def reported(self, variant: Variant, rows: list, num_decode_rows: int, capsys) -> bool:
        jax.clear_caches()  # the broken kernel is another trace of the same arguments
        case = make_case(rows, num_decode_rows=num_decode_rows, shape=variant.shape)
        run = lambda: interpret(case, variant.options, variant.tuning, dma_mode="eager")  # noqa: E731
        try:
            return reports_race(run, capsys)
        finally:
            jax.clear_caches()

    @pytest.mark.parametrize("is_decode", [True, False])
    def test_a_tile_is_used_before_it_has_arrived(self, is_decode, monkeypatch, capsys):
        def wait(stream, item, tile):
            return stream.cursor_ref[stream.USED] % stream.tiles.num_buffers

        variant = Variant(is_decode=is_decode)
        rows, num_decode_rows = ([(1, 40), (1, 70)], 2) if is_decode else ([(12, 60)], 0)
        assert not self.reported(variant, rows, num_decode_rows, capsys)
        monkeypatch.setattr(KVStream, "wait", wait)
        assert self.reported(variant, rows, num_decode_rows, capsys)

    def test_a_stage_is_filled_again_before_it_was_written(self, monkeypatch, capsys):
        original = _Writer.write

        def write(writer, item, tile, kv_ref, index):
            # As if no row had written before: the wait for the stage is skipped.
            count = writer.count_ref[writer.count_entry]
            writer.count_ref[writer.count_entry] = count % 2
            original(writer, item, tile, kv_ref, index)
            writer.count_ref[writer.count_entry] = count + 1

        rows = [(1, 20)] * 5
        assert not self.reported(Variant(is_decode=True), rows, 5, capsys)
        monkeypatch.setattr(_Writer, "write", write)
        assert self.reported(Variant(is_decode=True), rows, 5, capsys)


class TestRefusals:
    def test_block_tables_that_do_not_fit_scalar_memory(self):
        shape = Shape(num_tokens=512, num_rows=512, table_width=600, num_blocks=4)
        case = make_case([], shape=replace(shape, head_dim=64, block_size=8))
        case = replace(case, pool=with_layout(case.pool, "tpu"))
        match = (
            "block tables of 512 rows x 600 blocks need 1255424 bytes of scalar memory, limit "
            "1048576: lower max_num_seqs or max_model_len, or raise block_size"
        )
        with pytest.raises(ValueError, match=match):
            ops.paged_attention(*case.args, sm_scale=1.0, impl="tpu_interpret")

    def test_every_reason_is_named(self):
        case = make_case([(1, 9)], num_decode_rows=1, shape=Shape(head_dim=64, dtype=BF16))
        args = (case.q.astype(jnp.float16), *case.args[1:])
        match = (
            "impl='tpu': q.dtype=float16 is not float32 or bfloat16; q.dtype=float16 is not "
            "pool.dtype=bfloat16; the pool has not the layout of the TPU kernels; "
            "pool.block_size=4 is not a multiple of 16; platform='cpu' is not tpu"
        )
        with pytest.raises(NotImplementedError, match=match):
            ops.paged_attention(*args, sm_scale=1.0, impl="tpu")

    def test_xla_refuses_the_layout(self):
        case = make_case([(1, 9)], num_decode_rows=1)
        case = replace(case, pool=with_layout(case.pool, "tpu"))
        with pytest.raises(NotImplementedError, match="the layout of the TPU kernels"):
            ops.paged_attention(*case.args, sm_scale=1.0, impl="xla")

    def test_tiles_of_the_other_kind(self):
        case = make_case([(1, 9)], num_decode_rows=1)
        with pytest.raises(ValueError, match="impl='xla' does not take TPUTuning"):
            ops.paged_attention(*case.args, sm_scale=1.0, impl="xla", tuning=TILES)

    def test_tiles_that_do_not_fit(self):
        case = make_case([(1, 9)], num_decode_rows=1, shape=Shape(block_size=3))
        case = replace(case, pool=with_layout(case.pool, "tpu"))
        with pytest.raises(ValueError, match=r"phase.fetch=32 must be a multiple of pool.block"):
            ops.paged_attention(*case.args, sm_scale=1.0, impl="tpu_interpret", tuning=TILES)
        with pytest.raises(ValueError, match="queries=12 of prefill must be a power of two"):
            replace(TILES, prefill=TPUPhaseTuning(32, 32, 2, 12))
        with pytest.raises(ValueError, match=r"self.fetch=32 must be a multiple of self.compute=5"):
            TPUPhaseTuning(32, 5, 2, 8)


@pytest.mark.parametrize("device_kind", TPU_GENERATIONS)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("token_bytes", [256, 4096, 65536])
def test_default_tiles_fit_each_generation(device_kind, block_size, token_bytes):
    tuning = default_tpu_tuning(
        device_kind, token_bytes=token_bytes, num_kv_heads=8, group=4, block_size=block_size
    )
    for phase in (tuning.decode, tuning.prefill):
        assert phase.fetch % block_size == 0
        buffers = phase.num_buffers * phase.fetch * token_bytes // tuning.head_groups
        # The kernels ask for half of VMEM; q, the output and the state take some of it.
        assert buffers <= TPU_GENERATIONS[device_kind].vmem_bytes * 3 // 8


def test_the_default_tiles_work_on_small_tables(capsys):
    variant = Variant()
    case = draw_case(variant, 7)
    case = replace(case, pool=with_layout(case.pool, "tpu"))
    tuning = attention_tpu.tuning_for(case.q, case.pool)
    check(replace(variant, tuning=tuning), 7, "eager")
