"""Beam search through the whole engine against Hugging Face's (tests/goldens/*_beams.json)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import fresh_engine
from helpers.requests import make_beam_request, make_request

from jaxpaged.engine import Engine
from jaxpaged.outputs import RequestEnded, SequenceOutput
from jaxpaged.request import EngineRequest
from jaxpaged.runner.runner import Runner

GOLDENS = Path(__file__).parents[1] / "goldens"
VARIANTS = {
    "overlapped": {},
    "plain": {"overlap": False},
    "no cache": {"enable_prefix_caching": False},
    "budget of 16": {"max_num_tokens": 16},
}
# SmolLM2's: 4 beams over a prompt of two blocks, and 2 over one of four.
FEW_SMOLLM2_CASES = [3, 8]


def cases_of(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDENS / f"{name}_beams.json").read_text())["cases"]


def search_of(case: dict[str, Any], request_id: str, **changes: Any) -> EngineRequest:
    names = ("beam_width", "length_penalty", "max_tokens")
    options = {name: case[name] for name in names} | changes
    ends = case["end_token_ids"]
    return make_beam_request(request_id, case["prompt_token_ids"], stop_token_ids=ends, **options)


def searches_of(cases: Sequence[dict[str, Any]]) -> list[EngineRequest]:
    return [search_of(case, f"{i}") for i, case in enumerate(cases)]


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[SequenceOutput]]:
    """What is told of each request, and its end under `"ended"`; every block must be back."""
    told: dict[str, list[SequenceOutput]] = {request.request_id: [] for request in requests}
    ended: dict[str, RequestEnded] = {}
    for request in requests:
        engine.add(request)
    for _ in range(3000):
        outputs = engine.step()
        for output in outputs.sequences:
            told[output.request_id].append(output)
        ended |= {end.request_id: end for end in outputs.ended}
        if not engine.has_work:
            break
    assert set(ended) == set(told) and not any(end.error for end in ended.values())
    stats = engine.stats()
    assert (stats.used_blocks, stats.compiles_after_warmup) == (0, 0)
    for request in requests:
        if request.params.beam is not None:
            check_saving(request, ended[request.request_id], engine.config.block_size)
    return told


def check_saving(request: EngineRequest, ended: RequestEnded, block_size: int) -> None:
    assert ended.block_saving is not None and 0 <= ended.block_saving < 1
    shares = request.params.n > 1 and len(request.prompt_token_ids) > block_size
    if shares and request.params.max_tokens > 1 and not ended.num_preemptions:
        assert ended.block_saving > 0


def check(case: dict[str, Any], told: Sequence[SequenceOutput]) -> None:
    expected = case["hypotheses"]
    assert [output.index for output in told] == list(range(len(expected)))
    assert [list(output.token_ids) for output in told] == [h["token_ids"] for h in expected]
    for output, hypothesis in zip(told, expected, strict=True):
        assert output.cumulative_logprob is not None and output.finish_reason is not None
        score = output.cumulative_logprob / len(output.token_ids) ** case["length_penalty"]
        assert score == pytest.approx(hypothesis["score"], abs=2e-3, rel=1e-4)
        ends = output.token_ids[-1] in case["end_token_ids"]
        assert output.stop_token_id == (output.token_ids[-1] if ends else None)


def check_all(runner: Runner, cases: Sequence[dict[str, Any]], **changes: Any) -> Engine:
    """All cases in one batch."""
    engine = fresh_engine(runner, **changes)
    told = run(engine, searches_of(cases))
    for i, case in enumerate(cases):
        check(case, told[f"{i}"])
    return engine


@pytest.fixture
def qwen3(tiny_runner) -> Runner:
    return tiny_runner("tiny_qwen3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_qwen3_one_by_one(variant, qwen3):
    engine = fresh_engine(qwen3, **VARIANTS[variant])
    for i, case in enumerate(cases_of("tiny_qwen3")):
        check(case, run(engine, [search_of(case, f"{i}")])[f"{i}"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_qwen3_in_one_batch(variant, qwen3):
    engine = check_all(qwen3, cases_of("tiny_qwen3"), **VARIANTS[variant])
    assert engine.stats().preemptions > 0, "searches of 34 beams share 8 rows"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("num_blocks", [3, 8])
def test_tiny_qwen3_in_a_small_pool(num_blocks, overlap, qwen3):
    engine = check_all(qwen3, cases_of("tiny_qwen3"), num_blocks=num_blocks, overlap=overlap)
    assert engine.stats().preemptions > 20


def test_between_ordinary_requests(qwen3, goldens):
    """Neither kind changes the other's tokens."""
    cases, greedy = cases_of("tiny_qwen3")[:7], goldens("tiny_qwen3")
    others = [
        make_request(f"greedy {i}", case["prompt_token_ids"], max_tokens=12, temperature=0.0)
        for i, case in enumerate(greedy)
    ]
    alone = run(fresh_engine(qwen3), others)
    searches = searches_of(cases)
    mixed = [request for pair in zip(others, searches, strict=False) for request in pair]
    told = run(fresh_engine(qwen3), mixed)
    for i, case in enumerate(cases):
        check(case, told[f"{i}"])
    for request in mixed[::2]:
        tokens, tokens_alone = (
            [token for output in answers[request.request_id] for token in output.token_ids]
            for answers in (told, alone)
        )
        assert tokens == tokens_alone


def test_one_beam_is_greedy(qwen3, goldens):
    for case in goldens("tiny_qwen3"):
        prompt, tokens = case["prompt_token_ids"], case["output_token_ids"][:8]
        search = make_beam_request("a", prompt, beam_width=1, max_tokens=8)
        (output,) = run(fresh_engine(qwen3), [search])["a"]
        assert min(case["margins"][:8]) > 1e-3 and list(output.token_ids) == tokens


def test_a_wrong_length_penalty_shows(qwen3):
    case = cases_of("tiny_qwen3")[1]
    told = run(fresh_engine(qwen3), [search_of(case, "a", length_penalty=-1)])["a"]
    with pytest.raises(AssertionError):
        check(case, told)


def test_smollm2(smollm2_runner):
    cases = cases_of("smollm2")
    check_all(smollm2_runner, [cases[i] for i in FEW_SMOLLM2_CASES])


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_smollm2_every_case(variant, smollm2_runner):
    cases = cases_of("smollm2")
    engine = fresh_engine(smollm2_runner, **VARIANTS[variant])
    for i, case in enumerate(cases):
        check(case, run(engine, [search_of(case, f"{i}")])[f"{i}"])
    check_all(smollm2_runner, cases, **VARIANTS[variant])


@pytest.mark.long
def test_smollm2_in_a_small_pool(smollm2_runner):
    engine = check_all(smollm2_runner, cases_of("smollm2"), num_blocks=8)
    assert engine.stats().preemptions > 0
