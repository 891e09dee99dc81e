"""Parts "kernels" and "write" of scripts/test_gpu: the Hopper kernels against plain operations."""

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
from jax.typing import DTypeLike

from kernels_pallas import ops
from kernels_pallas.norm_rope import HeadNorms, RopeTables, split_heads
from kernels_pallas.pool import KVPool
from kernels_pallas.terms import sum_of
from kernels_pallas.write_kv import write_kv
from kernels_pallas.write_qkv_hopper import write_qkv

IMPL = "hopper"
TOLERANCE = 1e-2  # relative error of a whole output, bf16 against float64
TERMS_TOLERANCE = 2e-5  # of a result in two terms, which has 16 bits
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
    (8, 4, 128, 16, {"q_dtype": jnp.float32}),
    (3, 3, 64, 16, {"q_dtype": jnp.float32, "sinks": True}),
    (4, 2, 256, 16, {"q_dtype": jnp.float32, "soft_cap": 50.0}),
    (2, 8, 128, 32, {"q_dtype": jnp.float32, "dtype": jnp.float16, "window": 50}),
]


def check_kernels(numbers: Sequence[int] = range(len(SHAPES))) -> str:
    # Small steps: fewer tokens than a tile of queries has. Many rows: two workers a multiprocessor.
    jobs = [
        (number, kind)
        for number in numbers
        for kind in ("decode", "mixed", "small" if number % 2 else "many rows")
    ]
    # In threads: compiling is what takes time here.
    with ThreadPoolExecutor() as pool:
        errors = [
            error for found in pool.map(shape_errors, *zip(*jobs, strict=True)) for error in found
        ]
    check_controls()
    return f"{len(errors)} random steps of {len(jobs)} shapes, worst error {max(errors):.1e}"


# Tokens and rows of a step.
KINDS = {"decode": (8, 8), "mixed": (320, 8), "small": (40, 8), "many rows": (140, 140)}


def shape_errors(number: int, kind: str) -> list[float]:
    """Relative errors of random steps of one shape."""
    num_tokens, num_rows = KINDS[kind]
    num_kv_heads, group, head_dim, block_size, options = SHAPES[number]
    options = dict(options)
    dtype = options.pop("dtype", jnp.bfloat16)
    q_dtype = options.pop("q_dtype", dtype)
    shape = Shape(
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_rows * 640 // block_size,
        table_width=640 // block_size,
        num_tokens=num_tokens,
        num_rows=num_rows,
        dtype=dtype,
    )
    cases = random_cases(shape, number, options.get("window"))
    errors = [step_error(with_queries(case, q_dtype), **options) for case in cases]
    assert max(errors) < TOLERANCE, f"{shape} {options}: relative error {max(errors):.1e}"
    return errors


