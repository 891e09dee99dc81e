#!/usr/bin/env python3
"""Times a server as its clients see it: first token, between tokens, end to end, tokens/s.

    scripts/bench_serve.py 127.0.0.1:50051 --concurrency 64          a server that runs
    scripts/bench_serve.py 127.0.0.1:50051 --rate 20 --workload chat
    scripts/bench_serve.py --quick                                   tiny random model, on the CPU
    scripts/bench_serve.py --check                                   the promises of docs/serving.md

The client is this process; `--quick` and `--check` start a server in processes of its own.
`--quick` compares Stream with the same requests in one process, run right before and after it.
"""

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path

from serve_checks import run_checks
from serve_load import WORKLOADS, Run, Workload, run_closed, run_poisson, sender
from serve_processes import TINY_VOCAB_SIZE, in_process_figures, running_server

from jaxpaged.client import AsyncClient


def main() -> int:
    parser = argparse.ArgumentParser(description="Times a server as its clients see it.")
    parser.add_argument("address", nargs="?", help="HOST:PORT of a server that runs")
    parser.add_argument(
        "--quick", action="store_true", help="Stream against in-process, 64 streams"
    )
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
    if options.quick or options.check:
        figures, is_kept = quick(options) if options.quick else run_checks()
    elif options.address is None:
        parser.error("ADDRESS, --quick or --check is needed")
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


def quick(options: argparse.Namespace) -> tuple[dict[str, float], bool]:
    """Stream's share of the speed that the same engine has without a server."""
    work = Workload(
        options.workload, options.prompt_tokens, options.max_tokens, TINY_VOCAB_SIZE, options.seed
    )
    arguments = (work, options.requests, options.concurrency)
    # The machine's speed drifts: the baseline is taken before and after.
    before = in_process_figures(*arguments)
    with running_server(max_num_seqs=options.concurrency) as server:
        figures = asyncio.run(measure(server.address, options)).figures()
    after = in_process_figures(*arguments)
    alone = statistics.mean([before["tokens_per_s"], after["tokens_per_s"]])
    figures["in_process_tokens_per_s"] = alone
    figures["stream_share_of_in_process"] = figures["tokens_per_s"] / alone
    return figures, figures["stream_share_of_in_process"] >= 0.85


def print_figures(figures: dict[str, float]) -> None:
    for name, value in figures.items():
        print(f"{name:32} {value:12.3f}")


if __name__ == "__main__":
    sys.exit(main())
