#!/usr/bin/env python3
"""Measures tile sizes of the TPU kernels on the TPU here, and prints those to keep.

    scripts/tune_tpu.py [--kv-heads 8] [--q-heads 32] [--head-dim 128] [--block-size 64]

For decode (64 rows) and prefill (one prompt of 4096) it tries each tile, prints its time and rate,
and last the line for `MEASURED_TPU_TILES` in kernels_pallas/tuning.py. `--interpret` runs one tiny
case in the interpreter, so that this file does not rot where no TPU is.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import attention_tpu, ops
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.pool import KVPool, pool_bytes_per_block
from kernels_pallas.tuning import TPUPhaseTuning, TPUTuning

# Two timed chains of calls, so that what a call costs once cancels.
SHORT_CHAIN, LONG_CHAIN, REPEATS = 4, 20, 5


@dataclass(frozen=True)
class Sizes:
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_rows: int
    context: int
    prompt: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures tile sizes of the TPU kernels.")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--interpret", action="store_true", help="one tiny case, anywhere")
    args = parser.parse_args()
    if not args.interpret and jax.default_backend() != "tpu":
        print(f"tune_tpu: no TPU here, only {jax.default_backend()}", file=sys.stderr)
        return 1
    if args.interpret:
        sizes, impl = Sizes(2, 1, 64, 16, 2, 32, 16), "tpu_interpret"
    else:
        heads = args.q_heads, args.kv_heads, args.head_dim
        sizes, impl = Sizes(*heads, args.block_size, 64, 2048, 4096), "tpu"
    decode = _case(sizes, [(1, sizes.context)] * sizes.num_rows)
    prefill = _case(sizes, [(sizes.prompt, sizes.prompt)])
    default = attention_tpu.tuning_for(decode[0], decode[3])
    token_bytes = pool_bytes_per_block(
        num_layers=1,
        num_kv_heads=sizes.num_kv_heads,
        block_size=1,
        head_dim=sizes.head_dim,
        dtype=jnp.bfloat16,
        layout="tpu",
    )
    best = default
    print(
        "| phase | fetch | compute | buffers | queries | us | rate |\n|---|---|---|---|---|---|---|"
    )
    work = sizes.num_rows * sizes.context * token_bytes / 1e12
    best_decode = _best("decode", impl, decode, default, args.interpret, work, "TB/s")
    best = replace(best, decode=best_decode)
    work = 2 * sizes.num_q_heads * sizes.head_dim * sizes.prompt**2 / 1e12
    best = replace(
        best, prefill=_best("prefill", impl, prefill, best, args.interpret, work, "TFLOP/s")
    )
    kind = jax.devices()[0].device_kind
    print(f"\nMEASURED_TPU_TILES[{kind!r}, {token_bytes}] = {best}")
    return 0


def _best(
    phase: str, impl: str, case: tuple, default: TPUTuning, is_quick: bool, work: float, unit: str
) -> TPUPhaseTuning:
    """The fastest tiles; `work` is what one call does, in `unit` times seconds."""
    timed = []
    block_size, max_tokens = case[3].block_size, case[5].block_tables.shape[1] * case[3].block_size
    for tiles in _candidates(phase, getattr(default, phase), block_size, max_tokens, is_quick):
        tuning = replace(default, **{phase: tiles})
        try:
            seconds = _measure(impl, case, tuning, is_quick)
        except jax.errors.JaxRuntimeError as error:
            print(f"| {phase} | {tiles} | does not compile: {str(error).splitlines()[0][:60]} |")
            continue
        timed.append((seconds, tiles))
        print(
            f"| {phase} | {tiles.fetch} | {tiles.compute} | {tiles.num_buffers} | {tiles.queries} |"
            f" {seconds * 1e6:.1f} | {work / seconds:.2f} {unit} |",
            flush=True,
        )
    return min(timed, key=lambda item: item[0])[1]


def _candidates(
    phase: str, default: TPUPhaseTuning, block_size: int, max_tokens: int, is_quick: bool
) -> Iterator[TPUPhaseTuning]:
    yield default
    if is_quick:
        return
    queries = (4, 8, 16) if phase == "decode" else (32, 64, 128, 256)
    for fetch in (256, 512, 1024, 2048):
        for compute in (128, 256, 512, 1024):
            fits = compute <= fetch <= max_tokens and fetch % block_size == 0
            for num_buffers in (2, 3, 4) if fits else ():
                for num_queries in queries:
                    tiles = TPUPhaseTuning(fetch, compute, num_buffers, num_queries)
                    if tiles != default:
                        yield tiles


def _measure(impl: str, case: tuple, tuning: TPUTuning, is_quick: bool) -> float:
    """Seconds of one call: the difference of two chains of calls on the device."""
    lengths = (1, 2) if is_quick else (SHORT_CHAIN, LONG_CHAIN)
    chains = [jax.jit(partial(_chain, impl=impl, tuning=tuning, length=n)) for n in lengths]
    medians = []
    for chain in chains:
        jax.block_until_ready(chain(*case))
        times = []
        for _ in range(1 if is_quick else REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(chain(*case))
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return max(medians[1] - medians[0], 1e-9) / (lengths[1] - lengths[0])


def _chain(q, k, v, pool, layer, metadata, *, impl: str, tuning: TPUTuning, length: int):
    """Calls that wait for each other: each takes the output of the one before as its queries."""

    def call(_, carry):
        q, pool = carry
        return ops.paged_attention(
            q, k, v, pool, layer, metadata, sm_scale=0.1, impl=impl, tuning=tuning
        )

    return jax.lax.fori_loop(0, length, call, (q, pool))[0]


def _case(sizes: Sizes, rows: list[tuple[int, int]]) -> tuple:
    """A step of the rows, their blocks in random order."""
    rng = np.random.default_rng(0)
    width = max(kv_len for _, kv_len in rows) // sizes.block_size
    blocks = rng.permutation(len(rows) * width).astype(np.int32) + 1
    tables = blocks.reshape(len(rows), width)
    q_lens, kv_lens = np.array(rows, np.int32).T
    positions = [np.arange(kv_len - q_len, kv_len) for q_len, kv_len in rows]
    slots = [
        table[position // sizes.block_size] * sizes.block_size + position % sizes.block_size
        for table, position in zip(tables, positions, strict=True)
    ]
    metadata = AttentionMetadata(
        block_tables=jnp.asarray(tables),
        q_lens=jnp.asarray(q_lens),
        kv_lens=jnp.asarray(kv_lens),
        slot_mapping=jnp.asarray(np.concatenate(slots), jnp.int32),
        num_decode_rows=jnp.int32(len(rows) if max(q_lens) == 1 else 0),
    )
    pool = KVPool.create(
        num_layers=1,
        num_blocks=len(blocks),
        num_kv_heads=sizes.num_kv_heads,
        block_size=sizes.block_size,
        head_dim=sizes.head_dim,
        dtype=jnp.bfloat16,
        layout="tpu",
    )
    keys = jax.random.split(jax.random.key(0), 4)
    noise = jax.random.normal(keys[0], pool.data.shape, jnp.bfloat16)
    q, k, v = (
        jax.random.normal(key, (metadata.num_tokens, heads, sizes.head_dim), jnp.bfloat16)
        for key, heads in zip(
            keys[1:], (sizes.num_q_heads, sizes.num_kv_heads, sizes.num_kv_heads), strict=True
        )
    )
    return q, k, v, replace(pool, data=noise), jnp.int32(0), metadata


if __name__ == "__main__":
    sys.exit(main())
