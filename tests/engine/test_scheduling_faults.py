"""Faults of scheduling and preemption that others had, with a real model's tokens."""

from collections.abc import Sequence

import numpy as np
import pytest
from helpers.engines import Answers, fresh_engine, run_to_end, solo_tokens
from helpers.requests import make_request
from helpers.scheduler_driver import preempt

from jaxpaged.engine import Engine
from jaxpaged.request import EngineRequest, FinishReason
from jaxpaged.runner.runner import Runner

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, num_tokens).tolist()


def assert_equal_to_solo(
    runner: Runner, answers: Answers, requests: Sequence[EngineRequest]
) -> None:
    for request in requests:
        solo = solo_tokens(runner, request)
        assert answers.tokens[request.request_id, 0] == solo, request.request_id


def add_all(engine: Engine, requests: Sequence[EngineRequest]) -> None:
    for request in requests:
        engine.add(request)


def finish(engine: Engine, answers: Answers) -> None:
    while engine.has_work:
        answers.take(engine.step())


@OVERLAP
def test_a_prompt_that_does_not_fit_whole_waits(overlap: bool, tiny_runner):
    """B17."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=20, max_num_tokens=32, overlap=overlap)
    decode = make_request("decode", tokens(150), max_tokens=60)
    late = make_request("late", tokens(200, 1), max_tokens=30)
    answers = Answers()
    engine.add(decode)
    while not answers.tokens:
        answers.take(engine.step())
    assert engine.stats().used_blocks == 10
    engine.add(late)
    finish(engine, answers)
    assert answers.num_preemptions == {"decode": 0, "late": 0}
    assert_equal_to_solo(runner, answers, [decode, late])


@OVERLAP
def test_preemptions_are_bounded_by_the_blocks_that_others_took(overlap: bool, tiny_runner):
    """B17."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=10, max_num_tokens=32, overlap=overlap)
    requests = [
        make_request(str(i), tokens(30, i), max_tokens=60, temperature=1.0, seed=i)
        for i in range(6)
    ]
    answers = run_to_end(engine, requests)
    assert 0 < sum(answers.num_preemptions.values()) <= 6 * 60 / 16
    assert_equal_to_solo(runner, answers, requests)


@OVERLAP
def test_a_full_pool_loses_one_sequence_not_all(overlap: bool, tiny_runner):
    """B18."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=6, overlap=overlap)
    requests = [make_request(str(i), tokens(31, i), max_tokens=9) for i in range(3)]
    answers = Answers()
    add_all(engine, requests)
    while not engine.stats().preemptions:
        answers.take(engine.step())
    assert (engine.stats().preemptions, engine.stats().running_requests) == (1, 2)
    finish(engine, answers)
    assert_equal_to_solo(runner, answers, requests)


@OVERLAP
def test_of_two_that_need_the_last_block_one_goes_on(overlap: bool, tiny_runner):
    """B19."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=3, overlap=overlap)
    requests = [make_request(i, tokens(16, ord(i)), max_tokens=32) for i in "ab"]
    answers = run_to_end(engine, requests)
    assert answers.num_preemptions == {"a": 0, "b": 1}
    assert_equal_to_solo(runner, answers, requests)


@OVERLAP
def test_a_lone_sequence_fills_the_whole_pool_and_ends(overlap: bool, tiny_runner):
    """B19."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=3, overlap=overlap)
    answers = run_to_end(engine, [make_request("a", tokens(20), max_tokens=100)])
    assert answers.reasons["a", 0] is FinishReason.CONTEXT_LENGTH
    whole = solo_tokens(runner, make_request("a", tokens(20), max_tokens=28))
    assert (answers.tokens["a", 0], answers.num_preemptions) == (whole, {"a": 0})


@OVERLAP
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_output", [5, 17, 33])
def test_a_resumed_sequence_goes_on_where_it_stopped(
    num_output: int, temperature: float, overlap: bool, tiny_runner
):
    """B20: `Answers` would notice a token that is told twice, the solo runs one that is lost."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=16, max_num_tokens=20, overlap=overlap)
    options = {"max_tokens": 40, "temperature": temperature}
    request = make_request("a", tokens(30), n=2, seed=3, **options)
    answers = Answers()
    engine.add(request)
    while len(answers.tokens.get(("a", 0), [])) < num_output:
        answers.take(engine.step())
    preempt(engine.scheduler, engine.scheduler.roster.requests["a"].sequences[0])
    engine.reset_prefix_cache()  # nothing is found again: all is computed
    finish(engine, answers)
    assert (answers.num_preemptions, answers.started["a"].num_cached_tokens) == ({"a": 1}, 0)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.completion_tokens) == (30, 80)
    for i in range(2):
        solo = make_request("solo", tokens(30), seed=3 + i, **options)
        assert answers.tokens["a", i] == solo_tokens(runner, solo)


def test_preempted_work_goes_first_within_its_priority(tiny_runner):
    """B23."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, max_num_seqs=1, scheduling="priority")
    a, equal, other = (
        make_request(name, tokens(3, seed), priority=priority, max_tokens=9)
        for name, seed, priority in (("a", 0, 1), ("equal", 1, 1), ("more important", 2, 0))
    )
    answers = Answers()
    engine.add(a)
    answers.take(engine.step())
    add_all(engine, [equal, other])
    preempt(engine.scheduler, engine.scheduler.roster.requests["a"].sequences[0])
    finish(engine, answers)
    assert list(answers.reasons) == [("more important", 0), ("a", 0), ("equal", 0)]
    assert_equal_to_solo(runner, answers, [a, equal, other])


@pytest.mark.parametrize("big_first", [False, True])
def test_big_and_small_requests_end_in_either_order(big_first: bool, tiny_runner):
    """B24: strictly in order of arrival."""
    runner = tiny_runner("tiny_qwen3")
    big = make_request("big", tokens(112), max_tokens=4)
    small = [make_request(str(i), tokens(3, i + 1), max_tokens=5) for i in range(4)]
    order = [big, *small] if big_first else [*small, big]
    answers = run_to_end(fresh_engine(runner, num_blocks=8), order)
    assert list(answers.started) == [request.request_id for request in order]
    assert_equal_to_solo(runner, answers, order)
