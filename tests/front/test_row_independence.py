"""A request's answer is its own: whatever runs beside it, and however the engine runs (5.7).

Random requests with random options are asked one by one, each in a fresh engine without a cache,
and then together in every way there is. Answers must be equal: in none of these does a draw hang on
less than the rounding of float32, which other batch sizes do differently.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import load_runner
from helpers.model_fronts import with_model_front
from helpers.random_requests import EOS_TOKEN_IDS, RandomRequest, random_requests
from helpers.running_service import serving
from helpers.same_answers import check_same, joined

from jaxpaged.async_client import AsyncClient
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import EngineFailedError
from jaxpaged.grammar import MaskMaker
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.runner import pack, sampler
from jaxpaged.runner.processors import LogitsState
from jaxpaged.runner.runner import Runner
from jaxpaged.sampling_params import Constraint, SamplingParams
from jaxpaged.step_plan import RowStart, StepPlan

MODEL = Path(__file__).parents[1] / "goldens" / "tiny_qwen3"
NUM_REQUESTS = 100
NUM_TOGETHER = 32
SMALL_POOL_BLOCKS = 12
TEXT = "[a-f]{3,9}"

Ask = Callable[[RandomRequest], Awaitable[RequestOutput]]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load_runner(
        str(MODEL), num_blocks=320, max_num_seqs=NUM_TOGETHER, max_num_tokens=64, max_model_len=160
    )


@dataclass
class Asked:
    """Requests, and what each of them gets alone."""

    requests: list[RandomRequest]
    expected: list[RequestOutput]

    def only(self, is_wanted: Callable[[RandomRequest], bool]) -> "Asked":
        wanted = [is_wanted(request) for request in self.requests]
        return Asked(list(compress(self.requests, wanted)), list(compress(self.expected, wanted)))


@pytest.fixture(
    scope="module", params=[0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 7))]
)
def asked(request: pytest.FixtureRequest, runner: Runner) -> Asked:
    requests = random_requests(request.param, NUM_REQUESTS)
    return Asked(requests, [answers_to(runner, [r], **SOLO)[0] for r in requests])


# --- ways to ask -------------------------------------------------------------------------------

SOLO: dict[str, Any] = {"enable_prefix_caching": False, "overlap": False}


def answers_to(
    runner: Runner,
    requests: Sequence[RandomRequest],
    *,
    is_streamed: bool = False,
    num_rounds: int = 1,
    **changes: Any,
) -> list[RequestOutput]:
    """What the requests get, asked `NUM_TOGETHER` at once; in the last of the rounds.

    Args:
      changes: to the runner's ResolvedConfig.
    """

    async def body(llm: AsyncLLM) -> list[RequestOutput]:
        asking = streaming(llm) if is_streamed else unary(llm)
        for _ in range(num_rounds - 1):
            await ask_all(asking, requests)
        return await ask_all(asking, requests)

    return with_front(runner, body, **changes)


def answers_over_grpc(
    runner: Runner, requests: Sequence[RandomRequest], **changes: Any
) -> list[RequestOutput]:
    """Unary and streamed by turns, through one client."""

    async def body(llm: AsyncLLM) -> list[RequestOutput]:
        async with serving(llm) as service, AsyncClient(service.address) as client:
            ways = [unary(client), streaming(client)]

            def ask(request: RandomRequest) -> Awaitable[RequestOutput]:
                ways.reverse()
                return ways[0](request)

            return await ask_all(ask, requests)

    return with_front(runner, body, **changes)


def with_front[T](runner: Runner, body: Callable[[AsyncLLM], Awaitable[T]], **changes: Any) -> T:
    return with_model_front(runner, body, eos_token_ids=EOS_TOKEN_IDS, **changes)


def unary(front: AsyncLLM | AsyncClient) -> Ask:
    return lambda request: front.generate(request.prompt, request.params)


def streaming(front: AsyncLLM | AsyncClient) -> Ask:
    return lambda request: joined(front.stream_events(request.prompt, request.params))


async def ask_all(ask: Ask, requests: Sequence[RandomRequest]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for start in range(0, len(requests), NUM_TOGETHER):
        outputs += await asyncio.gather(*map(ask, requests[start : start + NUM_TOGETHER]))
    return outputs


def check_all(asked: Asked, found: Sequence[RequestOutput]) -> None:
    for request, output, expected in zip(asked.requests, found, asked.expected, strict=True):
        try:
            check_same(output, expected)
        except AssertionError as error:
            raise AssertionError(f"{error}: {request} got another answer") from error


# --- every way gives what a request gets alone -------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "cold": {},
    "warm": {"num_rounds": 2},
    "plain": {"overlap": False},
    "preempting": {"num_blocks": SMALL_POOL_BLOCKS},
    "preempting, plain and warm": {
        "num_blocks": SMALL_POOL_BLOCKS,
        "overlap": False,
        "num_rounds": 2,
    },
    "streamed": {"is_streamed": True},
    "streamed while preempting": {"is_streamed": True, "num_blocks": SMALL_POOL_BLOCKS},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_solo_runs(variant, asked, runner):
    found = answers_to(runner, asked.requests, **VARIANTS[variant])
    check_all(asked, found)
    num_preemptions = sum(output.usage.preemptions for output in found)
    assert (num_preemptions > 0) == ("preempting" in variant)
    if variant == "warm":
        assert sum(output.usage.cached_prompt_tokens for output in found) > 1000


def test_answers_over_grpc_are_those_of_solo_runs(asked, runner):
    travelling = asked.only(lambda request: request.params.logits_processor is None)
    check_all(travelling, answers_over_grpc(runner, travelling.requests))


def test_requests_use_every_option_and_end_in_every_way(asked):
    for field in fields(SamplingParams):
        values = {repr(getattr(request.params, field.name)) for request in asked.requests}
        # A priority is refused here.
        assert len(values) > 1 or field.name == "priority", f"{field.name} is always {values}"
    completions = [one for output in asked.expected for one in output.completions]
    reasons = {completion.finish_reason for completion in completions}
    assert reasons == {
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.STOP_STRING,
        FinishReason.MAX_TOKENS,
    }


def test_a_function_that_lifts_what_is_masked_changes_no_neighbour(runner):
    masked = SamplingParams(logits_processor=level, constraint=Constraint(regex=TEXT), seed=1)
    allowed = SamplingParams(logits_processor=level, allowed_token_ids=[7, 299], seed=1)
    plain = RandomRequest([1, 2, 3], SamplingParams(temperature=0.0, seed=1))
    lifting = [RandomRequest([1, 2, 3], params) for params in (masked, allowed)]
    alone = answers_to(runner, [plain], **SOLO)
    texts, ids, beside = answers_to(runner, [*lifting, plain])
    assert all(re.fullmatch(TEXT, one.text) for one in texts.completions)
    assert {i for one in ids.completions for i in one.token_ids} == {7, 299}
    check_same(beside, alone[0])


def level(logits: jax.Array, state: LogitsState) -> jax.Array:
    return jnp.zeros_like(logits)


# --- faults that must show ---------------------------------------------------------------------


def rows_keep_their_first_counts(patch: pytest.MonkeyPatch) -> None:
    """A row's counts, masks and biases stay those of the first sequence that had it."""
    seen: set[int] = set()
    start_rows = sampler.Sampler.start_rows

    def start_new_rows(self: sampler.Sampler, starts: list[RowStart]) -> None:
        start_rows(self, [start for start in starts if start.row not in seen])
        seen.update(start.row for start in starts if start.params.adjusts_logits)

    patch.setattr(sampler.Sampler, "start_rows", start_new_rows)


