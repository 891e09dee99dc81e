"""Requests that are still tokenised or compiled: their time runs, and they leave nothing behind."""

import asyncio
import threading

import grpc
import pytest
from helpers.fronts import scripted_front
from helpers.running_service import Service, run_service, tokens_of, until
from helpers.served_engines import long_text

from jaxpaged import request_maker
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import QueueTimeoutError, ServerDrainingError
from jaxpaged.sampling_params import Constraint, SamplingParams
from jaxpaged.server.grpc_errors import error_from_rpc
from jaxpaged.v1 import inference_pb2 as pb


@pytest.mark.parametrize("is_stream", [False, True])
def test_queue_timeout_ends_what_is_still_tokenised(
    llm: AsyncLLM, may_go: threading.Event, is_stream: bool
):
    async def body(service: Service) -> None:
        patient = service.stub.Generate(long_text())
        request = long_text()
        request.queue_timeout.nanos = 50_000_000
        call = (
            tokens_of(service.stub.Stream(pb.StreamRequest(request=request)))
            if is_stream
            else service.stub.Generate(request)
        )
        with pytest.raises(grpc.aio.AioRpcError, match=r"queue_timeout=0\.05 s") as caught:
            await call
        assert isinstance(error_from_rpc(caught.value), QueueTimeoutError)
        await until(lambda: llm.live.num_queued == 1)
        assert not patient.done(), "it has no timeout"
        may_go.set()
        assert len((await patient).completions[0].token_ids) == 2

    run_service(llm, body)


def test_the_time_to_tokenise_is_part_of_the_queue_timeout(
    llm: AsyncLLM, may_go: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    deadlines = []
    add = llm.live.add

    def watch_add(collector, arrival):
        add(collector, arrival)
        deadlines.append(llm.live._timers[collector.request.request_id].when())

    monkeypatch.setattr(llm.live, "add", watch_add)

    async def body(service: Service) -> None:
        now = asyncio.get_running_loop().time
        before = now()
        text = long_text().text
        call = asyncio.create_task(
            llm.generate(text, SamplingParams(max_tokens=2), queue_timeout_s=1000)
        )
        await until(lambda: llm.live.num_queued == 1)
        arrived = now()
        may_go.set()
        await call
        assert before + 1000 <= deadlines[0] <= arrived + 1000

    run_service(llm, body)


@pytest.mark.parametrize("how", ["timeout", "cancel", "drain", "stays"])
def test_a_constraint_that_nobody_waits_for_is_not_compiled(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    """Two are under way, in all the threads there are; the third waits for one of them."""
    compiled: list[str | None] = []
    may_go = threading.Event()

    def held_compile(constraint: Constraint, vocabulary: object) -> str:
        compiled.append(constraint.regex)
        assert may_go.wait(60)
        return ""

    monkeypatch.setattr(request_maker, "grammar_of", held_compile)

    async def body() -> None:
        front = scripted_front({"p": "fine"})
        llm, live = front.llm, front.llm.live
        monkeypatch.setattr(llm._intake.maker, "_vocabulary", object())

        def call(regex: str, queue_timeout_s: float | None = None) -> asyncio.Task:
            params = SamplingParams(constraint=Constraint(regex=regex))
            return asyncio.create_task(llm.generate("p", params, queue_timeout_s=queue_timeout_s))

        waits = [call("a"), call("b")]
        await until(lambda: len(compiled) == 2)
        third = call("c", 0.05 if how == "timeout" else None)
        await until(lambda: live.num_queued == 3 or third.done())
        error: type[BaseException] | None = None
        if how == "timeout":
            error = QueueTimeoutError
        if how == "cancel":
            third.cancel()
            error = asyncio.CancelledError
        if how == "drain":
            assert live.fail_arriving(ServerDrainingError("stopping")) == 3
            waits, error = [], ServerDrainingError
        if error is None:
            waits.append(third)
        else:
            with pytest.raises(error):
                await third
        may_go.set()
        for output in await asyncio.gather(*waits, call("d")):
            assert output.completions[0].text == "fine"
        assert compiled == (["a", "b", "c", "d"] if how == "stays" else ["a", "b", "d"])
        await asyncio.wait_for(live.wait_empty(), 20)
        assert live.num_queued == 0
        llm.close()

    try:
        asyncio.run(asyncio.wait_for(body(), 40))
    finally:
        may_go.set()
