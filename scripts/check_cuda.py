"""Compiles the Hopper kernels and whole steps for an H200 and checks memory and registers.

Run it through scripts/check_cuda, which makes the environment. One line a program:

    variant  compile s  temporary bytes  spilled bytes  registers

and a failure where the pool is copied or not updated in place, where temporaries reach 5 % of it,
where a kernel spills registers, where a step or a draw is more than one CUDA graph, where a loop
would not wait for its condition, where kernels are handed slices that may be misaligned, where a
draw keeps more arrays than it needs, or where a program does not compile at all. Programs that are
wrong on purpose come last and must be noticed.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from cuda_programs import (
    AttentionShape,
    Program,
    compile_attention,
    compile_sample,
    compile_step,
    dump_steps,
    h200_mesh,
)
from tpu_programs import QWEN3_4B

from jaxpaged.models.config import ModelConfig
from jaxpaged.runner import sampling
from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.sampling import Variant
from kernels_pallas import attention_hopper, prefill_hopper

MAX_TEMPORARIES = 0.05
MAX_COMPILE_S = 120  # Mosaic's search for layouts can be endless
# With JAX 0.11.2 the decode kernel spills 16 bytes and the prefill kernel 4. A kernel that does not
# fit its registers would spill hundreds.
MAX_SPILL_BYTES = 64
ONE_GRAPH = ("kCommandBuffer",)
NUM_SAMPLES = 256
# A random draw keeps two arrays like the logits, padded. One more, if only of flags, is read and
# written in every pass.
MAX_SAMPLE_ARRAYS = 2.1
TINY_QWEN3 = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
)

# Like SmolLM2: 3 query heads of 64 a KV head, without norms of them.
TINY_LLAMA = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
)

VARIANTS = {
    "decode": AttentionShape(num_tokens=64),
    "mixed": AttentionShape(),
    "mixed, head_dim 64, all options": AttentionShape(
        head_dim=64, num_q_heads=64, window=128, soft_cap=30.0, has_sinks=True
    ),
    "mixed, blocks of 128": AttentionShape(block_size=128),
    "decode, head_dim 256": AttentionShape(head_dim=256, num_q_heads=16, num_tokens=64),
    "mixed, head_dim 256": AttentionShape(head_dim=256, num_q_heads=16),
    "mixed, head_dim 256, all options": AttentionShape(
        head_dim=256, num_q_heads=16, window=128, soft_cap=50.0, has_sinks=True
    ),
    "mixed, head_dim 256, blocks of 128": AttentionShape(
        head_dim=256, num_q_heads=16, block_size=128, dtype=jnp.float16
    ),
    "decode, head_dim 256, 16 query heads": AttentionShape(
        head_dim=256, num_q_heads=16, num_kv_heads=1, num_tokens=64
    ),
    "mixed, head_dim 64": AttentionShape(head_dim=64),
    "mixed, blocks of 32": AttentionShape(block_size=32),
    "mixed, blocks of 64": AttentionShape(block_size=64),
    "mixed, float16": AttentionShape(dtype=jnp.float16),
    "mixed, window": AttentionShape(window=1024),
    "mixed, soft cap": AttentionShape(soft_cap=30.0),
    "mixed, sinks": AttentionShape(has_sinks=True),
    "mixed, 1 query head a KV head": AttentionShape(num_q_heads=8),
    "mixed, 16 query heads, 1 KV head": AttentionShape(num_q_heads=16, num_kv_heads=1),
    "mixed, 3 query heads a KV head": AttentionShape(num_q_heads=24),
    "decode, two terms": AttentionShape(num_tokens=16, num_rows=16, has_wide_queries=True),
    "mixed, two terms": AttentionShape(has_wide_queries=True, num_tokens=16, num_rows=8),
    "mixed, two terms, head_dim 256": AttentionShape(
        head_dim=256, num_q_heads=16, has_wide_queries=True, num_tokens=16, num_rows=8
    ),
    "decode, 1 row": AttentionShape(num_tokens=1, num_rows=1, max_len=32768),
    "prefill, 1 row of 8192": AttentionShape(num_tokens=8192, num_rows=1, max_len=8192),
}
SHORT_VARIANTS = tuple(VARIANTS)[:3]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    seconds: float
    temporary_bytes: int
    spill_bytes: tuple[int, ...]
    registers: tuple[int, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        spills, registers = (
            "/".join(map(str, values)) for values in (self.spill_bytes, self.registers)
        )
        return (
            f"{self.name:36} {self.seconds:6.1f} {self.temporary_bytes:15,d} {spills:>10}"
            f" {registers:>12}  {'; '.join(self.problems) or 'ok'}"
        )


def find_problems(program: Program) -> tuple[str, ...]:
    """What is wrong with a program."""
    problems = []
    if program.num_unwaited_loops:
        # In a graph XLA reads it while the body may still run (docs/performance.md).
        problems.append(f"{program.num_unwaited_loops} loops whose condition takes no kernel")
    launches = program.launches
    if launches is not None and launches != ONE_GRAPH:
        problems.append(f"the host starts {launches[:4]}, not {ONE_GRAPH}")
    if program.num_slices:
        # Mosaic refuses, when it runs, what does not begin at a multiple of 256 bytes.
        problems.append(f"{program.num_slices} kernels are handed slices in place")
    if program.pool is None:
        return (*problems, *_find_sample_problems(program))
    memory, pool_bytes = program.memory, program.pool_bytes
    if copies := program.pool_copies():
        problems.append(f"{len(copies)} copies of the pool, the first: {copies[0]}")
    if memory.alias_size_in_bytes < pool_bytes:
        problems.append(f"{memory.alias_size_in_bytes} bytes in place, the pool has {pool_bytes}")
    if memory.temp_size_in_bytes >= MAX_TEMPORARIES * pool_bytes:
        problems.append(f"temporaries of {memory.temp_size_in_bytes} bytes, pool {pool_bytes}")
    if not program.spill_bytes:
        problems.append("the assembler said nothing: no kernel of ours was compiled")
    if max(program.spill_bytes, default=0) > MAX_SPILL_BYTES:
        problems.append(f"spills of {program.spill_bytes} bytes > {MAX_SPILL_BYTES}")
    return tuple(problems)


def _find_sample_problems(program: Program) -> Iterator[str]:
    found, logits = program.memory.temp_size_in_bytes, NUM_SAMPLES * QWEN3_4B.vocab_size * 4
    if found > MAX_SAMPLE_ARRAYS * logits:
        yield f"temporaries of {found} bytes, {found / logits:.2f} times the logits"


def run(name: str, compile_it: Callable[[Path], Program], folder: Path) -> Row:
    start = time.monotonic()
    signal.alarm(MAX_COMPILE_S)
    # why any exception: what the compiler refuses comes in many classes, and is a line of the table
    try:
        program = compile_it(folder / name.replace(" ", "_"))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        problems = (f"{type(error).__name__}: {text}",)
        return Row(name, time.monotonic() - start, 0, (), (), problems)
    finally:
        signal.alarm(0)
    return Row(
        name,
        program.seconds,
        program.memory.temp_size_in_bytes,
        program.spill_bytes,
        program.registers,
        find_problems(program),
    )


def _give_up(signal_number: int, frame: object) -> None:
    raise TimeoutError(f"not compiled after {MAX_COMPILE_S} s")


def tasks(step_folder: Path, *, short: bool) -> Iterator[tuple[str, Callable[[Path], Program]]]:
    mesh = h200_mesh()
    for name, shape in VARIANTS.items():
        if not short or name in SHORT_VARIANTS:
            yield name, partial(compile_attention, mesh, shape)
    # 16 tokens are fewer than a tile of queries has.
    for name, model, bucket in (
        ("tiny Qwen3", TINY_QWEN3, Bucket(16, 8)),
        ("tiny Qwen3", TINY_QWEN3, Bucket(256, 8)),
        ("tiny Llama", TINY_LLAMA, Bucket(16, 8)),
    ):
        compile_it = partial(compile_step, mesh, model, bucket, step_folder)
        yield f"{name}, {bucket.num_tokens} tokens, mixed", compile_it
    for rows in (8, 64):
        decode = partial(compile_step, mesh, QWEN3_4B, Bucket(rows, rows), step_folder)
        yield f"Qwen3-4B, {QWEN3_4B.num_layers} layers, {rows} rows, decode", decode
    for variant in (Variant.RANDOM, Variant.LIMITED_BOTH):
        sample = partial(compile_sample, mesh, QWEN3_4B, NUM_SAMPLES, variant, step_folder)
        yield f"sample, {NUM_SAMPLES} rows, {variant.value}", sample
    if not short:
        mixed = partial(compile_step, mesh, QWEN3_4B, Bucket(512, 64), step_folder)
        yield f"Qwen3-4B, {QWEN3_4B.num_layers} layers, mixed", mixed


def controls(folder: Path, step_folder: Path) -> Iterator[Row]:
    """Turns verdicts around: a copied pool, slices and loops must be noticed."""
    mesh = h200_mesh()
    copied = partial(compile_attention, mesh, AttentionShape(), donate=False)
    sample = partial(compile_sample, mesh, QWEN3_4B, NUM_SAMPLES, Variant.LIMITED, step_folder)
    driven = partial(sample, options={})

    def unwaited(dump_folder: Path) -> Program:
        with mock.patch.object(sampling, "draw_kept", _count_down):
            return sample(dump_folder)

    def sliced(dump_folder: Path) -> Program:
        with mock.patch.object(attention_hopper, "own_lens", lambda lens: lens):
            return compile_step(mesh, TINY_QWEN3, Bucket(256, 64), step_folder, dump_folder)

    def cut(dump_folder: Path) -> Program:
        def paged_prefill(q: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
            return prefill_hopper.paged_prefill(q, *arguments, **options)[:, : q.shape[1]]

        with mock.patch.object(attention_hopper, "paged_prefill", paged_prefill):
            # 48 tokens are fewer than a tile of queries has, and read in one term.
            return compile_step(mesh, TINY_QWEN3, Bucket(48, 8), step_folder, dump_folder)

    for name, compile_it, wanted in (
        ("control: a pool that is not donated", copied, ("copies of", "in place")),
        ("control: a loop of the host", driven, ("kWhile",)),
        ("control: a flag as a condition", unwaited, ("condition takes no kernel",)),
        ("control: lengths as a slice", sliced, ("slices in place",)),
        ("control: an output cut too early", cut, ("slices in place",)),
    ):
        row = run(name, compile_it, folder)
        is_noticed = all(any(words in problem for problem in row.problems) for words in wanted)
        yield replace(row, problems=() if is_noticed else ("what is wrong was not noticed",))


def _count_down(
    gaps: jax.Array, noisy: jax.Array, top_k: jax.Array, top_p: jax.Array, *, has_both: bool
) -> jax.Array:
    """In place of `draw_kept`: a loop whose condition is a flag that its body computed."""

    def lower(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lowered = state[0] - 1
        return lowered, (lowered > top_k).any()

    start = jnp.argmax(noisy, axis=1).astype(jnp.int32), jnp.bool_(True)
    return jax.lax.while_loop(lambda state: state[1], lower, start)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles for an H200 and checks memory.")
    parser.add_argument("--short", action="store_true", help="the quick form, under 3 minutes")
    parser.add_argument("--only", default="", help="programs whose name contains this text")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _give_up)
    start = time.monotonic()
    print(f"{'variant':36} {'s':>6} {'temporaries':>15} {'spills':>10} {'registers':>12}  verdict")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        step_folder = Path(folder) / "steps"
        dump_steps(step_folder)
        for name, compile_it in tasks(step_folder, short=args.short):
            if args.only in name:
                rows.append(run(name, compile_it, Path(folder)))
                print(rows[-1], flush=True)
        for row in controls(Path(folder), step_folder):
            rows.append(row)
            print(row, flush=True)
    num_bad = sum(bool(row.problems) for row in rows)
    print(
        f"{len(rows)} programs, {num_bad} bad, {time.monotonic() - start:.0f} s "
        f"(jax {jax.__version__})"
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
