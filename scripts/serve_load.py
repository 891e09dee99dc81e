"""Load for a server, and what its clients saw: used by bench_serve.py in the client's process."""

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tqdm import tqdm
from traces import Trace

from jaxpaged.client import AsyncClient
from jaxpaged.outputs import Accepted, Delta
from jaxpaged.sampling_params import SamplingParams

WORKLOADS = ("random", "shared-prefix", "chat")


@dataclass
class Seen:
    """One request, as its reader saw it; times in seconds since it was sent."""

    first_token_s: float | None = None
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_messages: int = 0
    error: str | None = None


# (request id, prompt, max_tokens) -> what its reader saw
Send = Callable[[str, list[int], int], Awaitable[Seen]]


class Work(Protocol):
    """What to send."""

    def requests(self) -> Iterator[tuple[list[int], int]]:
        """(prompt, max_tokens) of each request."""
        ...


@dataclass(frozen=True)
class FixedWork:
    """Requests that are there already."""

    trace: Trace

    def requests(self) -> Iterator[tuple[list[int], int]]:
        return iter(self.trace)


@dataclass(frozen=True)
class Workload:
    """Prompts of one kind; every one differs from every other."""

    kind: str
    num_prompt_tokens: int
    max_tokens: int
    vocab_size: int
    seed: int = 0

    def requests(self) -> Iterator[tuple[list[int], int]]:
        return ((prompt, self.max_tokens) for prompt in self._prompts())

    def _prompts(self) -> Iterator[list[int]]:
        """Without an end. "chat": turns that each repeat the ones before, as a chat does."""
        rng = random.Random(self.seed)

        def ids(count: int) -> list[int]:
            return [rng.randrange(3, self.vocab_size) for _ in range(count)]

        half = self.num_prompt_tokens // 2
        prefix, chats = ids(half), [ids(half) for _ in range(16)]
        for number in range(2**62):
            if self.kind == "random":
                yield ids(self.num_prompt_tokens)
            elif self.kind == "shared-prefix":
                yield prefix + ids(self.num_prompt_tokens - half)
            else:
                at = number % len(chats)
                chats[at] = chats[at] + ids(8)
                if len(chats[at]) > 2 * self.num_prompt_tokens:
                    chats[at] = ids(half)
                yield list(chats[at])


def sender(client: AsyncClient) -> Send:
    """Streams a request from a server."""

    async def send(request_id: str, prompt: list[int], max_tokens: int) -> Seen:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return await watch(client.stream_events(prompt, params, request_id=request_id))

    return send


async def watch(events) -> Seen:
    """Reads a stream of events to its end."""
    seen, start = Seen(), time.perf_counter()
    last = start
    try:
        async for event in events:
            if isinstance(event, Accepted) or not isinstance(event, Delta):
                continue
            now = time.perf_counter()
            if seen.first_token_s is None:
                seen.first_token_s = now - start
            else:
                seen.gaps_s.append(now - last)
            last = now
            seen.num_tokens += len(event.token_ids)
            seen.num_messages += 1
    except Exception as error:
        seen.error = getattr(error, "reason", type(error).__name__)
    seen.end_s = time.perf_counter() - start
    return seen


async def run_closed(send: Send, work: Work, num_requests: int, concurrency: int) -> "Run":
    """`concurrency` clients, each sending its next request when the last one has ended."""
    requests, todo = work.requests(), iter(range(num_requests))
    seen: list[Seen] = []
    start = time.perf_counter()
    with tqdm(total=num_requests, desc="requests", disable=None) as bar:

        async def client() -> None:
            for _ in todo:
                seen.append(await send(uuid.uuid4().hex, *next(requests)))
                bar.update()

        await asyncio.gather(*(client() for _ in range(concurrency)))
    return Run(seen, time.perf_counter() - start)


async def run_poisson(send: Send, work: Work, num_requests: int, rate: float) -> "Run":
    """Requests at random times, `rate` a second on average, whatever the server does."""
    requests, rng = work.requests(), random.Random(1)
    start = time.perf_counter()
    with tqdm(total=num_requests, desc="requests", disable=None) as bar:

        async def one(at_s: float) -> Seen:
            await asyncio.sleep(start + at_s - time.perf_counter())
            seen = await send(uuid.uuid4().hex, *next(requests))
            bar.update()
            return seen

        at_s, tasks = 0.0, []
        for _ in range(num_requests):
            at_s += rng.expovariate(rate)
            tasks.append(asyncio.create_task(one(at_s)))
        seen = await asyncio.gather(*tasks)
    return Run(list(seen), time.perf_counter() - start)


@dataclass
class Run:
    """Everything that was seen in `seconds`."""

    seen: list[Seen]
    seconds: float

    def figures(self) -> dict[str, float]:
        good = [s for s in self.seen if s.error is None]
        tokens = sum(s.num_tokens for s in good)
        figures = {
            "requests": len(self.seen),
            "failed": len(self.seen) - len(good),
            "seconds": self.seconds,
            "requests_per_s": len(good) / self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "tokens_per_message": tokens / max(1, sum(s.num_messages for s in good)),
        }
        series = {
            "ttft_ms": [s.first_token_s for s in good if s.first_token_s is not None],
            "inter_token_ms": [gap for s in good for gap in s.gaps_s],
            "end_to_end_ms": [s.end_s for s in good],
        }
        for name, values in series.items():
            for percent in (50, 90, 99):
                figures[f"{name}_p{percent}"] = 1000 * percentile(values, percent)
        return figures


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]
