"""Faults of prefix caches and block managers that others had, with a real model's tokens."""

import json
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import Answers, fresh_engine, load_runner, run_to_end, solo_tokens
from helpers.model_fronts import KeptRunner
from helpers.requests import make_request
from helpers.scheduler_driver import preempt
from helpers.tiny_models import hf_config

from jaxpaged.engine import Engine
from jaxpaged.request import EngineRequest, SequenceStatus
from jaxpaged.runner.runner import Runner

BLOCK_SIZE = 16


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Random ids; of two seeds the first ones differ already."""
    drawn = np.random.default_rng(seed).integers(3, 300, num_tokens)
    return [3 + seed % 297, *drawn.tolist()][:num_tokens]


def assert_equal_to_solo(runner: Runner, answers: Answers, requests: Sequence[EngineRequest]):
    for request in requests:
        solo = solo_tokens(runner, request)
        assert answers.tokens[request.request_id, 0] == solo, request.request_id


def run_in_turn(engine: Engine, requests: Sequence[EngineRequest]) -> Answers:
    """Each request alone, after the one before has ended."""
    answers = Answers()
    for request in requests:
        one = run_to_end(engine, [request])
        answers.tokens |= one.tokens
        answers.started |= one.started
    return answers


def num_cached(answers: Answers) -> list[int]:
    return [started.num_cached_tokens for started in answers.started.values()]


def block_contents(runner: Runner, blocks: set[int]) -> list[np.ndarray]:
    """Keys and values of all layers in these blocks."""
    layers = range(runner.pool.num_layers)
    every = [array for layer in layers for array in runner.pool.layer_kv(layer)]
    return [np.asarray(array[jnp.asarray(sorted(blocks))]) for array in every]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_at_least_one_token_of_a_cached_prompt_is_computed(overlap: bool, tiny_runner):
    """B01."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, overlap=overlap)
    requests = [
        make_request(str(i), tokens(33)[:num_prompt], max_tokens=20)
        for i, num_prompt in enumerate([32, 32, 31, 33, 16, 1])
    ]
    answers = run_in_turn(engine, requests)
    assert num_cached(answers) == [0, 31, 30, 32, 15, 0]
    # What a full hit went on with is found too.
    longer = [*tokens(32), *answers.tokens["1", 0], 7]
    answers.started |= run_to_end(engine, [make_request("longer", longer)]).started
    assert answers.started["longer"].num_cached_tokens >= 48
    assert_equal_to_solo(runner, answers, requests)


class Collision(int):
    """A token id whose hash is that of all others."""

    def __hash__(self) -> int:
        return 7


