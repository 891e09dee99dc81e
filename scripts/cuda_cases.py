"""What scripts/check_cuda compiles: programs to be right, and some that are wrong on purpose."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    h200_mesh,
)
from tpu_programs import QWEN3_4B

from jaxpaged.models.config import ModelConfig
from jaxpaged.runner import executables, sampling
from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.sampling import Variant
from kernels_pallas import attention_hopper, prefill_hopper

NUM_SAMPLES = 256
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
class Case:
    """A program to compile.

    Attributes:
      compile_it: takes a new folder for what the compiler tells.
      wanted: what is wrong with it; words of each problem that must be found.
    """

    name: str
    compile_it: Callable[[Path], Program]
    wanted: tuple[str, ...] = ()


def programs(step_folder: Path, *, short: bool) -> Iterator[Case]:
    """What must be right.

    Args:
      step_folder: that of `dump_steps`.
    """
    mesh = h200_mesh()
    for name, shape in VARIANTS.items():
        if not short or name in SHORT_VARIANTS:
            yield Case(name, partial(compile_attention, mesh, shape))
    # 16 tokens are fewer than a tile of queries has.
    for name, model, bucket in (
        ("tiny Qwen3", TINY_QWEN3, Bucket(16, 8)),
        ("tiny Qwen3", TINY_QWEN3, Bucket(256, 8)),
        ("tiny Llama", TINY_LLAMA, Bucket(16, 8)),
    ):
        compile_it = partial(compile_step, mesh, model, bucket, step_folder)
        yield Case(f"{name}, {bucket.num_tokens} tokens, mixed", compile_it)
    for rows in (8, 64):
        decode = partial(compile_step, mesh, QWEN3_4B, Bucket(rows, rows), step_folder)
        yield Case(f"Qwen3-4B, {QWEN3_4B.num_layers} layers, {rows} rows, decode", decode)
    for variant in (Variant.RANDOM, Variant.LIMITED_BOTH):
        sample = partial(compile_sample, mesh, QWEN3_4B, NUM_SAMPLES, variant, step_folder)
        yield Case(f"sample, {NUM_SAMPLES} rows, {variant.value}", sample)
    if not short:
        mixed = partial(compile_step, mesh, QWEN3_4B, Bucket(512, 64), step_folder)
        yield Case(f"Qwen3-4B, {QWEN3_4B.num_layers} layers, mixed", mixed)


def controls(step_folder: Path) -> Iterator[Case]:
    """A copied pool, slices, and loops that go wrong: they must be noticed."""
    mesh = h200_mesh()
    copied = partial(compile_attention, mesh, AttentionShape(), donate=False)
    sample = partial(compile_sample, mesh, QWEN3_4B, NUM_SAMPLES, Variant.LIMITED, step_folder)

    def driven(dump_folder: Path) -> Program:
        with mock.patch.object(executables, "LOOPS_IN_GRAPHS", {}):
            return sample(dump_folder)

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

    yield Case("control: a pool that is not donated", copied, ("copies of", "in place"))
    yield Case("control: a loop of the host", driven, ("kWhile",))
    yield Case("control: a flag as a condition", unwaited, ("condition takes no kernel",))
    yield Case("control: lengths as a slice", sliced, ("slices in place",))
    yield Case("control: an output cut too early", cut, ("slices in place",))


def _count_down(
    gaps: jax.Array, noisy: jax.Array, top_k: jax.Array, top_p: jax.Array, *, has_both: bool
) -> tuple[jax.Array, jax.Array]:
    """In place of `draw_kept`: a loop whose condition is a flag that its body computed."""

    def lower(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lowered = state[0] - 1
        return lowered, (lowered > top_k).any()

    start = jnp.argmax(noisy, axis=1).astype(jnp.int32), jnp.bool_(True)
    ids, has_more = jax.lax.while_loop(lambda state: state[1], lower, start)
    return ids, ~has_more
