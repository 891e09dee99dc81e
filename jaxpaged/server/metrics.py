"""Prometheus metrics: names after vLLM's, buckets after OpenTelemetry's gen_ai conventions."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpaged.errors import JaxpagedError
from jaxpaged.outputs import EngineStats, Timing
from jaxpaged.request import FinishReason
from jaxpaged.server.ports import probe

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM

_REQUEST_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# A stuck engine must not hold up the scrape: the last known numbers are told then.
_STATS_TIMEOUT_S = 0.5


class Metrics:
    """A `RequestObserver` that counts, and the page that Prometheus reads."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"jaxpaged_{name}", text, buckets=buckets, registry=registry)

        self._success = Counter(
            "jaxpaged_request_success",
            "Sequences that ended, by reason.",
            ["finished_reason"],
            registry=registry,
        )
        self._rejections = Counter(
            "jaxpaged_request_rejections",
            "Calls that ended with an error, by its reason.",
            ["reason"],
            registry=registry,
        )
        self._first_token = histogram(
            "time_to_first_token_seconds", "From acceptance.", _FIRST_TOKEN_BUCKETS
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Between a sequence's tokens.", _TOKEN_BUCKETS
        )
        self._end_to_end = histogram(
            "e2e_request_latency_seconds", "From acceptance to the last token.", _REQUEST_BUCKETS
        )
        self._queue = histogram(
            "request_queue_time_seconds", "From acceptance to the first step.", _REQUEST_BUCKETS
        )

    def start(self, host: str, port: int) -> tuple[int, "MetricsPage"]:
        """Serves the page in a thread; returns the bound port, too. OSError if it is in use."""
        probe("metrics_port", host, port)
        page = MetricsPage(*start_http_server(port, host, self.registry))
        return page.port, page

    def watch(self, llm: "AsyncLLM") -> None:
        """Adds the engine's own numbers. Called in the event loop that `llm` runs in."""
        self.registry.register(_EngineNumbers(llm, asyncio.get_running_loop()))
        llm.observer = self

    def on_rejected(self, reason: str) -> None:
        self._rejections.labels(reason).inc()

    # --- RequestObserver -----------------------------------------------------------------------

    def on_started(self, queued_s: float) -> None:
        self._queue.observe(queued_s)

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        if gap_s is not None:
            for _ in range(num_tokens):
                self._inter_token.observe(gap_s / num_tokens)

    def on_first_token(self, time_to_first_token_s: float) -> None:
        self._first_token.observe(time_to_first_token_s)

    def on_sequence_ended(self, reason: FinishReason) -> None:
        self._success.labels(reason.value).inc()

    def on_ended(self, timing: Timing) -> None:
        self._end_to_end.observe(timing.total_s)


class MetricsPage:
    """The thread that answers Prometheus."""

    def __init__(self, server, thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _EngineNumbers(Collector):
    """Asks the engine when Prometheus asks."""

    def __init__(self, llm: "AsyncLLM", loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._loop = loop
        self._stats: EngineStats | None = None

    def describe(self) -> list[Metric]:
        return []  # why: else the registry asks the engine when this is registered

    def collect(self) -> Iterator[Metric]:
        future = asyncio.run_coroutine_threadsafe(self._llm.stats(), self._loop)
        try:
            self._stats = future.result(_STATS_TIMEOUT_S)
        except FutureTimeoutError:
            pass  # a stuck engine has nothing new to tell, and what it has runs on
        except JaxpagedError:
            if self._stats is not None:
                self._stats = _without_requests(self._stats)
        yield _gauge("num_requests_waiting", "Not started.", self._llm.live.num_queued)
        if self._stats is not None:
            yield from _metrics_of(self._stats)


def _without_requests(stats: EngineStats) -> EngineStats:
    """Of an engine that is gone: nothing runs, its blocks are lost, its counters stay."""
    return replace(
        stats,
        running_requests=0,
        queued_requests=0,
        used_blocks=0,
        cached_free_blocks=0,
        used_slots=0,
    )


def _metrics_of(stats: EngineStats) -> Iterator[Metric]:
    used, cached = stats.used_blocks, stats.cached_free_blocks
    yield _gauge("num_requests_running", "Holding a row.", stats.running_requests)
    yield _gauge(
        "kv_cache_usage_perc", "Used share of the blocks, 0 to 1.", used / stats.total_blocks
    )
    yield _gauge("kv_waste_ratio", "Share of slots in used blocks without a token.", stats.waste)
    blocks = GaugeMetricFamily("jaxpaged_kv_blocks", "Blocks by state.", labels=["state"])
    blocks.add_metric(["used"], used)
    blocks.add_metric(["cached"], cached)
    blocks.add_metric(["free"], stats.total_blocks - used - cached)
    yield blocks
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up.", stats.looked_up_tokens or 0),
        ("prefix_cache_hits", "Prompt tokens found.", stats.cached_prompt_tokens),
        ("num_preemptions", "Sequences that had to begin again.", stats.preemptions),
        ("prompt_tokens", "Of the requests that started.", stats.prompt_tokens),
        ("generation_tokens", "Drawn.", stats.completion_tokens),
        ("steps", "Of the engine.", stats.steps),
        ("step_seconds", "Spent in steps.", stats.step_s or 0.0),
        ("compiles_after_warmup", "Must stay 0.", stats.compiles_after_warmup),
    ):
        yield CounterMetricFamily(f"jaxpaged_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"jaxpaged_{name}", text, value=value)
