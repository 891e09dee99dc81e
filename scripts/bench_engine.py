#!/usr/bin/env python3
"""Times the whole engine through `LLM.generate`, each figure printed as it comes.

    scripts/bench_engine.py [--quick] [--model NAME] [--batch 1 8] [--peer-python PYTHON]
    scripts/bench_engine.py --only prefill mixed hf [--quick] [--peer-python PYTHON]

Without a GPU: decode at several batch sizes, and prefill, of a small real model. A step's time is
(time for 16 + N new tokens - time for 16) / N, so that prefill and start cancel and host work
counts. On a GPU, or with `--only`: the rows of docs/performance.md's engine table, with Qwen3-4B's
shapes and random weights (tiny ones on the CPU). `--peer-python` names an interpreter that has
torch and transformers (it need not be this one): Hugging Face's own generate loop then runs on the
same model in the same call.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from bench_processes import figures_of, gpu_name
from engine_table import ROW_NAMES, run_rows

from jaxpaged import LLM, SamplingParams
from jaxpaged.checkpoint import locate

PREFILL_TOKENS = 256
PEER = Path(__file__).with_name("bench_peer_hf.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the whole engine.")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and repeats")
    parser.add_argument("--only", nargs="+", choices=ROW_NAMES, help="these rows of the table")
    parser.add_argument("--model", help="what LLM takes; decode and prefill of it alone")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--peer-python", help="interpreter with torch and transformers")
    parser.add_argument("--json", help="write the figures there, too")
    options = parser.parse_args()
    peer = options.peer_python or (sys.executable if find_spec("torch") else None)
    # why asked first: a process that holds the GPU could not start others on it
    gpu = None if options.model else gpu_name()
    if options.only or gpu:
        rows = options.only or ROW_NAMES
        return run_rows(rows, gpu=gpu, quick=options.quick, peer=peer, json_file=options.json)
    time_model(options, peer)
    return 0


def time_model(options: argparse.Namespace, peer: str | None) -> None:
    """Decode and prefill of a model, beside Hugging Face's where there is a peer."""
    model = options.model or "smollm2"
    num_new, repeats = (32, 3) if options.quick else (128, 5)
    start = time.monotonic()
    with LLM(model, max_num_seqs=max(8, *options.batch)) as llm:
        figures = {"start_s": time.monotonic() - start}
        for batch in options.batch:
            seconds = decode_seconds(llm, batch, options.prompt_tokens, num_new, repeats)
            figures[f"decode_tokens_per_s_{batch}"] = batch / seconds
        figures["prefill_tokens_per_s"] = PREFILL_TOKENS / prefill_seconds(llm, repeats)
    peers = {}
    if peer:
        arguments = {
            "path": str(locate(model).path),
            "batch": options.batch,
            "prompt_tokens": options.prompt_tokens,
            "prefill_tokens": PREFILL_TOKENS,
            "num_new": num_new,
            "repeats": repeats,
        }
        peers = dict(figures_of(peer, PEER, arguments))
    print_table(figures.items(), peers)
    if options.json:
        Path(options.json).write_text(json.dumps({"jaxpaged": figures, "peer": peers}, indent=2))


def decode_seconds(llm: LLM, batch: int, num_prompt: int, num_new: int, repeats: int) -> float:
    """Median seconds of one decode step with `batch` rows."""

    def run(max_tokens: int) -> float:
        prompts = [_random_ids(llm, num_prompt) for _ in range(batch)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(4)
    return statistics.median((run(16 + num_new) - run(16)) / num_new for _ in range(repeats))


def prefill_seconds(llm: LLM, repeats: int) -> float:
    """Median seconds from a prompt of PREFILL_TOKENS to its first token."""

    def run() -> float:
        start = time.perf_counter()
        prompt = _random_ids(llm, PREFILL_TOKENS)
        llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        return time.perf_counter() - start

    run()
    return statistics.median(run() for _ in range(repeats))


def print_table(figures: Iterable[tuple[str, float]], peers: dict[str, float]) -> None:
    print(f"{'figure':28} {'jaxpaged':>10} {'peer':>10} {'ratio':>7}")
    for name, value in figures:
        line = f"{name:28} {value:10.1f}"
        if name in peers:
            line += f" {peers[name]:10.1f} {value / peers[name]:7.2f}"
        print(line)


def _random_ids(llm: LLM, count: int) -> list[int]:
    return [random.randrange(100, llm.info.vocab_size) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
