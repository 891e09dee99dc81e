"""Who is scheduled, and on which blocks: every point of the policy, with exact block ids."""

import pytest
from helpers.requests import make_request, prompt
from helpers.scheduler_driver import Driver, make_config

from jaxpaged.request import SequenceStatus
from jaxpaged.scheduler.scheduler import Scheduler


def test_waiting_requests_are_admitted_in_order_of_arrival():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("a", prompt(5)), make_request("b", prompt(3, 200)))
    plan = driver.step()
    assert plan is not None
    assert [start.row for start in plan.starts] == [0, 1]
    assert plan.table_updates == [(0, 0, 1), (0, 1, 2), (1, 0, 3)]
    assert (plan.rows, plan.q_lens, plan.kv_lens) == ([0, 1], [5, 3], [5, 3])
    assert plan.token_ids == prompt(5) + prompt(3, 200)
    assert (plan.sample_sources, plan.sample_rows) == ([0, 1], [0, 1])
    assert plan.num_decode_rows == 0


def test_a_prompt_is_computed_in_chunks_and_gets_blocks_on_demand():
    driver = Driver(make_config(block_size=4, max_num_tokens=6))
    driver.add(make_request("a", prompt(10)))
    first, second, third = driver.step(), driver.step(), driver.step()
    assert first and second and third
    assert (first.q_lens, first.kv_lens, first.sample_rows) == ([6], [6], [])
    assert first.table_updates == [(0, 0, 1), (0, 1, 2)]
    assert (second.q_lens, second.kv_lens, second.sample_rows) == ([4], [10], [0])
    assert second.table_updates == [(0, 2, 3)]
    assert (third.num_decode_rows, third.kv_lens, third.table_updates) == (1, [11], [])


def test_a_decode_gets_a_block_only_when_the_last_one_is_full():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("a", prompt(3), max_tokens=8))
    updates = [plan.table_updates for _ in range(6) if (plan := driver.step())]
    assert updates == [[(0, 0, 1)], [], [(0, 1, 2)], [], [], []]


def test_decodes_come_first_then_prompts_under_way_then_waiting_ones():
    driver = Driver(make_config(block_size=4, max_num_tokens=8))
    driver.add(make_request("prompt", prompt(15)))
    driver.add(make_request("decode", prompt(2, 200)))
    driver.step()  # 8 tokens of "prompt": nothing is left for "decode"
    mixed = driver.step()
    assert mixed is not None
    assert mixed.q_lens == [7, 1]  # under way before waiting
    driver.add(make_request("late", prompt(20, 300)))
    plan = driver.step()
    assert plan is not None
    assert (plan.num_decode_rows, plan.rows, plan.q_lens) == (1, [0, 1, 2], [1, 1, 6])


def test_a_request_too_big_for_the_free_blocks_is_not_overtaken():
    driver = Driver(make_config(block_size=4, num_blocks=6))
    driver.add(make_request("first", prompt(12), max_tokens=3))
    driver.step()
    driver.add(make_request("big", prompt(16, 200)), make_request("small", prompt(2, 300)))
    plan = driver.step()
    assert plan is not None
    assert plan.rows == [0]
    assert driver.sequence("small").status is SequenceStatus.WAITING
    driver.run()
    assert list(driver.num_cached) == ["first", "big", "small"]


def test_blocks_owed_to_a_prompt_under_way_are_not_given_away():
    driver = Driver(make_config(block_size=4, num_blocks=5, max_num_tokens=8))
    driver.add(make_request("a", prompt(15)))
    driver.step()
    driver.add(make_request("b", prompt(6, 200)))
    plan = driver.step()  # one token of the budget is left, and three blocks are free
    assert plan is not None
    assert plan.rows == [0]


