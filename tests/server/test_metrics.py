"""The page that Prometheus reads, after requests whose numbers are known."""

import asyncio
import urllib.request
from typing import Any

import grpc
import psutil
import pytest
from helpers.running_service import Service, ask, run_service, serving, tokens_of, until
from helpers.served_engines import NON_FINITE, make_llm
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.engine_client import EngineState
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.lifecycle import Server
from jaxpaged.v1 import inference_pb2 as pb


async def scrape(service: Service) -> dict[str, float]:
    """name or name{labels} -> value."""

    def read() -> str:
        url = f"http://127.0.0.1:{service.server.metrics_port}/metrics"
        return urllib.request.urlopen(url, timeout=10).read().decode()

    values = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(read)):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


def test_metrics_count_what_happened(llm: AsyncLLM):
    async def body(service: Service) -> None:
        old = await scrape(service)
        await asyncio.gather(*(service.stub.Generate(ask([i] * 20, 10)) for i in range(3)))
        two = ask([5, 6, 7], 10, seed=1, n=2)
        await service.stub.Generate(two)
        not_looked_up = ask([7] * 40, 1)
        not_looked_up.cache.use_prefix_cache = False
        await service.stub.Generate(not_looked_up)
        for bad in (ask([NON_FINITE], 5), pb.GenerateRequest(text="")):
            with pytest.raises(grpc.aio.AioRpcError):
                await service.stub.Generate(bad)
        await service.idle_stats()
        new = await scrape(service)

        def grew(name: str) -> float:
            return new[f"jaxpaged_{name}"] - old.get(f"jaxpaged_{name}", 0)

        assert grew("request_success_total{finished_reason=max_tokens}") == 6
        assert grew("request_success_total{finished_reason=error}") == 1
        assert grew("request_rejections_total{reason=NON_FINITE_LOGITS}") == 1
        assert grew("request_rejections_total{reason=INVALID_FIELD}") == 1
        assert grew("prefix_cache_queries_total") == 64 == grew("prompt_tokens_total") - 40
        assert grew("generation_tokens_total") == 51
        assert grew("time_to_first_token_seconds_count") == 5
        assert grew("inter_token_latency_seconds_count") == 45
        assert grew("request_queue_time_seconds_count") == 6
        assert grew("e2e_request_latency_seconds_count") == 6
        assert grew("steps_total") >= 10 and grew("step_seconds_total") > 0
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert new[f"jaxpaged_{name}"] == 0
        states = [new[f"jaxpaged_kv_blocks{{state={s}}}"] for s in ("used", "cached", "free")]
        assert sum(states) == 160 and states[0] == 0 and states[1] > 0
        assert new["jaxpaged_compiles_after_warmup_total"] == new["jaxpaged_kv_waste_ratio"] == 0
        assert new["jaxpaged_num_preemptions_total"] >= 0

    run_service(llm, body, metrics_port=0)


def test_running_requests_show(llm: AsyncLLM):
    async def body(service: Service) -> None:
        calls = [
            service.stub.Stream(pb.StreamRequest(request=ask([row], 300))) for row in range(10)
        ]
        live = service.llm.live
        await until(lambda: len(live) == 10 and live.num_queued == 2)
        values = await scrape(service)
        assert values["jaxpaged_num_requests_running"] == 8
        assert values["jaxpaged_num_requests_waiting"] == 2
        assert values["jaxpaged_kv_cache_usage_perc"] > 0
        for call in calls:
            call.cancel()

    run_service(llm, body, metrics_port=0)


def test_an_engine_that_died_holds_nothing():
    """What it counted stays."""
    llm = make_llm("process", 0.001)
    engine: Any = llm.engine
    engine._backoff_s = 1000.0  # it stays away while we look

    async def run() -> None:
        async with serving(llm, metrics_port=0) as service:
            calls = [service.stub.Stream(pb.StreamRequest(request=ask([i], 600))) for i in range(9)]
            await until(lambda: len(llm.live) == 9 and llm.live.num_queued == 1)
            busy = await scrape(service)
            gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            assert all(busy[f"jaxpaged_{name}"] > 0 for name in gauges)
            psutil.Process(engine.process_id).kill()
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError, match="starts again"):
                    await tokens_of(call)
            dead = await scrape(service)
            assert engine.state is EngineState.RESTARTING
            assert not any(dead[f"jaxpaged_{name}"] for name in gauges)
            assert dead["jaxpaged_steps_total"] == busy["jaxpaged_steps_total"] > 0

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        llm.close()


def test_without_a_port_there_are_none_and_a_port_in_use_is_one_line(llm: AsyncLLM):
    async def body(service: Service) -> None:
        port = service.server.metrics_port
        assert port is not None
        other = Server(ServerConfig(port=0, admin_port=0, metrics_port=port))
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: the port is in"):
            await other.start()

    run_service(llm, body, metrics_port=0)
    assert asyncio.run(_metrics_port()) is None


async def _metrics_port() -> int | None:
    server = Server(ServerConfig(port=0, admin_port=0))
    await server.start()
    await server.stop()
    return server.metrics_port
