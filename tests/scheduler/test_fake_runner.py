"""The fake runner itself: what it draws, and what it refuses."""

import pytest
from helpers.fake_runner import FakeRunner, expected_tokens
from helpers.requests import make_params, make_request, prompt
from helpers.scheduler_driver import solo_run

from jaxpaged.step_plan import RowStart, StepPlan


def start(row: int) -> RowStart:
    return RowStart(row, make_params(), seed=0)


def make_runner() -> FakeRunner:
    return FakeRunner(num_blocks=4, block_size=2, max_num_seqs=3)


def prefill_plan() -> StepPlan:
    """Rows 0 and 1 compute three tokens each, into blocks 1, 2 and 3, 4."""
    return StepPlan(
        step_id=1,
        starts=[start(0), start(1)],
        table_updates=[(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 4)],
        rows=[0, 1],
        q_lens=[3, 3],
        kv_lens=[3, 3],
        token_ids=[5, 6, 7, 8, 9, 10],
        sample_sources=[0, 1],
        sample_rows=[0, 1],
    )


def decode_plan(row: int, kv_len: int, **changes) -> StepPlan:
    return StepPlan(
        step_id=2,
        num_decode_rows=1,
        rows=[row],
        q_lens=[1],
        kv_lens=[kv_len],
        sample_sources=[0],
        sample_rows=[row],
        **changes,
    )


@pytest.mark.parametrize("seed", [None, -1, 0, 3])
def test_it_draws_what_the_prefix_and_the_seed_say(seed: int | None):
    request = make_request(
        "a", prompt(21), max_tokens=30, temperature=0.0 if seed is None else 1.0, seed=seed or 0
    )
    tokens, _ = solo_run(request, 0, 64)
    assert tokens == expected_tokens(tuple(prompt(21)), 30, seed=seed)
    assert len(set(tokens)) > 3


def test_it_feeds_the_drawn_token_back():
    runner = make_runner()
    first = runner.collect(runner.dispatch(prefill_plan()))
    second = runner.collect(runner.dispatch(decode_plan(0, 4)))
    assert [first.token_ids[0], *second.token_ids] == expected_tokens((5, 6, 7), 2)


@pytest.mark.parametrize(
    "plan, message",
    [
        (decode_plan(0, 5), "has no block"),
        (decode_plan(0, 4, table_updates=[(0, 0, 3)]), "of another prefix"),
        (decode_plan(0, 4, table_updates=[(0, 0, 2), (0, 1, 1)]), "holds Slot"),
        (decode_plan(0, 4, copies=[(1, 2)]), "holds Slot"),
        (decode_plan(0, 4, copies=[(1, 3), (3, 4)]), "destination is a source"),
        (decode_plan(0, 4, copies=[(1, 3), (2, 3)]), "two copies into one block"),
        (decode_plan(0, 4, table_updates=[(0, 1, 0)]), "null block"),
        (decode_plan(0, 4, table_updates=[(0, 1, 5)]), "out of range"),
        (decode_plan(0, 4, table_updates=[(0, 1, 2), (0, 1, 3)]), "written twice"),
        (decode_plan(2, 1), "nothing was drawn"),
        (decode_plan(3, 1), "row out of range"),
    ],
)
def test_it_refuses_a_plan_that_would_read_or_write_wrongly(plan: StepPlan, message: str):
    if "nothing" in message:
        plan.starts, plan.table_updates = [start(2)], [(2, 0, 4)]
    runner = make_runner()
    runner.dispatch(prefill_plan())
    with pytest.raises(AssertionError, match=message):
        runner.dispatch(plan)


def test_it_refuses_slots_that_were_never_written():
    runner = make_runner()
    plan = prefill_plan()
    plan.kv_lens = [4, 3]
    with pytest.raises(AssertionError, match="never written"):
        runner.dispatch(plan)


def test_it_refuses_a_write_into_a_block_of_two_tables():
    runner = make_runner()
    plan = prefill_plan()
    plan.table_updates[3] = (1, 1, 2)
    with pytest.raises(AssertionError, match="block 2 is written and in two tables"):
        runner.dispatch(plan)


def test_it_refuses_decode_rows_that_are_not_first():
    plan = prefill_plan()
    plan.num_decode_rows = 1
    with pytest.raises(AssertionError, match="decode rows come first"):
        make_runner().dispatch(plan)
