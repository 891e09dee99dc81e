"""Rows of bench_engine.py's table that one engine gives; a process of its own runs them.

    python scripts/engine_rows.py '{"model": FOLDER, "rows": ["prefill", "mixed"], "quick": false}'

Without a GPU every row is small. A row that fails is reported, and the next one runs.
"""

import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from bench_processes import tell
from traces import Trace, mixed_trace, random_trace

from jaxpaged import LLM, SamplingParams
from jaxpaged.cli.flags import limit_device_memory
from jaxpaged.config import EngineConfig

Figures = Iterator[tuple[str, float]]


@dataclass(frozen=True)
class Sizes:
    """How large the rows are; the defaults are those of docs/performance.md."""

    max_num_seqs: int = 256
    prefill: tuple[int, int] = (64, 2048)  # requests, tokens
    num_mixed: int = 1000
    num_continuous: int = 256
    equal_batches: tuple[int, ...] = (1, 32, 128)
    num_shared: int = 64
    sharing_blocks: int = 2048
    sharing_prompt: int = 512
    max_tokens: int = 128


SMALL = Sizes(
    max_num_seqs=8,
    prefill=(4, 64),
    num_mixed=12,
    num_continuous=12,
    equal_batches=(1, 4),
    num_shared=6,
    sharing_blocks=48,
    sharing_prompt=120,
    max_tokens=24,
)
EQUAL_TOKENS = (128, 64)  # in, out


def main() -> None:
    options = json.loads(sys.argv[1])
    # As `jaxpaged serve` does: the pool, and with it every compiled program, has the same size.
    limit_device_memory(EngineConfig.memory_fraction)
    sizes = Sizes() if jax.default_backend() == "gpu" else SMALL
    rows: list[str] = options["rows"]
    engine_options: dict[str, Any] = {
        "load_format": "random",
        "max_num_seqs": sizes.max_num_seqs,
        "max_queued_requests": 2048,
    }
    if "sharing" in rows:
        engine_options["num_blocks"] = sizes.sharing_blocks
    start = time.monotonic()
    with LLM(options["model"], **engine_options) as llm:
        tell("engine_start_s", time.monotonic() - start)
        for row in rows:
            try:
                for name, value in ROWS[row](llm, sizes, 1 if options["quick"] else 3):
                    tell(name, value)
            except Exception:
                traceback.print_exc()
                tell(f"{row}_failed", 1)
        tell("compiles_after_warmup", llm.stats().compiles_after_warmup)


# --- the rows ----------------------------------------------------------------------------------


def start(llm: LLM, sizes: Sizes, repeats: int) -> Figures:
    """Nothing but a first token: who started this process looks at the clock."""
    run(llm, random_trace([16], 1, llm.info.vocab_size))
    yield "first_token", 1


def prefill(llm: LLM, sizes: Sizes, repeats: int) -> Figures:
    count, length = sizes.prefill
    seconds = median_seconds(llm, [length] * count, 1, repeats)
    yield "prefill_tokens_per_s", count * length / seconds


def mixed(llm: LLM, sizes: Sizes, repeats: int) -> Figures:
    trace = mixed_trace(sizes.num_mixed, llm.info.vocab_size)
    run(llm, random_trace([64] * 8, 8, llm.info.vocab_size))
    llm.reset_prefix_cache()
    seconds = run(llm, trace)
    yield "mixed_s", seconds
    yield "mixed_tokens_per_s", sum(max_tokens for _, max_tokens in trace) / seconds
    yield "preemptions", llm.stats().preemptions


def continuous(llm: LLM, sizes: Sizes, repeats: int) -> Figures:
    rng = random.Random(0)
    lengths = [rng.choice((32, 64, 128, 256, 512)) for _ in range(sizes.num_continuous)]
    seconds = median_seconds(llm, lengths, sizes.max_tokens, repeats)
    yield "continuous_tokens_per_s", sizes.num_continuous * sizes.max_tokens / seconds


def equal(llm: LLM, sizes: Sizes, repeats: int) -> Figures:
    num_prompt, num_new = EQUAL_TOKENS
    for batch in sizes.equal_batches:
        seconds = median_seconds(llm, [num_prompt] * batch, num_new, repeats)
        yield f"generate_tokens_per_s_{batch}", batch * num_new / seconds


def sharing(llm: LLM, sizes: Sizes, repeats: int) -> Figures:
    """n = 4 against four requests each that share nothing; blocks of one such request alone."""
    prompts = [
        prompt
        for prompt, _ in random_trace(
            [sizes.sharing_prompt] * sizes.num_shared, 0, llm.info.vocab_size
        )
    ]
    together = [_sampled(sizes, seed=10 * i, n=4) for i in range(len(prompts))]
    apart = [
        _sampled(sizes, seed=10 * i + j, use_prefix_cache=False)
        for i in range(len(prompts))
        for j in range(4)
    ]
    fours = [prompt for prompt in prompts for _ in range(4)]
    peaks = [
        peak_blocks(llm, prompts[:1], together[:1]),
        peak_blocks(llm, fours[:4], apart[:4]),
    ]
    yield "sharing_peak_blocks", peaks[0]
    yield "separate_peak_blocks", peaks[1]
    yield "sharing_blocks_saved", 1 - peaks[0] / peaks[1]
    num_tokens = len(fours) * sizes.max_tokens
    speeds: dict[str, list[float]] = {"sharing": [], "separate": []}
    for _ in range(repeats):
        for name, texts, params in (("sharing", prompts, together), ("separate", fours, apart)):
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            llm.generate(texts, params, use_tqdm=False)
            speeds[name].append(num_tokens / (time.perf_counter() - begin))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, value in medians.items():
        yield f"{name}_tokens_per_s", value
    yield "sharing_speedup", medians["sharing"] / medians["separate"]


ROWS = {
    "start": start,
    "prefill": prefill,
    "mixed": mixed,
    "continuous": continuous,
    "hf": equal,
    "sharing": sharing,
}


# --- how they are timed ------------------------------------------------------------------------


def run(llm: LLM, trace: Trace) -> float:
    """Seconds that all requests take together: greedy, EOS ignored."""
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for _, max_tokens in trace
    ]
    begin = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in trace], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    told = [output.usage.completion_tokens for output in outputs]
    assert told == [max_tokens for _, max_tokens in trace], "an answer is not as long as asked for"
    return seconds


def median_seconds(llm: LLM, lengths: list[int], max_tokens: int, repeats: int) -> float:
    """Of random prompts of these lengths, after a first, short round."""
    run(llm, random_trace(lengths, min(2, max_tokens), llm.info.vocab_size))
    return statistics.median(
        run(llm, random_trace(lengths, max_tokens, llm.info.vocab_size)) for _ in range(repeats)
    )


def peak_blocks(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> int:
    """The most blocks in use while requests run, as seen between steps."""
    peak = 0
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(llm.generate, prompts, params, use_tqdm=False)
        while not answers.done():
            peak = max(peak, llm.stats().used_blocks)
    answers.result()
    return peak


def _sampled(sizes: Sizes, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=sizes.max_tokens, temperature=1, ignore_eos=True, **options)


if __name__ == "__main__":
    main()
