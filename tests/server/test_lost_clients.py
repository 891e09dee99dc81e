"""Clients in processes of their own, killed or frozen: their requests do not outlive them."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from helpers.running_service import Service, ask, run_service, until
from helpers.served_engines import make_llm, solo_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.v1 import inference_pb2 as pb

_CLIENT = """
import json
import sys
from jaxpaged.client import Client
from jaxpaged import outputs
from jaxpaged.sampling_params import SamplingParams
client = Client(sys.argv[1])
prompt = json.loads(sys.argv[4])
params = SamplingParams(max_tokens=600 - len(prompt), temperature=0, n=int(sys.argv[2]))
for event in client.stream_events(prompt, params):
    if isinstance(event, getattr(outputs, sys.argv[3])):
        print("it is there", flush=True)
"""
_NODE_CLIENT = Path(__file__).parents[1] / "helpers" / "smoke_client.mjs"


@pytest.fixture(scope="module")
def slow_llm() -> Generator[AsyncLLM]:
    """Takes 18 s for 600 tokens, of which its blocks hold 1024: no client ends by itself."""
    llm = make_llm("process", 0.03)
    yield llm
    llm.close()


@pytest.mark.parametrize(
    ("how", "state", "n"),
    [
        (signal.SIGKILL, "queued", 4),
        (signal.SIGKILL, "prefilling", 1),
        (signal.SIGKILL, "prefilling", 4),
        (signal.SIGKILL, "preempted", 1),
        (signal.SIGKILL, "preempted", 4),
        (signal.SIGKILL, "decoding", 1),
        (signal.SIGKILL, "decoding", 4),
        (signal.SIGSTOP, "decoding", 1),
    ],
)
def test_a_lost_client_frees_its_blocks(
    slow_llm: AsyncLLM,
    how: signal.Signals,
    state: str,
    n: int,
    caplog: pytest.LogCaptureFixture,
):
    """SIGSTOP: the connection lives on in the kernel; only a ping finds out."""

    async def body(service: Service) -> None:
        rows = {"queued": 8, "preempted": 8 - n}.get(state, 0)
        requests = [pb.StreamRequest(request=ask([row], 600)) for row in range(rows)]
        neighbours = [service.stub.Stream(request) for request in requests]
        await until(lambda: len(service.llm.live) == rows and service.llm.live.num_queued == 0)
        begin = await service.llm.stats()
        event = {"queued": "Accepted", "prefilling": "Started"}.get(state, "Delta")
        # 64 tokens a step, and nothing of it in the prefix cache.
        prompt = [70 + n, *(i % 50 for i in range(400))] if state == "prefilling" else [1, 2, 3]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CLIENT, service.address, f"{n}", event, f"{prompt}"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), 20) == b"it is there\n"
            stats = begin
            while state == "preempted" and stats.preemptions == begin.preemptions:
                await asyncio.sleep(0.01)
                stats = await service.llm.stats()
            process.send_signal(how)
            await until(lambda: len(service.llm.live) == rows)
            assert service.llm.live.num_queued == 0
            for neighbour in neighbours:
                neighbour.cancel()
            stats = await service.idle_stats()
            assert stats.used_blocks == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    with caplog.at_level(logging.INFO, logger="jaxpaged"):
        run_service(slow_llm, body, keepalive_time_s=0.3, keepalive_timeout_s=0.3)
    assert "ended=CANCELLED" in caplog.text, "it ended by itself"


def test_a_node_client_streams_with_nothing_but_http2(llm: AsyncLLM):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")

    async def body(service: Service) -> None:
        request = pb.StreamRequest(request=ask([4, 5], 12, request_id="from node"))
        process = await asyncio.create_subprocess_exec(
            node,
            str(_NODE_CLIENT),
            service.address,
            request.SerializeToString().hex(),
            stdout=subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 30)
        *frames, status = output.decode().split()
        messages = [pb.StreamResponse.FromString(bytes.fromhex(frame)) for frame in frames]
        assert status == "status=0" and process.returncode == 0
        assert messages[0].accepted.request_id == "from node"
        tokens = [token_id for m in messages for token_id in m.delta.token_ids]
        assert tokens == solo_tokens([4, 5], 12) and messages[-1].HasField("finished")

    run_service(llm, body)
