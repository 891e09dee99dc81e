"""Faults of scheduling, preemption and abort that others had."""

import pytest
from helpers.requests import make_request, prompt
from helpers.scheduler_driver import Driver, make_config, preempt

from jaxpaged.request import FinishReason, SequenceStatus


def test_b16_what_can_never_fit_is_not_queued():
    driver = Driver(make_config(block_size=16, num_blocks=4))
    with pytest.raises(AssertionError, match="num_prompt=100 must be at least 1 and fit limit=64"):
        driver.add(make_request("a", prompt(100)))
    assert not driver.scheduler.has_work


def test_b16_a_long_output_ends_at_the_context():
    driver = Driver(make_config(block_size=16, num_blocks=4))
    big = make_request("big", prompt(40), max_tokens=200)
    small = make_request("small", prompt(3, 500), max_tokens=2)
    driver.add(big, small)
    driver.run()
    assert driver.reasons["big", 0] is FinishReason.CONTEXT_LENGTH
    assert len(driver.tokens["big", 0]) == 24
    driver.assert_equal_to_solo(big, small)


@pytest.mark.parametrize("overlap", [False, True])
def test_b17_a_prompt_that_does_not_fit_whole_waits(overlap: bool):
    config = make_config(block_size=16, num_blocks=20, max_num_tokens=32)
    driver = Driver(config, overlap=overlap)
    decode = make_request("decode", prompt(150), max_tokens=60)
    driver.add(decode)
    while not driver.tokens:
        driver.step()
    assert driver.pool.num_used == 10
    late = make_request("late", prompt(200, 500), max_tokens=30)
    driver.add(late)
    driver.run()
    driver.assert_equal_to_solo(decode, late)
    assert driver.num_preemptions == {"decode": 0, "late": 0}