def random_cases(shape: Shape, seed: int, window: int | None) -> Iterator[AttentionCase]:
    rng = np.random.default_rng(seed)
    num_tokens, num_rows = shape.num_tokens, shape.num_rows
    assert num_tokens is not None and num_rows is not None
    is_decode = num_tokens == num_rows
    for step in range(STEPS_PER_SHAPE):
        num_decode = int(rng.integers(1, num_rows + 1)) if is_decode else int(rng.integers(0, 4))
        rows = [(1, int(rng.integers(1, 600))) for _ in range(num_decode)]
        for _ in range(0 if is_decode else int(rng.integers(1, 5))):
            q_len = int(rng.integers(1, (num_tokens - 3) // 4))
            rows.append((q_len, q_len + int(rng.integers(0, 500))))
        yield make_case(
            rows, num_decode_rows=num_decode, shape=shape, seed=100 * seed + step, window=window
        )


def with_queries(case: AttentionCase, dtype: DTypeLike) -> AttentionCase:
    """Float32 queries have all of their bits: they are no bfloat16 values."""
    if dtype == case.q.dtype:
        return case
    return replace(case, q=case.q.astype(dtype) * 1.01)


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
    # Nothing but the result could be rounded, for all weights are 1.
    even = replace(case, q=jnp.zeros_like(case.q))
    wide_error = step_error(with_queries(even, jnp.float32))
    assert wide_error < TERMS_TOLERANCE < step_error(even), f"in two terms {wide_error:.1e}"


# --- the write ---------------------------------------------------------------------------------

# Tokens, KV heads, query heads a KV head, head_dim, block_size, rows of q a KV head, whether slots
# lie side by side.
WRITES = [
    (8, 8, 4, 128, 16, 8, False),
    (5, 3, 3, 64, 16, 8, False),
    (16, 2, 4, 128, 16, 4, True),
    (64, 8, 4, 128, 16, 8, False),
    (70, 2, 1, 128, 32, 1, True),
    (256, 8, 4, 128, 16, 8, False),
    (300, 3, 3, 64, 64, 3, True),
    (600, 8, 4, 128, 128, 4, True),
    (2100, 2, 2, 64, 16, 2, False),
]
HEADS_DTYPES = (jnp.bfloat16, jnp.float32)  # of what is written to a bfloat16 pool
POOL_ROUNDING = float(jnp.finfo(jnp.bfloat16).eps)
TERMS_ROUNDING = 1e-5  # of queries in two terms, which have 16 bits


def check_write() -> str:
    """Norms, RoPE and the write in one kernel, against plain operations: one rounding apart."""
    jobs = [(number, dtype) for number in range(len(WRITES)) for dtype in HEADS_DTYPES]
    with ThreadPoolExecutor() as pool:
        worst = max(pool.map(write_error, *zip(*jobs, strict=True)))
    return f"{len(jobs)} shapes, at most {worst:.1f} roundings apart"


def write_error(number: int, heads_dtype: DTypeLike) -> float:
    """The largest difference of q and the pool, in roundings of values of their size."""
    num_tokens, num_kv_heads, group, head_dim, block_size, q_rows, is_run = WRITES[number]
    rng = np.random.default_rng(number)
    num_blocks = num_tokens // block_size + 4

    def draw(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    heads = draw(num_tokens, num_kv_heads, group + 2, head_dim, dtype=heads_dtype)
    norms = HeadNorms(1 + draw(head_dim), draw(head_dim), 1e-6)
    angles = rng.uniform(0, 100, (num_tokens, head_dim // 2))
    rope = RopeTables(jnp.float32(np.cos(angles)), jnp.float32(np.sin(angles)))
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    if is_run:
        slots = np.roll(np.arange(num_tokens), 5)
    slots = jnp.asarray(slots + block_size, jnp.int32)
    data = draw(2 * (num_blocks + 1), 2, num_kv_heads, block_size, head_dim)

    @jax.jit
    def write(heads, rope, data, slots):
        pool = KVPool(data, 2, head_dim)
        q, pool = write_qkv(
            heads, norms, rope, pool, pool.first_row(1), slots, q_rows=q_rows, has_runs=is_run
        )
        q = q.reshape(-1, num_tokens, num_kv_heads, q_rows, head_dim)[..., :group, :]
        return q.reshape(len(q), num_tokens, -1, head_dim), pool.data

    terms, found = write(heads, rope, data, slots)
    q, k, v = split_heads(heads, norms, rope)
    k, v = k.astype(data.dtype), v.astype(data.dtype)
    expected = write_kv(KVPool(data, 2, head_dim), 1, k, v, slots).data
    q_rounding = POOL_ROUNDING if len(terms) == 1 else TERMS_ROUNDING
    roundings = max(
        largest_error(sum_of(terms), q) / q_rounding,
        largest_error(found, expected) / POOL_ROUNDING,
    )
    job = f"{WRITES[number]} of {jnp.dtype(heads_dtype).name}"
    assert roundings <= 2, f"{job}: {roundings:.1f} roundings apart"
    return roundings


def largest_error(found: jax.Array, wanted: jax.Array) -> float:
    """Relative to the size of a value plus 2, for small ones are differences of larger ones."""
    actual, expected = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
    return float((np.abs(actual - expected) / (np.abs(expected) + 2)).max())
