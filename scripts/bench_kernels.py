#!/usr/bin/env python3
"""Times the attention kernels against the memory's and the matrix units' ceilings of the same run.

    scripts/bench_kernels.py [--quick] [--only TEXT] [--with-write] [--json FILE]

Random data, permuted block tables, more layers than the L2 holds, results checked against plain
float32 attention in the same run. The keys are in the pool already, as where peers are timed;
`--with-write` times the write of the new ones, too. Without a Hopper GPU it runs one small case
through XLA, with the write.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import attention_hopper, ops
from kernels_pallas.metadata import AttentionMetadata, AttentionOptions
from kernels_pallas.pool import KVPool

REPEATS = 15


@dataclass(frozen=True)
class Case:
    """A batch: `kv_lens[i]` keys and `q_lens[i]` queries a row."""

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def is_decode(self) -> bool:
        return max(self.q_lens) == 1

    @property
    def kv_bytes(self) -> int:
        return sum(self.kv_lens) * 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def flops(self) -> int:
        """Of causal attention: 4 * S^2 / 2 * heads * head_dim, a prefix counted whole."""
        pairs = sum(
            q * (kv - q) + q * q // 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True)
        )
        return 4 * pairs * self.num_q_heads * self.head_dim


def decode(rows: int, kv_len: int, *, num_kv_heads: int = 8, block_size: int = 16) -> Case:
    heads = f", {num_kv_heads} KV heads" if num_kv_heads != 8 else ""
    block = f", block {block_size}" if block_size != 16 else ""
    name = f"decode {rows} x {kv_len}{heads}{block}"
    kv_lens, q_lens = (kv_len,) * rows, (1,) * rows
    return Case(name, kv_lens, q_lens, num_kv_heads=num_kv_heads, block_size=block_size)


def prefill(rows: int, length: int) -> Case:
    return Case(f"prefill {rows} x {length}", (length,) * rows, (length,) * rows)


def varied(rows: int, longest: int) -> Case:
    lens = np.random.default_rng(0).integers(1, longest + 1, rows)
    return Case(f"decode {rows} x 1..{longest}", tuple(map(int, lens)), (1,) * rows)


GPU_CASES = [
    decode(64, 2048),
    decode(8, 8192),
    decode(256, 1024),
    decode(1, 32768),
    decode(64, 2048, num_kv_heads=32),
    varied(64, 4096),
    decode(64, 2048, block_size=64),
    prefill(2, 4096),
    prefill(8, 1024),
    prefill(1, 16384),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the attention kernels.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--with-write", action="store_true", help="new keys are written, too")
    parser.add_argument("--json", help="write the figures there, too")
    options = parser.parse_args()
    repeats = 5 if options.quick else REPEATS
    if jax.default_backend() == "gpu":
        ceilings = {"read_tb_per_s": read_ceiling(), "tflop_per_s": matrix_ceiling()}
        cases = [case for case in GPU_CASES if options.only in case.name]
        impl = "hopper"
    else:
        ceilings, impl = {}, "xla"
        cases = [Case("decode 8 x 256", (256,) * 8, (1,) * 8, 4, 2, 64)]
    print_header(ceilings)
    rows = []
    for case in cases:
        rows.append(measure(case, impl, repeats, with_write=options.with_write or not ceilings))
        print_row(rows[-1], ceilings)
    if options.json:
        Path(options.json).write_text(json.dumps({"ceilings": ceilings, "cases": rows}, indent=2))


def measure(case: Case, impl: str, repeats: int, *, with_write: bool) -> dict[str, Any]:
    """Microseconds of one call, its rate, and its error against plain attention."""
    num_layers = 4  # with keys of their own
    num_calls = 36 if impl == "hopper" else num_layers  # of a step, which share a plan
    dtype = jnp.bfloat16 if impl == "hopper" else jnp.float32
    q, kv_new, pool, metadata = make_inputs(case, num_layers, dtype)

    # Jitted by itself: all layers of the chain below share one compiled kernel.
    @jax.jit
    def write_and_attend(q, kv_new, pool, layer, metadata):
        return ops.paged_attention(
            q, kv_new, kv_new, pool, layer, metadata, sm_scale=case.head_dim**-0.5, impl=impl
        )

    @jax.jit
    def attend(q, kv_new, pool, layer, metadata):
        group = case.num_q_heads // case.num_kv_heads
        options = AttentionOptions(case.head_dim**-0.5)
        tuning = attention_hopper.tuning_for(pool, metadata)
        terms = attention_hopper.attend(
            q[None], group, pool, layer, metadata, options, None, tuning
        )
        return terms[0], pool

    call = write_and_attend if with_write else attend

    @partial(jax.jit, donate_argnums=2)
    def all_layers(q, kv_new, pool, metadata):
        out = q
        for i in range(num_calls):
            layer = i % num_layers
            # Each call takes the one before as its queries: they cannot overlap.
            out, pool = call(out, kv_new, pool, jnp.int32(layer), metadata)
        return out, pool

    first, _ = write_and_attend(q, kv_new, pool, jnp.int32(1), metadata)
    error = relative_error(case, first, q, pool, metadata, kv_new)

    def run(count: int) -> float:
        nonlocal pool
        start = time.perf_counter()
        out = q
        for _ in range(count):
            out, pool = all_layers(q, kv_new, pool, metadata)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    run(3)
    seconds = _slope(run, 4, repeats) / num_calls
    rate = case.kv_bytes / seconds / 1e12 if case.is_decode else case.flops / seconds / 1e12
    unit = "TB/s" if case.is_decode else "TFLOP/s"
    return {"case": case.name, "us": seconds * 1e6, "rate": rate, "unit": unit, "error": error}


def make_inputs(
    case: Case, num_layers: int, dtype: Any
) -> tuple[jax.Array, jax.Array, KVPool, AttentionMetadata]:
    rng, block_size = np.random.default_rng(0), case.block_size
    counts = [-(-length // block_size) for length in case.kv_lens]
    num_blocks = sum(counts)
    order = rng.permutation(num_blocks) + 1
    tables = np.zeros((len(counts), max(counts)), np.int32)
    slots, start = [], 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start : start + count]
        start += count
        positions = np.arange(case.kv_lens[row] - case.q_lens[row], case.kv_lens[row])
        slots.append(tables[row, positions // block_size] * block_size + positions % block_size)
    shape = (num_layers * (num_blocks + 1), 2, case.num_kv_heads, block_size, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    num_tokens = sum(case.q_lens)
    q = jax.random.normal(keys[1], (num_tokens, case.num_q_heads, case.head_dim), dtype)
    kv_new = jax.random.normal(keys[2], (num_tokens, case.num_kv_heads, case.head_dim), dtype)
    metadata = AttentionMetadata(
        block_tables=jnp.asarray(tables),
        q_lens=jnp.asarray(case.q_lens, jnp.int32),
        kv_lens=jnp.asarray(case.kv_lens, jnp.int32),
        slot_mapping=jnp.asarray(np.concatenate(slots), jnp.int32),
        num_decode_rows=jnp.int32(len(counts) if case.is_decode else 0),
    )
    data = jax.random.normal(keys[0], shape, dtype)
    return q, kv_new, KVPool(data, num_layers, case.head_dim), metadata


def relative_error(
    case: Case,
    out: jax.Array,
    q: jax.Array,
    pool: KVPool,
    metadata: AttentionMetadata,
    kv_new: jax.Array,
) -> float:
    """Against float32 attention of a few rows, their last 64 queries."""
    k, v = pool.layer_kv(1)
    num, difference = 0.0, 0.0
    ends = np.cumsum(case.q_lens)
    for row in {0, len(case.kv_lens) // 2, len(case.kv_lens) - 1}:
        kv_len, queries = case.kv_lens[row], min(64, case.q_lens[row])
        blocks = metadata.block_tables[row, : -(-kv_len // case.block_size)]
        keys, values = (
            x[blocks].swapaxes(1, 2).reshape(-1, *x.shape[1:2], case.head_dim)[:kv_len]
            for x in (k, v)
        )
        new = kv_new[ends[row] - case.q_lens[row] : ends[row]]
        keys = jnp.concatenate([keys[: kv_len - case.q_lens[row]], new])
        values = jnp.concatenate([values[: kv_len - case.q_lens[row]], new])
        part = slice(int(ends[row]) - queries, int(ends[row]))
        expected = plain_attention(q[part], keys, values)
        actual = out[part].astype(jnp.float32)
        difference += float(jnp.sum((actual - expected) ** 2))
        num += float(jnp.sum(expected**2))
    return math.sqrt(difference / num)


@jax.jit
def plain_attention(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Causal attention of the last len(q) positions, dense, in float32."""
    queries, num_q_heads, head_dim = q.shape
    group = num_q_heads // keys.shape[1]
    q, keys, values = (x.astype(jnp.float32) for x in (q, keys, values))
    keys, values = (jnp.repeat(x, group, axis=1) for x in (keys, values))
    scores = jnp.einsum("qhd,khd->hqk", q, keys, precision="highest") * head_dim**-0.5
    last = keys.shape[0] - queries + jnp.arange(queries)
    scores = jnp.where(jnp.arange(keys.shape[0]) <= last[:, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, values, precision="highest")


def read_ceiling() -> float:
    """TB/s of reading a large array once."""
    x = jax.random.normal(jax.random.key(0), (2**31,), jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    return x.nbytes / _seconds(lambda: total(x)) / 1e12


def matrix_ceiling() -> float:
    """TFLOP/s of a large bf16 product."""
    n = 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    return 2 * n**3 / _seconds(lambda: product(a)) / 1e12


def _seconds(call: Callable[[], jax.Array]) -> float:
    def run(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(count)])
        return time.perf_counter() - start

    run(2)
    return _slope(run, 10, 7)


def _slope(run: Callable[[int], float], more: int, repeats: int) -> float:
    """Median seconds of one call: what `more` calls add, so that waiting for the last cancels."""
    return statistics.median((run(4 + more) - run(4)) / more for _ in range(repeats))


def print_header(ceilings: dict[str, float]) -> None:
    if ceilings:
        print(
            f"ceilings: read {ceilings['read_tb_per_s']:.2f} TB/s, "
            f"matrix product {ceilings['tflop_per_s']:.0f} TFLOP/s"
        )
    print(f"{'case':34} {'us':>9} {'rate':>9} {'unit':8} {'of ceiling':>10} {'error':>8}")


def print_row(row: dict[str, Any], ceilings: dict[str, float]) -> None:
    key = "read_tb_per_s" if row["unit"] == "TB/s" else "tflop_per_s"
    share = f"{row['rate'] / ceilings[key]:10.0%}" if ceilings else f"{'-':>10}"
    print(
        f"{row['case']:34} {row['us']:9.1f} {row['rate']:9.2f} {row['unit']:8} {share} "
        f"{row['error']:8.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