def test_prompts_of_equal_hashes_are_not_mixed(tiny_runner):
    """B02."""
    runner = tiny_runner("tiny_qwen3")
    prompts = [[Collision(i) for i in tokens(32, seed)] for seed in (1, 2, 3, 2)]
    requests = [make_request(str(i), prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    answers = run_in_turn(fresh_engine(runner), requests)
    assert num_cached(answers) == [0, 0, 0, 31]
    assert_equal_to_solo(runner, answers, requests)


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_nothing_is_published_before_it_was_computed(overlap: bool, how: str, tiny_runner):
    """B05: "a" goes after it was scheduled and before the device gets the step."""
    runner = tiny_runner("tiny_qwen3")
    kept = KeptRunner(runner)
    engine = fresh_engine(runner, wrapped=kept, overlap=overlap)
    published = engine.scheduler.kv.cache.published_blocks

    def interrupt(num_steps: int) -> None:
        if num_steps != 1:
            return
        assert published() == set()
        if how == "abort":
            assert engine.abort("a")
        else:
            preempt(engine.scheduler, engine.scheduler.roster.requests["a"].sequences[0])

    kept.interrupt = interrupt
    a = make_request("a", tokens(48), max_tokens=9)
    engine.add(a)
    answers = Answers()
    answers.take(engine.step())
    assert published() == set()
    if overlap:
        answers.take(engine.step())
    while engine.has_work:
        answers.take(engine.step())
    b = make_request("b", tokens(48), max_tokens=9)
    later = run_to_end(engine, [b])
    assert later.started["b"].num_cached_tokens == (0 if how == "abort" else 47)
    assert_equal_to_solo(runner, later, [b])
    if how == "preempt":
        assert_equal_to_solo(runner, answers, [a])


def test_the_other_owner_of_a_prefix_keeps_it(tiny_runner):
    """B05: two computed the same blocks, and one of them goes."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner)
    a = make_request("a", tokens(40), max_tokens=20)
    b = make_request("b", tokens(40), max_tokens=20, use_prefix_cache=False)
    c = make_request("c", tokens(40), max_tokens=20)
    answers = Answers()
    engine.add(a)
    engine.add(b)
    for _ in range(4):
        answers.take(engine.step())
    assert engine.abort("b")
    engine.add(c)
    while engine.has_work:
        answers.take(engine.step())
    assert answers.started["c"].num_cached_tokens >= 32
    assert_equal_to_solo(runner, answers, [a, c])


def test_a_hit_computes_as_a_miss(tiny_runner):
    """B06."""
    runner, first = tiny_runner("tiny_qwen3"), tokens(96)
    requests = [make_request("first", first, max_tokens=1)]
    shared = [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE]
    cases = [(num_shared, num_suffix) for num_shared in shared for num_suffix in (1, 16, 32)]
    for i, (num_shared, num_suffix) in enumerate(cases):
        prompt = first[:num_shared] + tokens(num_suffix, 100 + i)
        requests.append(make_request(str(i), prompt, max_tokens=12))
    answers = run_in_turn(fresh_engine(runner, max_num_tokens=24), requests)
    for (num_shared, _), cached in zip(cases, num_cached(answers)[1:], strict=True):
        # A copy of fewer than four tokens is not worth it.
        assert cached == num_shared // BLOCK_SIZE * BLOCK_SIZE + (
            BLOCK_SIZE - 1 if num_shared == BLOCK_SIZE - 1 else 0
        )
    assert_equal_to_solo(runner, answers, requests)


def test_a_hit_without_room_for_the_rest_takes_nothing(tiny_runner):
    """B11."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=8, overlap=False)
    run_to_end(engine, [make_request("cached", tokens(64), max_tokens=1)])
    holder = make_request("holder", tokens(30, 1), max_tokens=3)
    request = make_request("a", tokens(64) + tokens(48, 2), max_tokens=3)  # needs 4 + 3 blocks
    answers, pool = Answers(), engine.scheduler.kv.pool
    engine.add(holder)
    answers.take(engine.step())
    before = list(pool.references), pool.cached_free_blocks()
    engine.add(request)
    answers.take(engine.step())
    assert engine.scheduler.roster.requests["a"].sequences[0].status is SequenceStatus.WAITING
    assert (list(pool.references), pool.cached_free_blocks()) == before
    while engine.has_work:
        answers.take(engine.step())
    assert answers.started["a"].num_cached_tokens == 64
    assert_equal_to_solo(runner, answers, [holder, request])


@pytest.mark.parametrize("num_prompt", [16, 17, 24, 31, 32])
def test_every_further_sequence_copies_a_shared_tail_once(num_prompt: int, tiny_runner):
    """B12."""
    runner = tiny_runner("tiny_qwen3")
    kept = KeptRunner(runner)
    options = {"max_tokens": 20, "temperature": 1.0}
    request = make_request("a", tokens(num_prompt), n=3, seed=5, **options)
    answers = run_to_end(fresh_engine(runner, wrapped=kept), [request])
    copies = [copy for plan in kept.plans for copy in plan.copies]
    assert len(copies) == (2 if num_prompt % BLOCK_SIZE else 0)
    for i in range(3):
        solo = make_request("solo", tokens(num_prompt), seed=5 + i, **options)
        assert answers.tokens["a", i] == solo_tokens(runner, solo)


def test_sequences_of_a_cached_prompt_leave_its_blocks_alone(tiny_runner):
    """B13."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner)
    run_to_end(engine, [make_request("first", tokens(32), max_tokens=1)])
    published = engine.scheduler.kv.cache.published_blocks()
    assert len(published) == 2
    before = block_contents(runner, published)
    options = {"max_tokens": 20, "temperature": 1.0}
    answers = run_to_end(engine, [make_request("a", tokens(32), n=4, **options)])
    assert answers.started["a"].num_cached_tokens == 31
    for old, new in zip(before, block_contents(runner, published), strict=True):
        np.testing.assert_array_equal(old, new)
    for i in range(4):
        solo = make_request("solo", tokens(32), seed=i, **options)
        assert answers.tokens["a", i] == solo_tokens(runner, solo)


def test_a_sliding_window_and_the_cache(tmp_path):
    """B14."""
    config = hf_config(model_type="mistral", sliding_window=32, num_hidden_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = load_runner(
        str(tmp_path), load_format="random", num_blocks=32, max_num_seqs=1, max_num_tokens=32
    )
    assert runner.weights.structure.config.layer_windows == (32, 32)
    prompt = [i % 90 + 3 for i in tokens(100)]
    prompts = [prompt, [*prompt, 5, 6, 7], [*prompt[:-2], 8, 9], prompt]
    requests = [make_request(str(i), p, max_tokens=20) for i, p in enumerate(prompts)]
    answers = run_in_turn(fresh_engine(runner), requests)
    assert num_cached(answers) == [0, 100, 96, 96]
    assert_equal_to_solo(runner, answers, requests)
    runner.close()


def test_the_cache_changes_no_greedy_token(tiny_runner):
    """B15: twenty prompts of four families, together, cold, warm and without a cache."""
    runner = tiny_runner("tiny_qwen3")
    requests = [
        make_request(str(i), tokens(40, i % 4)[: 5 + 7 * (i % 6)] + tokens(1 + i, 50 + i))
        for i in range(20)
    ]
    engine = fresh_engine(runner)
    cold, warm = run_to_end(engine, requests), run_to_end(engine, requests)
    without = run_to_end(fresh_engine(runner, enable_prefix_caching=False), requests)
    assert sum(num_cached(warm)) > sum(num_cached(cold)) > sum(num_cached(without)) == 0
    assert cold.tokens == warm.tokens == without.tokens
