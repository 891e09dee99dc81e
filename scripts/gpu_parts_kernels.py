"""Part "kernels" of scripts/test_gpu: the Hopper kernels against the oracle."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from helpers.attention_cases import AttentionCase, Shape, make_case, with_block_dropped
from helpers.attention_cases import with_layout as with_pool_layout
from helpers.row_oracle import row_oracle

from kernels_pallas import ops

IMPL = "hopper"
TOLERANCE = 1e-2  # relative error of a whole output, bf16 against float64
STEPS_PER_SHAPE = 16

# KV heads, query heads a KV head, head_dim, block_size, options.
SHAPES = [
    (8, 4, 128, 16, {}),
    (2, 1, 128, 16, {}),
    (2, 8, 128, 32, {}),
    (1, 16, 128, 64, {}),
    (3, 3, 64, 16, {}),
    (2, 1, 64, 16, {}),
    (4, 2, 64, 128, {}),
    (2, 2, 80, 16, {}),
    (2, 4, 96, 32, {}),
    (2, 4, 128, 16, {"window": 50}),
    (2, 4, 128, 16, {"soft_cap": 5.0}),
    (2, 4, 128, 16, {"sinks": True}),
    (3, 3, 64, 16, {"window": 33, "soft_cap": 3.0, "sinks": True}),
    (4, 4, 128, 16, {"dtype": jnp.float16}),
    (4, 2, 256, 16, {"soft_cap": 50.0}),
    (1, 8, 256, 64, {"window": 50}),
]


def check_kernels(numbers: Sequence[int] = range(len(SHAPES))) -> str:
    jobs = [(number, is_decode) for number in numbers for is_decode in (True, False)]
    # In threads: compiling is what takes time here.
    with ThreadPoolExecutor() as pool:
        errors = [
            error for found in pool.map(shape_errors, *zip(*jobs, strict=True)) for error in found
        ]
    check_controls()
    return f"{len(errors)} random steps of {len(jobs)} shapes, worst error {max(errors):.1e}"


def shape_errors(number: int, is_decode: bool) -> list[float]:
    """Relative errors of random steps of one shape."""
    num_kv_heads, group, head_dim, block_size, options = SHAPES[number]
    dtype = options.get("dtype", jnp.bfloat16)
    options = {name: value for name, value in options.items() if name != "dtype"}
    shape = Shape(
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=8 * 640 // block_size,
        table_width=640 // block_size,
        num_tokens=8 if is_decode else 320,
        num_rows=8,
        dtype=dtype,
    )
    cases = random_cases(shape, is_decode, number, options.get("window"))
    errors = [step_error(case, **options) for case in cases]
    assert max(errors) < TOLERANCE, f"{shape} {options}: relative error {max(errors):.1e}"
    return errors


def random_cases(
    shape: Shape, is_decode: bool, seed: int, window: int | None
) -> Iterator[AttentionCase]:
    rng = np.random.default_rng(seed)
    for step in range(STEPS_PER_SHAPE):
        num_decode = int(rng.integers(1, 9)) if is_decode else int(rng.integers(0, 4))
        rows = [(1, int(rng.integers(1, 600))) for _ in range(num_decode)]
        for _ in range(0 if is_decode else int(rng.integers(1, 5))):
            q_len = int(rng.integers(1, 78))
            rows.append((q_len, q_len + int(rng.integers(0, 500))))
        yield make_case(
            rows, num_decode_rows=num_decode, shape=shape, seed=100 * seed + step, window=window
        )


def step_error(case: AttentionCase, *, sinks: bool = False, scale: float = 1.0, **options) -> float:
    """Relative error of one step against the oracle; NaN anywhere counts as infinite."""
    num_heads, head_dim = case.q.shape[1:]
    values = jnp.linspace(-2, 2, num_heads, dtype=jnp.float32) if sinks else None
    expected = row_oracle(case, sm_scale=head_dim**-0.5, sinks=values, **options)
    pool = with_pool_layout(case.pool, ops.pool_layout(IMPL))
    arguments = replace(case, pool=pool).args
    out = attend(arguments, values, sm_scale=head_dim**-0.5 * scale, **options)
    actual = np.asarray(out, np.float64)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    return float(error) if np.isfinite(actual).all() else float("inf")


@partial(jax.jit, static_argnames=("sm_scale", "window", "soft_cap"))
def attend(arguments, sinks, *, sm_scale, window=None, soft_cap=None):
    q, k_new, v_new, pool, _, metadata = arguments
    return ops.paged_attention(
        q,
        k_new,
        v_new,
        pool,
        1,
        metadata,
        sm_scale=sm_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        impl=IMPL,
    )[0]


def check_controls() -> None:
    """Faults that the comparison must find."""
    shape = Shape(8, 2, 128, 16, num_blocks=64, table_width=40, dtype=jnp.bfloat16)
    shape = replace(shape, num_tokens=8, num_rows=8)
    case = make_case([(1, 200)] * 3, num_decode_rows=3, shape=shape)
    expected = row_oracle(case, sm_scale=128**-0.5)
    k, v = case.pool.layer_kv(1)
    faults = {
        "a dropped block": with_block_dropped(case, 0, 3),
        "K and V swapped": replace(case, pool=case.pool.with_layer_kv(1, v, k)),
        # What lies behind a row's end is NaN.
        "a key too many": replace(
            case, metadata=replace(case.metadata, kv_lens=case.metadata.kv_lens + 1)
        ),
    }
    for name, faulty in faults.items():
        pool = with_pool_layout(faulty.pool, ops.pool_layout(IMPL))
        out = attend(replace(faulty, pool=pool).args, None, sm_scale=128**-0.5)
        difference = np.asarray(out, np.float64) - expected
        error = np.linalg.norm(difference) / np.linalg.norm(expected)
        assert not error < TOLERANCE, f"{name} went unnoticed"
    assert step_error(case, scale=1.3) > TOLERANCE, "a wrong scale went unnoticed"
