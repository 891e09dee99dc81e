"""What can only be seen on a TPU: the compiled kernels' numbers. scripts/test_tpu runs it there."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import Shape, assert_same_pool, make_case, oracle, with_layout
from helpers.engines import fresh_engine, load_runner, run_to_end
from helpers.requests import make_request

from kernels_pallas import ops

pytestmark = pytest.mark.skipif(jax.default_backend() != "tpu", reason="needs a TPU")

MODEL = Path(__file__).parents[1] / "goldens" / "tiny_llama"
DECODE = [(1, 1), (1, 40), (1, 300), (1, 17), (1, 256)]
MIXED = [(1, 30), (1, 129), (40, 40), (1, 9), (17, 300), (64, 70)]
BF16 = jnp.bfloat16


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"dtype": BF16},
        {"dtype": BF16, "head_dim": 64, "num_q_heads": 8},
        {"dtype": BF16, "head_dim": 80, "num_q_heads": 2},
        {"dtype": BF16, "head_dim": 256, "num_q_heads": 32, "block_size": 64},
        {"dtype": jnp.float32, "block_size": 128},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_kernels_against_the_oracle(rows, sizes, options):
    is_decode = rows is DECODE
    block_size = sizes.get("block_size", 16)
    base = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": block_size}
    shape = Shape(
        **(base | sizes),
        num_blocks=6 * (320 // block_size + 1),
        table_width=320 // block_size + 1,
        num_rows=8,
        num_tokens=8 if is_decode else 144,
    )
    num_decode_rows = 5 if is_decode else 2
    case = make_case(rows, num_decode_rows=num_decode_rows, shape=shape, **_window(options))
    expected, expected_pool = oracle(case, sm_scale=0.1, **options)
    q, k_new, v_new, pool, layer, metadata = case.args
    arrays = q, k_new, v_new, with_layout(pool, "tpu"), layer, metadata
    run = jax.jit(lambda args: ops.paged_attention(*args, sm_scale=0.1, impl="tpu", **options))
    out, pool = run(arrays)
    # float32 products on a TPU are sums of bfloat16 ones.
    tolerance = 1e-2 if shape.dtype == BF16 else 1e-4
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, tolerance, tolerance)
    assert_same_pool(pool, expected_pool)


def test_the_engine_gives_the_tokens_of_xla():
    requests = [
        make_request("one", range(3, 40), max_tokens=12, ignore_eos=True),
        make_request("two", range(3, 60), max_tokens=12, ignore_eos=True, n=3, temperature=1.0),
    ]
    answers = []
    with jax.default_matmul_precision("highest"):
        for impl in ("tpu", "xla"):
            runner = load_runner(
                str(MODEL),
                dtype="float32",
                attention_impl=impl,
                num_blocks=12,
                max_num_seqs=4,
                max_num_tokens=32,
                max_model_len=128,
            )
            answers.append(run_to_end(fresh_engine(runner), requests).tokens)
    assert answers[0] == answers[1]


def _window(options: dict) -> dict:
    return {"window": options["window"]} if "window" in options else {}
