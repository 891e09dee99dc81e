"""The Hopper kernels in the interpreter: against the oracle, without a race.

What the interpreter cannot show (layouts, registers, copies of the pool) scripts/check_cuda and
scripts/test_gpu do.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import (
    AttentionCase,
    Shape,
    assert_close,
    assert_same_pool,
    make_case,
    oracle,
    with_block_dropped,
)
from helpers.hopper_interpreter import (
    MOST_WAITING,
    interpret,
    never_wait_for,
    reports_race,
    traced_anew,
)
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas import decode_combine_hopper, decode_hopper, ops, prefill_hopper
from kernels_pallas.metadata import AttentionOptions
from kernels_pallas.tuning import HopperTuning, default_tuning, hopper_tuning

SM_SCALE = 0.3

# (q_len, kv_len). A length that ends inside a KV tile, at its end, one behind it; one key.
DECODE = ((1, 70), (1, 1), (1, 200), (1, 64), (1, 129))
# Two decode rows, then a prompt, a row of one token, and a chunk that begins at token 10: no
# multiple of 8, so its queries and results go through boxes of rows.
# The row of one token ends far before the KV tile that queries past its end would see whole.
MIXED = ((1, 30), (1, 150), (7, 7), (1, 90), (70, 100))
PREFILL = ((130, 140),)  # aligned, one full query tile and a rest

# A full query tile and a rest, both aligned; a short row; both again, not aligned.
WIDE_PREFILL = ((72, 80), (5, 5), (70, 75))


@dataclass(frozen=True)
class Variant:
    """One step, in arrays larger than it: rows and tokens are padded."""

    rows: tuple[tuple[int, int], ...] = DECODE
    num_decode_rows: int = 5
    group: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(SM_SCALE, self.window, self.soft_cap)

    @property
    def sinks(self) -> jax.Array | None:
        num_q_heads = self.group * self.num_kv_heads
        return jnp.linspace(-2.0, 4.0, num_q_heads) if self.has_sinks else None

    def case(self, seed: int = 0) -> AttentionCase:
        width = -(-max(kv_len for _, kv_len in self.rows) // self.block_size)
        num_rows = len(self.rows) + 1
        num_tokens = sum(q_len for q_len, _ in self.rows) + 3
        is_decode = self.num_decode_rows == len(self.rows)
        shape = Shape(
            num_q_heads=self.group * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=len(self.rows) * width,
            table_width=width,
            num_rows=num_rows,
            num_tokens=num_rows if is_decode else num_tokens,
            dtype=self.dtype,
        )
        return make_case(
            list(self.rows),
            num_decode_rows=self.num_decode_rows,
            shape=shape,
            seed=seed,
            window=self.window,
        )


mixed = functools.partial(Variant, MIXED, 2)
VARIANTS = {
    "decode": Variant(num_kv_heads=2),
    "decode_8_queries_window_sinks": Variant(
        ((1, 70), (1, 150)), 2, group=8, head_dim=128, block_size=32, window=50, has_sinks=True
    ),
    "decode_16_queries_of_256": Variant(
        ((1, 20), (1, 130)), 2, group=16, head_dim=256, block_size=64, soft_cap=2.0
    ),
    "decode_3_queries_float16": Variant(
        ((1, 140), (1, 5)), 2, group=3, block_size=128, dtype=jnp.float16, has_sinks=True
    ),
    "mixed": mixed(),
    "mixed_window_soft_cap_sinks": mixed(
        group=1, head_dim=128, block_size=128, window=40, soft_cap=2.0, has_sinks=True
    ),
    "prefill": Variant(PREFILL, 0, group=1, block_size=32),
    "prefill_of_256": Variant(
        WIDE_PREFILL, 0, group=1, head_dim=256, block_size=64, window=70, soft_cap=2.0
    ),
}


def check(case: AttentionCase, variant: Variant) -> None:
    out, pool = interpret(case, variant.options, variant.sinks)
    expected, expected_pool = oracle(case, **vars(variant.options), sinks=variant.sinks)
    assert_close(out, expected)
    assert_same_pool(pool, expected_pool)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the names of threads in /proc")
def test_xla_has_threads_enough_for_the_interpreter():
    """With fewer, tests below wait for ever, now and then: see helpers/hopper_interpreter.py."""
    jax.devices()
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    assert names.count("tf_XLAEigen") > MOST_WAITING


@pytest.mark.parametrize("name", VARIANTS)
def test_the_oracle_agrees_and_no_race_is_reported(name, capsys):
    """NaN in every slot that no query may see, and in what pads queries, keys and values."""
    variant = VARIANTS[name]
    assert not reports_race(lambda: check(variant.case(), variant), capsys)


@pytest.mark.parametrize("is_cut", [False, True])
def test_more_partial_results_than_are_merged_at_once(is_cut, monkeypatch):
    monkeypatch.setattr(decode_combine_hopper, "MANY_AT_ONCE", 2)
    monkeypatch.setattr(decode_combine_hopper, "FEW_AT_ONCE", 2)
    if is_cut:  # the control: the first of them alone
        first = vars(jax.lax) | {"fori_loop": lambda begin, _, merge, carry: merge(begin, carry)}
        monkeypatch.setattr(decode_combine_hopper, "lax", SimpleNamespace(**first))
    variant = VARIANTS["decode_3_queries_float16"]
    with traced_anew(), pytest.raises(AssertionError) if is_cut else nullcontext():
        check(variant.case(), variant)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_every_size(group, head_dim, block_size, capsys):
    rng = np.random.default_rng(group * head_dim * block_size)
    variant = mixed(
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=[None, 20, 90][rng.integers(3)],
        soft_cap=[None, 2.0][rng.integers(2)],
        has_sinks=bool(rng.integers(2)),
    )
    assert not reports_race(lambda: check(variant.case(), variant), capsys)
    decode = replace(variant, rows=DECODE, num_decode_rows=5)
    assert not reports_race(lambda: check(decode.case(), decode), capsys)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed, capsys):
    rng = np.random.default_rng(seed)
    num_decode_rows = int(rng.integers(0, 5))
    rows = [(1, int(rng.integers(1, 200))) for _ in range(num_decode_rows)]
    for _ in range(rng.integers(1, 4)):
        q_len = int(rng.integers(1, 140))
        rows.append((q_len, q_len + int(rng.integers(0, 140))))
    variant = Variant(tuple(rows), num_decode_rows, num_kv_heads=2)
    assert not reports_race(lambda: check(variant.case(seed), variant), capsys)


class TestThroughTheOperation:
    def test_hopper_interpret(self):
        """With the sizes of a whole device: more programs than there are units of work."""
        variant = Variant(((1, 20), (1, 70)), 2)
        case = variant.case()
        out, pool = ops.paged_attention(
            *case.args, sm_scale=SM_SCALE, impl="hopper_interpret", tuning=_few_programs()
        )
        expected, expected_pool = oracle(case, sm_scale=SM_SCALE)
        assert_close(out, expected)
        assert_same_pool(pool, expected_pool)

    def test_every_reason_is_given(self):
        case = make_case([(1, 3)], num_decode_rows=1, shape=Shape(num_q_heads=34))
        with pytest.raises(NotImplementedError) as error:
            ops.paged_attention(*case.args, sm_scale=SM_SCALE, impl="hopper_interpret")
        for reason in (
            "pool.dtype=float32 is not bfloat16 or float16",
            "pool.lanes=16 of the pool is not one of (64, 128, 256)",
            "pool.block_size=4 is not one of (16, 32, 64, 128)",
            "17 query heads a KV head are more than 16",
        ):
            assert reason in str(error.value)

    def test_another_tuning_is_refused(self):
        case = Variant().case()
        with pytest.raises(ValueError, match="does not take AttentionTuning"):
            ops.paged_attention(
                *case.args, sm_scale=1.0, impl="hopper_interpret", tuning=default_tuning(16)
            )


def _few_programs() -> HopperTuning:
    return hopper_tuning(num_units=2, head_dim=64, num_programs=3)


CONTROLS = {
    "decode": Variant(((1, 70), (1, 150)), 2),
    "mixed": Variant(((1, 90), (20, 75)), 1),
}


@pytest.mark.parametrize("name", CONTROLS)
class TestNegativeControls:
    """Each of these faults must fail the comparison that the tests above rely on."""

    @pytest.fixture(scope="class")
    def computed(self) -> Callable[[str, Callable[[AttentionCase], AttentionCase]], None]:
        def assert_fails(name: str, broken: Callable[[AttentionCase], AttentionCase]) -> None:
            variant = CONTROLS[name]
            case = variant.case()
            out, _ = interpret(broken(case), variant.options)
            with pytest.raises(AssertionError):
                assert_close(out, oracle(case, sm_scale=SM_SCALE)[0])

        return assert_fails

    def test_dropped_block(self, name, computed):
        computed(name, lambda case: with_block_dropped(case, len(CONTROLS[name].rows) - 1, 1))

    def test_swapped_k_and_v(self, name, computed):
        def swapped(case):
            k, v = case.pool.layer_kv(case.layer)
            return replace(case, pool=case.pool.with_layer_kv(case.layer, v, k))

        computed(name, swapped)

    def test_wrong_scale(self, name, computed):
        computed(name, lambda case: replace(case, q=case.q * 1.05))

    def test_one_key_too_many(self, name, computed):
        """Its slot holds NaN: shows that the NaN in unused slots would be seen."""

        def longer(case):
            lens = case.metadata.kv_lens.at[0].add(1)
            return replace(case, metadata=replace(case.metadata, kv_lens=lens))

        computed(name, longer)


# One KV head of one row fills several tiles of one worker, so that every slot is used again.
REUSING = {
    "decode": (decode_hopper, Variant(((1, 300), (1, 250), (1, 290), (1, 300)), 4)),
    "prefill": (prefill_hopper, Variant(((260, 260),), 0)),
}
# Not here: what another wait of the same thread orders too, in these cases.
PLANTED = {
    "decode": ("k_there", "v_there", "k_read", "v_read"),
    "prefill": ("q_there", "k_there", "v_there", "q_free", "k_read", "v_read"),
}
QUICK = (("decode", "k_there"), ("decode", "v_read"), ("prefill", "v_there"))


@pytest.mark.parametrize(
    ("kernel", "barrier"),
    [
        pytest.param(kernel, name, marks=() if (kernel, name) in QUICK else pytest.mark.long)
        for kernel, names in PLANTED.items()
        for name in names
    ],
)
def test_a_missing_wait_is_reported(kernel, barrier, monkeypatch, capsys):
    module, variant = REUSING[kernel]
    never_wait_for(barrier, module, monkeypatch)
    assert reports_race(lambda: interpret(variant.case(), variant.options), capsys)


@pytest.mark.parametrize("name", ["decode", "mixed_window_soft_cap_sinks", "prefill_of_256"])
def test_it_lowers_for_cuda(name):
    """Through Pallas's own passes, down to Mosaic GPU; no CUDA is needed for that."""
    variant = VARIANTS[name]
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")

    def attend(*arrays, sinks):
        options = vars(variant.options)
        return ops.paged_attention(*arrays, **options, sinks=sinks)

    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(attend).trace(*variant.case().args, sinks=variant.sinks)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    num_kernels = text.count("custom_call @mosaic_gpu_v2")
    # Decode and combine; where there are prompts, prefill too.
    assert num_kernels == (2 if name == "decode" else 3)
