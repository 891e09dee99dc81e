"""How often the front wakes the readers of streams."""

import asyncio
from typing import Any, cast

import pytest
from helpers.requests import make_request

from jaxpaged.collector import Collector
from jaxpaged.live_requests import LiveRequests
from jaxpaged.outputs import Accepted, Delta, RequestStarted, SequenceOutput, Started, StepOutputs


@pytest.mark.parametrize(("n", "min_tokens", "pause_s"), [(1, 1, 0.1), (8, 1, 0.8), (8, 9, 0)])
def test_a_wake_counts_the_messages_that_it_sends(n: int, min_tokens: int, pause_s: float):
    """Eight sequences of one reader are eight messages, and tokens that are held back none."""

    async def run() -> float:
        loop: Any = asyncio.get_running_loop()
        loop.time = lambda: 50.0  # it stands still
        live = LiveRequests(cast(Any, None))
        live.max_messages_per_s = 10
        collector = Collector("r", make_request("0", [1], n=n, max_tokens=100), None)
        async with live.arriving(None) as arrival:
            pass
        live.add(collector, arrival)
        events = collector.events(min_tokens_per_delta=min_tokens)
        step = [SequenceOutput("0", index, (5,)) for index in range(n)]
        live.deliver(StepOutputs(started=[RequestStarted("0", 1, 0)]))
        assert [type(await anext(events)) for _ in range(2)] == [Accepted, Started]
        for output in step:  # first tokens, which do not count
            collector.on_output(output)
        for _ in range(n):
            assert isinstance(await anext(events), Delta)
        live.deliver(StepOutputs(sequences=step))
        return live._next_wake_s - 50

    assert asyncio.run(run()) == pytest.approx(pause_s)
