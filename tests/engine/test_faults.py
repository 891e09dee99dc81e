"""What goes wrong in a step stays in that step: FAULTS B81, and rows without finite logits."""

import jax
import pytest
from helpers.engines import Answers, fresh_engine, run_to_end, solo_tokens
from helpers.faulty_runner import FaultyRunner
from helpers.golden_cases import check_continuation, golden_requests
from helpers.requests import make_request

from jaxpaged.request import FinishReason


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("fault_step", [1, 3, 9])
@pytest.mark.parametrize("place", ["before dispatch", "after donation", "collect"])
def test_a_failed_step_takes_what_runs_and_nothing_else(
    place, fault_step, overlap, tiny_runner, goldens
):
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")
    faulty = FaultyRunner(runner, place, fault_step=fault_step)
    engine = fresh_engine(runner, wrapped=faulty, overlap=overlap)
    answers = Answers()
    for request in golden_requests(cases):
        engine.add(request)
    while not answers.errors:
        answers.take(engine.step())
    assert set(answers.errors) == set(map(str, range(len(cases))))
    assert set(answers.errors.values()) == {"a step of the engine failed: RuntimeError"}
    assert set(answers.reasons.values()) == {FinishReason.ERROR}
    stats = engine.stats()
    assert (faulty.num_resets, stats.used_blocks, stats.cached_free_blocks) == (1, 0, 0)
    assert not engine.has_work
    # The same prompts again: nothing of the lost pool is found in the cache.
    later = run_to_end(engine, golden_requests(cases))
    assert sum(started.num_cached_tokens for started in later.started.values()) == 0
    for i, case in enumerate(cases):
        check_continuation(case, later.tokens[str(i), 0])
    assert engine.stats().compiles_after_warmup == 0


def test_a_request_added_after_a_failed_step_is_served_at_once(tiny_runner, goldens):
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")
    engine = fresh_engine(runner, wrapped=FaultyRunner(runner, "collect", fault_step=2))
    first, second = golden_requests(cases[3:5])
    answers = Answers()
    engine.add(first)
    while not answers.errors:
        answers.take(engine.step())
    later = run_to_end(engine, [second])
    check_continuation(cases[4], later.tokens["1", 0])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_a_row_that_is_not_finite_ends_alone(overlap, tiny_runner, goldens):
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")[2:6]
    # Step 4 draws for all four rows; the second one of them is hit.
    faulty = FaultyRunner(runner, "not finite", fault_step=4, sample_idx=1)
    engine = fresh_engine(runner, wrapped=faulty, overlap=overlap)
    answers = run_to_end(engine, golden_requests(cases))
    assert len(faulty.plans[3].sample_rows) == 4
    (hit,) = [key for key, reason in answers.reasons.items() if reason is FinishReason.ERROR]
    assert answers.errors[hit[0]] is None, "the step itself did not fail"
    for i, case in enumerate(cases):
        tokens = answers.tokens[str(i), 0]
        if (str(i), 0) == hit:
            assert tokens == case["output_token_ids"][: len(tokens)] and len(tokens) < 4
        else:
            check_continuation(case, tokens)
    # Its blocks were taken back from the cache, its neighbours' were not.
    again = run_to_end(engine, golden_requests(cases))
    for i, case in enumerate(cases):
        num_cached = again.started[str(i)].num_cached_tokens
        assert num_cached == 0 if str(i) == hit[0] else num_cached > 0
        check_continuation(case, again.tokens[str(i), 0])


def test_nan_weights_end_every_request_and_not_the_engine(tiny_runner, goldens):
    """The device's own flag, not an injected one."""
    runner, case = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")[4]
    engine = fresh_engine(runner)
    good = runner.weights
    runner.weights = jax.tree.map(lambda array: array * float("nan"), good)
    try:
        answers = run_to_end(engine, golden_requests([case]))
    finally:
        runner.weights = good
    assert answers.reasons["0", 0] is FinishReason.ERROR
    assert answers.tokens["0", 0] == []
    after = run_to_end(engine, golden_requests([case]))
    assert after.started["0"].num_cached_tokens == 0
    check_continuation(case, after.tokens["0", 0])


def test_padding_writes_into_no_block(tiny_runner, goldens):
    """B76: three rows padded to four and eight, the pool's first and last block among theirs."""
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")
    requests = [
        make_request(str(i), cases[i]["prompt_token_ids"], max_tokens=20) for i in (4, 7, 8)
    ]
    num_blocks = sum(-(-(len(request.prompt_token_ids) + 20) // 16) for request in requests)
    engine = fresh_engine(runner, num_blocks=num_blocks)
    for request in requests:
        engine.add(request)
    answers, held = Answers(), set()
    while engine.has_work:
        answers.take(engine.step())
        held |= {
            block for sequence in engine.scheduler.roster.running for block in sequence.block_table
        }
    assert {1, num_blocks} <= held and 0 not in held
    assert engine.stats().preemptions == 0
    for request in requests:
        assert answers.tokens[request.request_id, 0] == solo_tokens(runner, request)


def test_abort_in_every_state_frees_everything(tiny_runner, goldens):
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")
    kept = golden_requests(cases)[4]
    for num_steps in (0, 1, 2, 3, 5, 12):
        engine = fresh_engine(runner, max_num_seqs=4)
        engine.add(kept)
        others = [
            make_request(f"n{i}", case["prompt_token_ids"], max_tokens=32, n=2, temperature=1.0)
            for i, case in enumerate(cases[5:])
        ]
        for request in others:
            engine.add(request)
        answers = Answers()
        for _ in range(num_steps):
            answers.take(engine.step())
        assert all(engine.abort(request.request_id) for request in others)
        assert not any(engine.abort(request.request_id) for request in others), "idempotent"
        assert not engine.abort("unknown")
        answers.take(engine.step())
        answers.take(engine.step())
        stats = engine.stats()
        assert (stats.running_requests, stats.queued_requests) == (1, 0)
        while engine.has_work:
            answers.take(engine.step())
        check_continuation(cases[4], answers.tokens["4", 0])
        assert {answers.reasons[f"n{i}", 0] for i in range(len(others))} == {FinishReason.CANCELLED}
        assert engine.stats().used_blocks == 0
