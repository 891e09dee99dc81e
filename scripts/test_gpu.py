"""Proof on a GPU: what scripts/test_gpu runs. Each part runs even if another fails."""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from helpers.attention_cases import AttentionCase, Shape, make_case, with_block_dropped
from helpers.attention_cases import with_layout as with_pool_layout
from helpers.requests import make_request
from helpers.row_oracle import row_oracle

from jaxpaged.checkpoint import locate
from jaxpaged.checkpoint.locate import home_folder
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from kernels_pallas import ops

IMPL = "hopper"
TOLERANCE = 1e-2  # relative error of a whole output, bf16 against float64
STEPS_PER_SHAPE = 16
MARGIN = 0.1  # of the top two log-probabilities, above which bf16 must not change a token
GOLDENS = Path("tests/goldens")

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


def main() -> int:
    parser = argparse.ArgumentParser(description="Proves the Hopper kernels on a GPU.")
    parts: dict[str, Callable[[], str]] = {
        "kernels": check_kernels,
        "qwen3": check_qwen3,
        "smollm2": check_smollm2,
    }
    parser.add_argument("--only", choices=parts, help="run this part alone")
    parser.add_argument(
        "--share",
        default="1/1",
        metavar="I/N",
        help="of the kernels' shapes, every N-th: compiling is mostly Python, so that N processes "
        "(with XLA_PYTHON_CLIENT_PREALLOCATE=false) are done sooner than one",
    )
    options = parser.parse_args()
    only = options.only
    first, step = map(int, options.share.split("/"))
    parts["kernels"] = partial(check_kernels, range(first - 1, len(SHAPES), step))
    print(f"jax {jax.__version__} on {jax.devices()[0]}")
    results = [run_part(name, parts[name]) for name in parts if only in (None, name)]
    print("\n".join(["", *results]))
    return any("FAILED" in result for result in results)


def run_part(name: str, part: Callable[[], str]) -> str:
    """One line of the summary."""
    start = time.monotonic()
    try:
        result = f"ok      {part()}"
    except Exception as error:
        traceback.print_exc()
        result = f"FAILED  {error}".splitlines()[0]
    return f"{name:8} {result}  ({time.monotonic() - start:.0f} s)"


# --- kernels -----------------------------------------------------------------------------------


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


# --- models ------------------------------------------------------------------------------------


def check_qwen3() -> str:
    """A random Qwen3 with head_dim 128, bf16: our kernels against XLA's operations."""
    tokens = {impl: qwen3_tokens(impl) for impl in ("hopper", "xla")}
    pairs = zip(tokens["hopper"], tokens["xla"], strict=True)
    same = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    total = sum(map(len, tokens["xla"]))
    # Random weights give near ties, where bf16 may fall either way and go on differently.
    assert same > 0.5 * total, f"only {same} of {total} tokens are the same"
    first = sum(a[0] == b[0] for a, b in zip(tokens["hopper"], tokens["xla"], strict=True))
    assert first >= 7, f"only {first} of 8 first tokens are the same"
    return f"{same} of {total} tokens equal XLA's, {first} of 8 first ones"


def qwen3_tokens(impl: str) -> list[list[int]]:
    folder = home_folder() / "test_gpu_qwen3"
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((GOLDENS / "tiny_qwen3" / "config.json").read_text())
    config |= {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 40 + 9 * i).tolist() for i in range(8)]
    return engine_tokens(str(folder), prompts, 16, attention_impl=impl, load_format="random")


def check_smollm2() -> str:
    """SmolLM2's goldens (Hugging Face, float32) hold in bf16 where the margin allows no doubt."""
    cases = json.loads((GOLDENS / "smollm2.json").read_text())["cases"]
    prompts = [case["prompt_token_ids"] for case in cases]
    outputs = engine_tokens("smollm2", prompts, 32)
    num_equal, num_compared = 0, 0
    for case, output in zip(cases, outputs, strict=True):
        equal = [a == b for a, b in zip(output, case["output_token_ids"], strict=True)]
        end = equal.index(False) if False in equal else len(equal)
        num_equal += end == len(equal)
        num_compared += end
        if end < len(equal):
            margin = case["margins"][end]
            assert margin <= MARGIN, f"a token with margin {margin:.2f} differs"
    return (
        f"{num_equal} of {len(cases)} continuations equal to the end, "
        f"{num_compared} tokens before first differences, all of those under {MARGIN}"
    )


def engine_tokens(
    model: str, prompts: list[list[int]], max_tokens: int, **options
) -> list[list[int]]:
    """Greedy continuations through the whole engine, in mixed steps of two compiled sizes."""
    options = {"dtype": "bfloat16", "max_model_len": 1024, "num_blocks": 2048, **options}
    config = EngineConfig(model, max_num_seqs=8, max_num_tokens=16, **options)
    engine = Engine.start(config, locate(model, config.load_format), home_folder())
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(make_request(str(i), prompt, max_tokens=max_tokens, ignore_eos=True))
    while engine.has_work:
        for output in engine.step().sequences:
            tokens[output.request_id].extend(output.token_ids)
    engine.close()
    return list(tokens.values())


if __name__ == "__main__":
    sys.exit(main())
