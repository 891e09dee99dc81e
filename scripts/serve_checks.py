"""The promises of docs/serving.md with a time or a size in them, on a tiny random model."""

import asyncio
import os
import signal
import time
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serve_load import Workload, percentile, run_closed, run_poisson, sender, watch
from serve_processes import TINY_VOCAB_SIZE, RunningServer, running_server

from jaxpaged.client import AsyncClient
from jaxpaged.sampling_params import SamplingParams

WORK = Workload("random", 32, 128, TINY_VOCAB_SIZE)
LONG_PROMPTS = Workload("random", 480, 4, TINY_VOCAB_SIZE, seed=7)
# figure -> what it must be below (or at least, for a share)
LIMITS = {
    "refused_ms_p99": 50.0,
    "overload_ttft_ratio": 2.0,
    "overload_memory_mb": 50.0,
    "cancel_to_free_ms_p99": 1000.0,
    "health_ms_max": 100.0,
    "stuck_to_not_serving_s": 2.0,
    "dead_to_not_serving_s": 2.0,
    "slow_reader_cost_share": 0.10,
}


def run_checks() -> tuple[dict[str, float], bool]:
    """The figures, and whether every one keeps its limit; broken promises are named."""
    figures: dict[str, float] = {}
    options: dict[str, Any] = {"max_num_seqs": 8, "max_queued_requests": 8, "stall_timeout_s": 1.5}
    for check in (overload, cancels, health_under_prefill, slow_reader, stuck_and_dead):
        with running_server(**options) as server:
            figures |= asyncio.run(check(server))
    broken = [name for name, limit in LIMITS.items() if not figures[name] <= limit]
    for name in broken:
        print(f"BROKEN: {name}={figures[name]:.3f} must be at most {LIMITS[name]}")
    return figures, not broken


async def overload(server: RunningServer) -> dict[str, float]:
    """Ten times what it can take, against a server that is full (8 run, 8 wait)."""
    async with AsyncClient(server.address, retries=False) as client:
        send = sender(client)
        await run_closed(send, WORK, 16, 16)
        full = await run_closed(send, WORK, 96, 16)
        capacity = full.figures()["requests_per_s"]
        before = _memory(server)
        lags: list[float] = []
        watching = asyncio.create_task(_watch_lag(lags))
        run = await run_poisson(send, WORK, round(capacity * 10 * 6), capacity * 10)
        memory = _memory(server) - before
        watching.cancel()
    refused = [s.end_s for s in run.seen if s.error == "QUEUE_FULL"]
    others = {s.error for s in run.seen} - {None, "QUEUE_FULL"}
    assert refused and not others, f"{len(refused)} refused; other errors: {others}"
    ratio = run.figures()["ttft_ms_p50"] / full.figures()["ttft_ms_p50"]
    return {
        "capacity_requests_per_s": capacity,
        "refused": len(refused),
        "refused_ms_p50": 1000 * percentile(refused, 50),
        "refused_ms_p99": 1000 * percentile(refused, 99),
        "client_lag_ms_p99": 1000 * percentile(lags, 99),  # of this process, part of the above
        "full_ttft_ms_p50": full.figures()["ttft_ms_p50"],
        "overload_ttft_ms_p50": run.figures()["ttft_ms_p50"],
        "overload_ttft_ratio": ratio,
        "overload_memory_mb": memory / 2**20,
    }


async def _watch_lag(lags: list[float]) -> None:
    """How late this process itself is: what it measures cannot be more exact."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(time.perf_counter() - start - 0.01)


async def cancels(server: RunningServer) -> dict[str, float]:
    """From a cancel to no block in use, as an operator sees it."""
    seconds = []
    async with AsyncClient(server.address, server.admin_address) as client:
        params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        for number in range(30):
            events = client.stream_events([number + 1] * 64, params)
            for _ in range(4):
                await anext(events)
            start = time.perf_counter()
            await events.aclose()
            while (await client.stats()).used_blocks:
                await asyncio.sleep(0.001)
            seconds.append(time.perf_counter() - start)
    return {"cancel_to_free_ms_p99": 1000 * percentile(seconds, 99)}


async def health_under_prefill(server: RunningServer) -> dict[str, float]:
    """Every answer while long prompts are computed; all must be SERVING."""
    async with AsyncClient(server.address) as client:
        load = asyncio.create_task(run_closed(sender(client), LONG_PROMPTS, 40, 8))
        seconds = []
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while not load.done():
                start = time.perf_counter()
                response = await stub.Check(health_pb2.HealthCheckRequest())
                seconds.append(time.perf_counter() - start)
                assert response.status == 1, "not SERVING while it prefills"
                await asyncio.sleep(0.02)
        assert (await load).figures()["failed"] == 0
    return {
        "health_ms_p50": 1000 * percentile(seconds, 50),
        "health_ms_max": 1000 * max(seconds),
    }


async def slow_reader(server: RunningServer) -> dict[str, float]:
    """What seven streams lose when the reader of an eighth stops reading, instead of reading."""
    async with AsyncClient(server.address) as client:
        params = SamplingParams(max_tokens=440, temperature=0, ignore_eos=True)

        async def speed(reads: bool) -> float:
            eighth = client.stream_events([5] * 32, params)
            await anext(eighth)
            reader = asyncio.create_task(watch(eighth)) if reads else None
            work = Workload("random", 32, 64, TINY_VOCAB_SIZE)
            run = await run_closed(sender(client), work, 42, 7)
            if reader is not None:
                await reader
            await eighth.aclose()
            return run.figures()["tokens_per_s"]

        await speed(True)
        # in turns: the machine's speed drifts
        shares = [1 - await speed(False) / await speed(True) for _ in range(5)]
    return {"slow_reader_cost_share": sorted(shares)[2]}


async def stuck_and_dead(server: RunningServer) -> dict[str, float]:
    """A stopped engine process is a loop that is stuck; a killed one is dead."""
    (engine,) = (
        child
        for child in psutil.Process(server.process_id).children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    )
    figures = {}
    for name, signal_number in (("stuck", signal.SIGSTOP), ("dead", signal.SIGKILL)):
        await _wait_status(server.address, 1)
        start = time.perf_counter()
        os.kill(engine.pid, signal_number)
        await _wait_status(server.address, 2)
        figures[f"{name}_to_not_serving_s"] = time.perf_counter() - start
        if name == "stuck":
            os.kill(engine.pid, signal.SIGCONT)
    start = time.perf_counter()
    await _wait_status(server.address, 1)
    return figures | {"dead_to_serving_again_s": time.perf_counter() - start}


async def _wait_status(address: str, status: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(120):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for response in stub.Watch(health_pb2.HealthCheckRequest()):
            if response.status == status:
                return


def _memory(server: RunningServer) -> int:
    """Resident bytes of the front; the engine's pool has its size from the start."""
    return psutil.Process(server.process_id).memory_info().rss