def test_the_youngest_is_preempted():
    driver = Driver(make_config(block_size=4, num_blocks=4))
    a = make_request("a", prompt(7), max_tokens=9)
    b = make_request("b", prompt(7, 200), max_tokens=9)
    driver.add(a, b)
    driver.step()
    driver.step()
    assert driver.sequence("a").block_table == [1, 2]
    assert driver.sequence("b").block_table == [3, 4]
    plan = driver.step()
    assert plan is not None
    assert driver.sequence("b").status is SequenceStatus.WAITING
    assert driver.sequence("a").block_table == [1, 2, 4]  # published blocks are evicted tail first
    assert plan.rows == [0]
    driver.run()
    driver.assert_equal_to_solo(a, b)
    assert driver.num_preemptions == {"a": 0, "b": 1}


def test_a_preempted_sequence_resumes_through_the_cache():
    driver = Driver(make_config(block_size=4, num_blocks=4))
    a = make_request("a", prompt(7), max_tokens=3)
    b = make_request("b", prompt(7, 200), max_tokens=9)
    driver.add(a, b)
    for _ in range(3):
        driver.step()
    assert driver.sequence("b").status is SequenceStatus.WAITING
    plan = driver.step()  # "a" has ended; block 3 of "b" was not evicted
    assert plan is not None
    assert driver.sequence("b").block_table[0] == 3
    assert driver.sequence("b").num_cached_tokens == 4
    assert (plan.q_lens, plan.kv_lens) == ([5], [9])
    driver.run()
    assert driver.num_cached == {"a": 0, "b": 0}  # told once, for the first start
    driver.assert_equal_to_solo(a, b)


def test_nothing_is_admitted_in_a_step_that_preempts():
    driver = Driver(make_config(block_size=4, num_blocks=5))
    driver.add(make_request("a", prompt(7), max_tokens=9))
    driver.add(make_request("b", prompt(11, 200), max_tokens=9))
    driver.step()
    driver.add(make_request("c", prompt(2, 300)))
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert plan.rows == [0]
    assert driver.pool.num_free == 2


def test_used_blocks_are_freed_tail_first_and_evicted_least_recently_used_first():
    driver = Driver(make_config(block_size=4, num_blocks=6))
    driver.add(make_request("a", prompt(9), max_tokens=1))
    driver.run()
    driver.add(make_request("b", prompt(9, 200), max_tokens=1))
    driver.run()
    # Each left two published blocks, and its third, never full, is empty again.
    assert driver.pool.cached_free_blocks() == [2, 1, 4, 3]
    driver.add(make_request("a again", prompt(9), max_tokens=1))
    driver.run()
    assert driver.num_cached["a again"] == 8
    assert driver.pool.cached_free_blocks() == [4, 3, 2, 1]
    driver.add(make_request("c", prompt(11, 300), max_tokens=1))
    driver.step()
    assert driver.pool.cached_free_blocks()[:3] == [3, 2, 1]


def test_a_partly_matching_block_is_copied():
    driver = Driver(make_config(block_size=4))
    first = make_request("a", prompt(9), max_tokens=1)
    driver.add(first)
    driver.run()
    other = make_request("b", [*prompt(6), 7, 8, 9], max_tokens=1)
    driver.add(other)
    plan = driver.step()
    assert plan is not None
    assert driver.num_cached["b"] == 6  # block 1 shared, two tokens of block 2 copied
    assert plan.copies == [(2, 3)]
    assert plan.table_updates == [(0, 0, 1), (0, 1, 3), (0, 2, 4)]
    assert (plan.q_lens, plan.kv_lens, plan.token_ids) == ([3], [9], [7, 8, 9])
    driver.run()
    driver.assert_equal_to_solo(first, other)


def test_a_copy_is_left_out_when_its_source_would_take_the_last_block():
    driver = Driver(make_config(block_size=4, num_blocks=3))
    driver.add(make_request("a", prompt(9), max_tokens=1))
    driver.run()
    driver.add(make_request("b", [*prompt(6), *prompt(5, 200)], max_tokens=1))
    plan = driver.step()  # three blocks are needed, the copy's source would be a fourth
    assert plan is not None
    assert plan.copies == []
    assert driver.num_cached["b"] == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_waits_for_the_block_that_another_computes(overlap: bool):
    driver = Driver(make_config(block_size=4), overlap=overlap)
    a = make_request("a", [*prompt(8), 1, 2])
    b = make_request("b", [*prompt(8), 3, 4])
    unrelated = make_request("c", prompt(3, 300))
    driver.add(a, b, unrelated)
    plan = driver.step()
    assert plan is not None
    assert plan.q_lens == [10, 3]  # "c" does not wait behind "b"
    driver.run()
    assert driver.num_cached == {"a": 0, "c": 0, "b": 8}
    assert driver.start_order() == ["a", "c", "b"]
    driver.assert_equal_to_solo(a, b, unrelated)


