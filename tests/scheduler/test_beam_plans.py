"""Beam searches in the scheduler, exactly: rows, blocks, copies, and what sharing saves."""

import pytest
from helpers.requests import make_beam_request, make_request, prompt
from helpers.scheduler_driver import Driver, make_config

from jaxpaged.request import SequenceStatus
from jaxpaged.scheduler.scheduled_step import ScheduledStep
from jaxpaged.step_plan import StepPlan


def start(num_prompt: int, *, max_num_seqs: int = 4, **options) -> Driver:
    """A driver with one search, "a"."""
    driver = Driver(make_config(max_num_seqs=max_num_seqs))
    driver.add(make_beam_request("a", prompt(num_prompt), **options))
    return driver


def test_the_plans_of_a_search():
    """Two beams fork in a half filled block: one copies it, the other goes on in it."""
    driver = start(6, beam_width=2, max_tokens=3)
    plans = [plan for plan in (driver.step() for _ in range(3)) if plan is not None]
    assert [plan.rows for plan in plans] == [[0], [0, 1], [0, 1]]
    assert [plan.num_decode_rows for plan in plans] == [0, 2, 2]
    first, second = (sorted(plan.known_tokens) for plan in plans[:2])
    assert (first, second) == ([], [0, 1])
    assert tables_after(plans[:2]) == {0: [1, 3], 1: [1, 2]}
    assert plans[1].copies == [(2, 3)] and [start.row for start in plans[1].starts] == [1]
    assert driver.step() is None and not driver.scheduler.has_work
    assert driver.reasons == {}, "the hypotheses are told with the next outputs"
    driver.run(max_steps=1)
    assert set(driver.reasons) == {("a", 0), ("a", 1)}


def tables_after(plans: list[StepPlan]) -> dict[int, list[int]]:
    places = {(row, idx): block for plan in plans for row, idx, block in plan.table_updates}
    return {
        row: [block for (of, _), block in sorted(places.items()) if of == row]
        for row in {row for row, _ in places}
    }


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "saving"),
    [
        (8, 1, 0.0),  # one beam, 2 blocks
        (8, 3, 1 - 10 / 14),  # then twice 2 shared blocks, and 1 for each of two beams
        (3, 3, 1 - 5 / 5),
    ],
)
def test_block_saving(num_prompt, max_tokens, saving):
    driver = start(num_prompt, beam_width=2, max_tokens=max_tokens)
    driver.run()
    assert driver.block_saving == {"a": pytest.approx(saving)}


def test_beams_that_wait_keep_no_rows_from_those_they_wait_for():
    """Three beams have told their candidates, the fourth finds no row: one of them makes way."""
    driver = start(6, max_num_seqs=3, beam_width=4, max_tokens=4)
    driver.step()
    driver.step()
    beams = driver.scheduler.roster.requests["a"].sequences
    assert [beam.status for beam in beams].count(SequenceStatus.WAITING) == 1
    assert [beam.awaits_selection for beam in beams].count(True) == 3
    driver.step()
    assert driver.scheduler.roster.num_preemptions == 1
    driver.run()


def test_a_row_that_changes_hands_within_a_step_is_started_once():
    """A beam forks into it, and is preempted before it computes anything; another one takes it."""
    driver = start(6, beam_width=2, max_tokens=3)
    driver.step()
    beam, step = driver.sequence("a"), ScheduledStep(StepPlan(9), 64)
    step.start_row(beam)
    assert step.plan.table_updates == [(0, 0, 1), (0, 1, 2)]
    beam.block_table = [3]
    step.start_row(beam)
    assert [start.row for start in step.plan.starts] == [0]
    assert step.plan.table_updates == [(0, 0, 3)]


def test_a_search_does_not_wait_for_another_request_to_end():
    """As many beams as rows, and one of the rows is taken for long."""
    driver = Driver(make_config(num_blocks=64, max_num_seqs=4))
    driver.add(make_request("long", prompt(5), max_tokens=200))
    search = make_beam_request("a", prompt(9, start=50), beam_width=4, max_tokens=10)
    driver.add(search)
    for _ in range(22):  # two a token, and what is told is told a step later
        driver.step()
    driver.assert_equal_to_solo(search)
    assert len(driver.tokens["long", 0]) == 22, "it runs in every step"
    driver.run()
    assert driver.num_preemptions["long"] == 0
