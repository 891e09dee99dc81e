"""Stream against in-process, in turns: used by `bench_serve.py --quick`.

Both sides are up and warm all the time; while one has a round, the other one only waits. A share
is that of two rounds side by side, one of each, so that a machine whose speed drifts changes both;
every second pair has them the other way around.
"""

import asyncio
import statistics

import psutil
from serve_load import Workload, run_closed, sender
from serve_processes import TINY_VOCAB_SIZE, InProcess, running_in_process, running_server

from jaxpaged.client import AsyncClient

REQUIRED_SHARE = 0.85  # of in-process speed
_NUM_ROUNDS = 14
_NUM_WAVES = 1  # requests of each stream in a round
_WARM_UP_SEED = 2**31
_IDLE_S = 2.0

Figures = dict[str, float]


def compare(num_streams: int) -> tuple[Figures, bool]:
    """The figures of all rounds, and whether the median share is what is required."""
    with (
        running_in_process(max_num_seqs=num_streams) as in_process,
        running_server(max_num_seqs=num_streams) as server,
    ):
        front = psutil.Process(server.process_id)
        processes = {
            "client": psutil.Process(),
            "front": front,
            "engine": _engine_of(front),
            "in_process": psutil.Process(in_process.process_id),
        }
        figures = asyncio.run(_compare(server.address, in_process, num_streams, processes))
    return figures, figures["stream_share_of_in_process"] >= REQUIRED_SHARE


async def _compare(
    address: str, in_process: InProcess, num_streams: int, processes: dict[str, psutil.Process]
) -> Figures:
    rounds: dict[str, list[Figures]] = {"stream": [], "in_process": []}
    cpu_ms: dict[str, list[float]] = {name: [] for name in processes}
    async with AsyncClient(address, retries=False) as client:
        send = sender(client)

        async def run(side: str, seed: int, num_waves: int) -> Figures:
            # A seed's prompts are new to a side: it finds none of them in its prefix cache.
            work = Workload("random", 32, 128, TINY_VOCAB_SIZE, seed)
            size = num_waves * num_streams, num_streams
            if side == "in_process":
                return await asyncio.to_thread(in_process.run, work, *size)
            return (await run_closed(send, work, *size)).figures()

        for side in rounds:
            await run(side, _WARM_UP_SEED, 1)
        idle = await _idle_cores(processes)
        for number in range(_NUM_ROUNDS):
            for side in sorted(rounds, reverse=number % 2 == 0):
                before = _cpu_seconds(processes)
                figures = await run(side, number, _NUM_WAVES)
                rounds[side].append(figures)
                num_tokens = figures["tokens_per_s"] * figures["seconds"]
                for name, after in _cpu_seconds(processes).items():
                    if (name == "in_process") == (side == "in_process"):
                        cpu_ms[name].append(1e6 * (after - before[name]) / num_tokens)
    return _summary(rounds, cpu_ms) | idle


async def _idle_cores(processes: dict[str, psutil.Process]) -> Figures:
    """What a side takes from the other one's rounds: cores of each process, while none has one."""
    await asyncio.sleep(0.5)
    before = _cpu_seconds(processes)
    await asyncio.sleep(_IDLE_S)
    after = _cpu_seconds(processes)
    return {f"{name}_idle_cores": (after[name] - before[name]) / _IDLE_S for name in processes}


def _summary(rounds: dict[str, list[Figures]], cpu_ms: dict[str, list[float]]) -> Figures:
    """Medians over the rounds of Stream; speeds of both sides; CPU milliseconds per 1000 tokens."""
    stream, alone = rounds["stream"], rounds["in_process"]
    figures = {name: statistics.median(r[name] for r in stream) for name in stream[0]}
    del figures["tokens_per_s"]  # told for both sides
    figures["failed"] = sum(r["failed"] for r in stream + alone)
    for side, its_rounds in rounds.items():
        speeds = [r["tokens_per_s"] for r in its_rounds]
        figures[f"{side}_tokens_per_s"] = statistics.median(speeds)
        figures[f"{side}_tokens_per_s_min"] = min(speeds)
        figures[f"{side}_tokens_per_s_max"] = max(speeds)
    for name, values in cpu_ms.items():
        figures[f"{name}_cpu_ms_per_1000_tokens"] = statistics.median(values)
    shares = [s["tokens_per_s"] / a["tokens_per_s"] for s, a in zip(stream, alone, strict=True)]
    figures["share_min"], figures["share_max"] = min(shares), max(shares)
    figures["stream_share_of_in_process"] = statistics.median(shares)
    return figures


def _cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """User's and system's, of each process since its start."""
    times = {name: process.cpu_times() for name, process in processes.items()}
    return {name: time.user + time.system for name, time in times.items()}


def _engine_of(front: psutil.Process) -> psutil.Process:
    (engine,) = (
        child
        for child in front.children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    )
    return engine