def counts_are_lost_in_preemption(patch: pytest.MonkeyPatch) -> None:
    make = sampler.adjustments_row
    patch.setattr(
        sampler, "adjustments_row", lambda *args, **kw: make(*args, **kw | {"output_token_ids": ()})
    )


def noise_is_of_the_row(patch: pytest.MonkeyPatch) -> None:
    make = pack._sample_options
    patch.setattr(pack, "_sample_options", lambda start: make(replace(start, seed=start.row)))


def masks_are_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    make = MaskMaker.masks
    patch.setattr(MaskMaker, "masks", lambda *args: np.roll(make(*args), 1, axis=0))


def logprobs_are_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    num_best = pack.Packer.num_best

    def rolled(self: pack.Packer, plan: StepPlan) -> Any:
        found = num_best(self, plan)
        return None if found is None else np.roll(found, 1)

    patch.setattr(pack.Packer, "num_best", rolled)


MAX_ROUNDS = 8
FAULTS = [
    rows_keep_their_first_counts,
    counts_are_lost_in_preemption,
    noise_is_of_the_row,
    masks_are_the_neighbours,
    logprobs_are_the_neighbours,
]


@pytest.mark.parametrize("asked", [0], indirect=True)
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_shows(plant, asked, runner, monkeypatch):
    """In one of a few rounds: who is preempted, and beside whom, depends on when they came."""
    plant(monkeypatch)
    # The second is the grammar's, which gets a token that it did not allow.
    with pytest.raises(
        (AssertionError, EngineFailedError), match=r"got another answer$|: RuntimeError$"
    ):
        for _ in range(MAX_ROUNDS):
            check_all(asked, answers_to(runner, asked.requests, num_blocks=SMALL_POOL_BLOCKS))