def test_nobody_waits_for_a_block_that_he_may_not_read():
    for use_prefix_cache, salt in ((False, "x"), (True, "y")):
        driver = Driver(make_config(block_size=4))
        driver.add(make_request("a", prompt(9), cache_salt="x"))
        driver.add(make_request("b", prompt(9), cache_salt=salt, use_prefix_cache=use_prefix_cache))
        plan = driver.step()
        assert plan is not None
        assert plan.q_lens == [9, 9]


def test_without_prefix_caching_nobody_waits_and_nothing_is_shared():
    driver = Driver(make_config(block_size=4, enable_prefix_caching=False))
    driver.add(make_request("a", prompt(9)), make_request("b", prompt(9)))
    plan = driver.step()
    assert plan is not None
    assert plan.q_lens == [9, 9]
    driver.run()
    assert driver.num_cached == {"a": 0, "b": 0}
    assert driver.pool.num_cached_free == 0


@pytest.mark.parametrize("num_prompt, num_copies", [(9, 3), (11, 3), (8, 0), (12, 0)])
def test_a_fork_copies_the_tail_once_per_extra_child(num_prompt: int, num_copies: int):
    driver = Driver(make_config(block_size=4, num_blocks=32))
    request = make_request("a", prompt(num_prompt), n=4, temperature=1.0, max_tokens=6)
    driver.add(request)
    first = driver.step()
    assert first is not None
    assert first.q_lens == [num_prompt]  # the prompt is computed once
    assert first.sample_rows == [0, 1, 2, 3]
    assert first.sample_sources == [0] * 4
    num_blocks = -(-num_prompt // 4)
    assert driver.pool.num_used == num_blocks
    second = driver.step()
    assert second is not None
    tail, new = num_blocks, range(num_blocks + 1, num_blocks + 5)
    assert second.copies == [(tail, block) for block in new][:num_copies]
    driver.run()
    assert driver.runner.num_copies == num_copies
    driver.assert_equal_to_solo(request)


def test_a_child_without_a_row_waits_without_blocks_and_finds_the_prompt():
    driver = Driver(make_config(block_size=4, max_num_seqs=2))
    request = make_request("a", prompt(9), n=3, temperature=1.0, max_tokens=2)
    driver.add(request, make_request("b", prompt(2, 200)))
    driver.step()
    assert driver.sequence("a", 2).status is SequenceStatus.WAITING
    assert driver.sequence("a", 2).block_table == []
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert plan.q_lens == [1, 2]  # the child's last prompt token, then "b": started ones go first
    driver.run()
    driver.assert_equal_to_solo(request)


def test_priority_goes_before_arrival():
    driver = Driver(make_config(block_size=4, max_num_seqs=1))
    driver.add(make_request("late", prompt(3), priority=5))
    driver.add(make_request("first", prompt(3, 200), priority=-1))
    driver.add(make_request("second", prompt(3, 300), priority=-1))
    driver.run()
    assert driver.start_order() == ["first", "second", "late"]


def test_the_least_important_is_preempted():
    driver = Driver(make_config(block_size=4, num_blocks=4))
    driver.add(make_request("less", prompt(7), max_tokens=9, priority=1))
    driver.add(make_request("more", prompt(7, 200), max_tokens=9, priority=0))
    driver.run()
    assert driver.num_preemptions == {"less": 1, "more": 0}


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="cannot hold one sequence of max_model_len=17"):
        Scheduler(make_config(block_size=4, num_blocks=4, max_model_len=17))
    with pytest.raises(ValueError, match="max_num_tokens=3 must be at least max_num_seqs=4"):
        Scheduler(make_config(max_num_tokens=3))
