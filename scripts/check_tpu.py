"""Compiles the TPU kernels and whole steps for four generations and checks their memory.

Run it through scripts/check_tpu, which makes the environment. One line a program:

    generation  variant  compile s  HBM bytes  VMEM bytes

and a failure where the pool is copied, not updated in place, where temporaries reach 5 % of it,
where VMEM or HBM is not enough, or where a program does not compile at all. A program that copies
its pool on purpose stands in between and must fail.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from tpu_programs import (
    LLAMA_8B,
    QWEN3_4B,
    AttentionShape,
    Program,
    compile_attention,
    compile_block_copies,
    compile_step,
    topology_mesh,
)

from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.buckets import Bucket

# Per generation, a topology of one chip and one of four.
TOPOLOGIES = {
    "v5e": ("v5e:1x1", "v5e:2x2"),
    "v6e": ("v6e:1x1", "v6e:2x2"),
    "v5p": ("v5p:1x1x1", "v5p:2x2x1"),
    "7x": ("tpu7x:1x1x1", "tpu7x:2x2x1"),
}
MAX_TEMPORARIES = 0.05
DECODE, PREFILL = Bucket(64, 64), Bucket(512, 64)
# What CI compiles of each generation: both pool layouts, and a decode step of few layers over four
# devices; of one generation, a prefill step too.
SHORT_VARIANTS = ("head_dim 128", "head_dim 64, all options")
SHORT_LAYERS = 2
SHORT_PREFILL = "v6e"

VARIANTS = {
    "head_dim 128": AttentionShape(),
    "head_dim 64": AttentionShape(head_dim=64),
    "head_dim 256": AttentionShape(head_dim=256, num_q_heads=16),
    "head_dim 80, padded": AttentionShape(head_dim=80),
    "float32": AttentionShape(dtype=jnp.float32),
    "float32, head_dim 64": AttentionShape(dtype=jnp.float32, head_dim=64),
    "float32, head_dim 256": AttentionShape(dtype=jnp.float32, head_dim=256, num_q_heads=16),
    "blocks of 32": AttentionShape(block_size=32),
    "blocks of 64": AttentionShape(block_size=64),
    "blocks of 128": AttentionShape(block_size=128),
    "1 query head a KV head": AttentionShape(num_q_heads=8),
    "16 query heads, 1 KV head": AttentionShape(num_q_heads=16, num_kv_heads=1),
    "32 KV heads": AttentionShape(num_kv_heads=32),
    "window": AttentionShape(window=1024),
    "soft cap": AttentionShape(soft_cap=30.0),
    "sinks": AttentionShape(has_sinks=True),
    "head_dim 64, all options": AttentionShape(
        head_dim=64, num_q_heads=64, window=128, soft_cap=30.0, has_sinks=True
    ),
}


@dataclass(frozen=True)
class Task:
    generation: str
    name: str
    compile: Callable[[], Program]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    generation: str
    name: str
    seconds: float
    hbm_bytes: int
    vmem_bytes: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "; ".join(self.problems) or "ok"
        return (
            f"{self.generation:4} {self.name:42} {self.seconds:6.1f} {self.hbm_bytes:15,d}"
            f" {self.vmem_bytes:12,d}  {verdict}"
        )


def find_problems(program: Program) -> tuple[str, ...]:
    """What is wrong with a program's memory."""
    problems = []
    memory, pool_bytes = program.memory, program.pool_bytes
    if copies := program.pool_copies():
        problems.append(f"{len(copies)} copies of the pool, the first: {copies[0]}")
    if memory.alias_size_in_bytes < pool_bytes:
        problems.append(f"{memory.alias_size_in_bytes} bytes in place, the pool has {pool_bytes}")
    if memory.temp_size_in_bytes >= MAX_TEMPORARIES * pool_bytes:
        problems.append(f"temporaries of {memory.temp_size_in_bytes} bytes, pool {pool_bytes}")
    if program.vmem_bytes > program.generation.vmem_bytes:
        problems.append(f"{program.vmem_bytes} bytes of VMEM > {program.generation.vmem_bytes}")
    if program.hbm_bytes > program.generation.hbm_bytes:
        problems.append(f"{program.hbm_bytes} bytes of HBM > {program.generation.hbm_bytes}")
    return tuple(problems)