@pytest.mark.parametrize("overlap", [False, True])
def test_b17_preemptions_are_bounded_by_the_blocks_that_others_took(overlap: bool):
    driver = Driver(make_config(block_size=4, num_blocks=12, max_num_tokens=8), overlap=overlap)
    requests = [
        make_request(f"{i}", prompt(9, 100 * i), max_tokens=20, temperature=1.0) for i in range(6)
    ]
    driver.add(*requests)
    driver.run()
    num_tokens = sum(map(len, driver.tokens.values()))
    assert 0 < sum(driver.num_preemptions.values()) <= num_tokens / 4
    driver.assert_equal_to_solo(*requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_b18_a_full_pool_loses_one_sequence_not_all(overlap: bool):
    driver = Driver(make_config(block_size=4, num_blocks=6), overlap=overlap)
    requests = [make_request(f"{i}", prompt(7, 100 * i), max_tokens=9) for i in range(3)]
    driver.add(*requests)
    while not driver.scheduler.roster.num_preemptions:
        driver.step()
    assert driver.scheduler.roster.num_preemptions == 1
    assert len(driver.scheduler.roster.running) == 2
    driver.run()
    driver.assert_equal_to_solo(*requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_b19_of_two_that_need_the_last_block_one_goes_on(overlap: bool):
    driver = Driver(make_config(block_size=4, num_blocks=3), overlap=overlap)
    a = make_request("a", prompt(4), max_tokens=8)
    b = make_request("b", prompt(4, 200), max_tokens=8)
    driver.add(a, b)
    driver.run()
    assert driver.num_preemptions == {"a": 0, "b": 1}
    driver.assert_equal_to_solo(a, b)


def test_b19_a_lone_sequence_fills_the_whole_pool():
    driver = Driver(make_config(block_size=4, num_blocks=3))
    request = make_request("a", prompt(5), max_tokens=100)
    driver.add(request)
    driver.run()
    assert driver.peak_used_blocks == 3
    assert driver.reasons["a", 0] is FinishReason.CONTEXT_LENGTH
    assert driver.num_preemptions == {"a": 0}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_output", [5, 17, 33])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b20_a_resumed_sequence_goes_on_where_it_stopped(
    num_output: int, temperature: float, overlap: bool
):
    config = make_config(block_size=16, num_blocks=16, max_num_tokens=20)
    driver = Driver(config, overlap=overlap)
    request = make_request("a", prompt(30), n=2, max_tokens=40, temperature=temperature, seed=3)
    driver.add(request)
    while len(driver.tokens.get(("a", 0), [])) < num_output:
        driver.step()
    preempt(driver.scheduler, driver.sequence("a", 0))
    driver.scheduler.kv.reset_cache()  # nothing is found again: all is computed
    driver.run()
    driver.assert_equal_to_solo(request)
    assert driver.num_preemptions == {"a": 1}
    assert driver.num_cached == {"a": 0}


def test_b23_preempted_work_goes_first_within_its_priority():
    driver = Driver(make_config(block_size=4, max_num_seqs=1))
    driver.add(make_request("a", prompt(3), priority=1, max_tokens=9))
    driver.step()
    driver.add(make_request("equal", prompt(3, 200), priority=1))
    driver.add(make_request("more important", prompt(3, 300), priority=0))
    preempt(driver.scheduler, driver.sequence("a"))
    ran = []
    while driver.scheduler.has_work:
        driver.step()
        ran += [s.request.request_id for s in driver.scheduler.roster.running]
    assert list(dict.fromkeys(ran)) == ["more important", "a", "equal"]


def test_b23_preempted_work_goes_before_an_earlier_arrival_of_its_priority():
    driver = Driver(make_config(block_size=4, num_blocks=6, max_num_seqs=1))
    driver.add(make_request("waits", prompt(3), priority=0))
    driver.add(make_request("runs", prompt(3, 200), priority=-1, max_tokens=9))
    driver.step()
    runs = driver.sequence("runs")
    assert runs.status is SequenceStatus.RUNNING
    preempt(driver.scheduler, runs)
    plan = driver.step()
    assert plan is not None
    assert runs.status is SequenceStatus.RUNNING


@pytest.mark.parametrize("big_first", [False, True])
def test_b24_big_and_small_requests_end_in_either_order(big_first: bool):
    driver = Driver(make_config(block_size=4, num_blocks=8))
    big = make_request("big", prompt(28), max_tokens=4)
    small = [make_request(f"{i}", prompt(3, 100 * (i + 2)), max_tokens=5) for i in range(4)]
    order = [big, *small] if big_first else [*small, big]
    driver.add(*order)
    driver.run()
    assert driver.start_order() == [request.request_id for request in order]
    driver.assert_equal_to_solo(*order)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_b56_an_abort_frees_everything_within_two_steps(num_steps: int, overlap: bool):
    driver = Driver(make_config(block_size=4, max_num_tokens=8), overlap=overlap)
    driver.add(make_request("a", prompt(19), n=3, temperature=1.0, max_tokens=9))
    for _ in range(num_steps):
        driver.step()
    assert driver.scheduler.abort("a")
    assert not driver.scheduler.abort("a")
    driver.step()
    driver.step()
    driver.scheduler.check_integrity()
    assert driver.pool.num_used == 0
    assert not driver.scheduler.roster.running
    driver.run()
    assert set(driver.reasons.values()) == {FinishReason.CANCELLED}
    assert driver.num_preemptions == {"a": 0}


@pytest.mark.parametrize("num_ended", [0, 1, 3])
def test_b57_an_abort_ends_all_sequences_that_are_left(num_ended: int):
    driver = Driver(make_config(block_size=4, max_num_seqs=3))  # the fourth waits for a row
    driver.add(make_request("a", prompt(6), n=4, temperature=1.0, max_tokens=9))
    driver.step()
    driver.step()
    for index in range(num_ended):
        driver.scheduler.finish_sequence("a", index)
    assert driver.scheduler.abort("a", FinishReason.CANCELLED)
    driver.run()
    assert sorted(driver.reasons) == [("a", index) for index in range(num_ended, 4)]
    assert driver.pool.num_used == 0


def test_b55_a_request_id_is_free_again_after_its_end():
    driver = Driver(make_config(block_size=4), overlap=True)
    driver.add(make_request("a", prompt(6)))
    with pytest.raises(AssertionError, match="runs already"):
        driver.add(make_request("a", prompt(3)))
    driver.step()
    driver.step()
    assert driver.scheduler.abort("a")
    driver.note(driver.scheduler.take_outputs())
    for noted in (driver.reasons, driver.tokens, driver.num_preemptions, driver.num_cached):
        noted.clear()
    again = make_request("a", prompt(5, 300))
    driver.add(again)  # a step of the first "a" is still in flight
    driver.run()
    driver.assert_equal_to_solo(again)


def test_a_sequence_ended_by_the_front_leaves_its_siblings_alone():
    driver = Driver(make_config(block_size=4), overlap=True)
    request = make_request("a", prompt(6), n=3, temperature=1.0, max_tokens=9)
    driver.add(request)
    for _ in range(4):
        driver.step()
    driver.scheduler.finish_sequence("a", 1)
    num_tokens = len(driver.tokens["a", 1])
    driver.run()
    assert len(driver.tokens["a", 1]) == num_tokens  # what it drew later was dropped
    assert [len(driver.tokens["a", index]) for index in (0, 2)] == [9, 9]
    driver.scheduler.finish_sequence("a", 1)  # late: no effect
