#!/usr/bin/env python3
"""Times a server as its clients see it: first token, between tokens, end to end, tokens/s.

    scripts/bench_serve.py 127.0.0.1:50051 --concurrency 64          a server that runs
    scripts/bench_serve.py 127.0.0.1:50051 --rate 20 --workload chat
    scripts/bench_serve.py --quick                                   tiny random model, on the CPU
    scripts/bench_serve.py --trace mixed                             Qwen3-4B's shapes, on a GPU
    scripts/bench_serve.py --check                                   the promises of docs/serving.md

The client is this process; the last three start a server in processes of its own. `--quick`
compares Stream with the same requests in one process, in turns. `--trace mixed` does so once, with
the mixed trace through 256 streams, against all of it at once through `LLM.generate` (without a GPU
a small share of it, through a small model).
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from bench_processes import figures_of, gpu_name, model_folder
from model_shapes import QWEN3_4B, SMALL_QWEN3
from serve_checks import run_checks
from serve_load import WORKLOADS, FixedWork, Run, Workload, run_closed, run_poisson, sender
from serve_processes import running_server
from serve_rounds import REQUIRED_SHARE, compare
from traces import Trace, mixed_trace

from jaxpaged.client import AsyncClient

ENGINE_ROWS = Path(__file__).with_name("engine_rows.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="Times a server as its clients see it.")
    parser.add_argument("address", nargs="?", help="HOST:PORT of a server that runs")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Stream against in-process, in fixed rounds: of the options only --concurrency counts",
    )
    parser.add_argument("--trace", choices=["mixed"], help="Stream against in-process, 256 streams")
    parser.add_argument(
        "--check", action="store_true", help="measure the promises; exit 1 if broken"
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="random")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--concurrency", type=int, default=64, help="closed loop, this many clients"
    )
    parser.add_argument("--rate", type=float, help="Poisson arrivals a second, not a closed loop")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--token", help="bearer token")
    parser.add_argument("--json", help="write the figures there, too")
    options = parser.parse_args()
    if options.trace:
        figures, is_kept = mixed()
    elif options.quick or options.check:
        figures, is_kept = compare(options.concurrency) if options.quick else run_checks()
    elif options.address is None:
        parser.error("ADDRESS, --quick, --trace or --check is needed")
    else:
        figures, is_kept = asyncio.run(measure(options.address, options)).figures(), True
    print_figures(figures)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return 0 if is_kept else 1


async def measure(address: str, options: argparse.Namespace) -> Run:
    async with AsyncClient(address, token=options.token, retries=False) as client:
        info = await client.model_info()
        work = Workload(
            options.workload,
            options.prompt_tokens,
            options.max_tokens,
            info.vocab_size,
            options.seed,
        )
        send = sender(client)
        await run_closed(send, work, 8, 8)  # connections, imports, caches
        if options.rate is not None:
            return await run_poisson(send, work, options.requests, options.rate)
        return await run_closed(send, work, options.requests, options.concurrency)


def mixed() -> tuple[dict[str, float], bool]:
    """Stream's share of the speed that `LLM.generate` has with the mixed trace."""
    gpu = gpu_name()
    print(gpu or "cpu, small shapes", flush=True)
    config = QWEN3_4B if gpu else SMALL_QWEN3
    num_requests, num_streams = (1000, 256) if gpu else (12, 8)
    with model_folder(config, has_tokenizer=True) as folder:
        options = {"model": folder, "rows": ["mixed"], "quick": True}
        alone = dict(figures_of(sys.executable, ENGINE_ROWS, options))
        in_process = alone["mixed_tokens_per_s"]
        print(f"in process: {in_process:.1f} tokens/s", flush=True)
        with running_server(folder, max_num_seqs=num_streams) as server:
            trace = mixed_trace(num_requests, config["vocab_size"])
            run = asyncio.run(stream_all(server.address, trace, num_streams))
    figures = run.figures()
    figures["in_process_tokens_per_s"] = in_process
    figures["stream_share_of_in_process"] = figures["tokens_per_s"] / in_process
    is_whole = figures["failed"] == 0
    return figures, is_whole and figures["stream_share_of_in_process"] >= REQUIRED_SHARE


async def stream_all(address: str, trace: Trace, num_streams: int) -> Run:
    async with AsyncClient(address, retries=False) as client:
        send = sender(client)
        # Connections, imports, caches; and prompts that the trace does not have.
        await run_closed(send, FixedWork([([7] * 64, 8)] * 8), 8, 8)
        return await run_closed(send, FixedWork(trace), len(trace), num_streams)


def print_figures(figures: dict[str, float]) -> None:
    for name, value in figures.items():
        print(f"{name:32} {value:12.3f}")


if __name__ == "__main__":
    sys.exit(main())