def kernel_tasks(generation: str, *, short: bool) -> Iterator[Task]:
    for name, shape in VARIANTS.items():
        if not short or name in SHORT_VARIANTS:
            yield Task(generation, name, partial(_attention, TOPOLOGIES[generation][0], shape))


def step_tasks(generation: str, *, short: bool) -> Iterator[Task]:
    one, four = TOPOLOGIES[generation]
    if short:
        layers = {"num_layers": SHORT_LAYERS, "layer_windows": (None,) * SHORT_LAYERS}
        llama, qwen3 = (replace(model, **layers) for model in (LLAMA_8B, QWEN3_4B))
        name = f"Llama-3.1-8B decode, {SHORT_LAYERS} layers, 4 devices"
        yield Task(generation, name, partial(_step, four, 4, llama, DECODE))
        if generation == SHORT_PREFILL:
            name = f"Qwen3-4B prefill, {SHORT_LAYERS} layers"
            yield Task(generation, name, partial(_step, one, 1, qwen3, PREFILL))
        return
    for phase, bucket in (("decode", DECODE), ("prefill", PREFILL)):
        yield Task(generation, f"Qwen3-4B {phase}", partial(_step, one, 1, QWEN3_4B, bucket))
        fits = generation != "v5e"  # 16 GB of weights fill one of those
        if fits:
            name = f"Llama-3.1-8B {phase}"
            yield Task(generation, name, partial(_step, one, 1, LLAMA_8B, bucket))
        if phase == "decode" or not fits:
            name = f"Llama-3.1-8B {phase}, 4 devices"
            yield Task(generation, name, partial(_step, four, 4, LLAMA_8B, bucket))
    yield Task(generation, "Qwen3-4B, block copies", partial(_block_copies, one))


def _attention(topology: str, shape: AttentionShape) -> Program:
    return compile_attention(topology_mesh(topology, 1), shape)


def _step(topology: str, num_devices: int, model: ModelConfig, bucket: Bucket) -> Program:
    return compile_step(topology_mesh(topology, num_devices), model, bucket)


def _block_copies(topology: str) -> Program:
    return compile_block_copies(topology_mesh(topology, 1), QWEN3_4B)


def run(task: Task) -> Row:
    start = time.monotonic()
    # why any exception: what the compiler refuses comes in many classes, and is a line of the table
    try:
        program = task.compile()
    except Exception as error:
        seconds = time.monotonic() - start
        text = " ".join(str(error).split())[:300]
        return Row(task.generation, task.name, seconds, 0, 0, (f"{type(error).__name__}: {text}",))
    return Row(
        task.generation,
        task.name,
        program.seconds,
        program.hbm_bytes,
        program.vmem_bytes,
        find_problems(program),
    )


def control(generation: str) -> Row:
    """Turns the verdict around: a copied pool must be noticed."""
    name = "control: a pool that is not donated"
    row = run(Task(generation, name, partial(_copying, TOPOLOGIES[generation][0])))
    is_noticed = all(
        any(words in problem for problem in row.problems) for words in ("copies of", "in place")
    )
    return replace(row, problems=() if is_noticed else ("its copied pool was not noticed",))


def _copying(topology: str) -> Program:
    return compile_attention(topology_mesh(topology, 1), AttentionShape(), donate=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles for TPUs and checks memory.")
    parser.add_argument("--short", action="store_true", help="what CI runs, under 3 minutes")
    parser.add_argument("--generation", choices=TOPOLOGIES, action="append")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    generations = args.generation or list(TOPOLOGIES)
    start = time.monotonic()
    print(f"{'TPU':4} {'variant':42} {'s':>6} {'HBM bytes':>15} {'VMEM bytes':>12}  verdict")
    tasks = [
        task
        for generation in generations
        for tasks in (step_tasks, kernel_tasks)
        for task in tasks(generation, short=args.short)
    ]
    num_bad = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        futures = [pool.submit(run, task) for task in tasks]
        futures += [pool.submit(control, generation) for generation in generations[:1]]
        for future in futures:
            row = future.result()
            num_bad += bool(row.problems)
            print(row, flush=True)
    print(
        f"{len(futures)} programs, {num_bad} bad, {time.monotonic() - start:.0f} s "
        f"(jax {jax.__version__})"
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
