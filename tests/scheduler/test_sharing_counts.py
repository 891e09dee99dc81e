"""What sharing saves, and what paging wastes: the counts that the project promises."""

import random

import pytest
from helpers.requests import make_request, prompt
from helpers.scheduler_driver import Driver, make_config

from jaxpaged.scheduler.pool_stats import block_states, used_slots

BLOCK_SIZE = 16


def peak_blocks(*requests, enable_prefix_caching: bool) -> int:
    config = make_config(
        block_size=BLOCK_SIZE,
        num_blocks=256,
        max_num_tokens=4096,
        enable_prefix_caching=enable_prefix_caching,
    )
    driver = Driver(config)
    driver.add(*requests)
    driver.run()
    return driver.peak_used_blocks


def test_parallel_sampling_takes_less_than_separate_requests():
    shared = peak_blocks(
        make_request("a", prompt(512), n=4, temperature=1.0, max_tokens=128),
        enable_prefix_caching=True,
    )
    separate = peak_blocks(
        *(make_request(str(i), prompt(512), seed=i, max_tokens=128) for i in range(4)),
        enable_prefix_caching=False,
    )
    assert separate == 4 * (512 + 128) // BLOCK_SIZE
    assert shared <= 0.45 * separate, f"{shared} of {separate} blocks"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_num_tokens", [256, 8192])
def test_a_system_prompt_is_computed_once_for_users_who_arrive_together(
    max_num_tokens: int, overlap: bool
):
    config = make_config(
        block_size=BLOCK_SIZE,
        num_blocks=1024,
        max_num_seqs=64,
        max_num_tokens=max_num_tokens,
    )
    driver = Driver(config, overlap=overlap)
    requests = [
        make_request(str(i), prompt(1024) + prompt(20, 5000 + 100 * i), max_tokens=1)
        for i in range(64)
    ]
    driver.add(*requests)
    driver.run()
    computed = driver.runner.num_computed_tokens - 64 * 20
    assert 1024 <= computed <= 1.1 * 1024
    driver.assert_equal_to_solo(requests[0], requests[63])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_requests", [3, 64])
def test_a_prefix_of_half_a_block_is_computed_once(num_requests: int, overlap: bool):
    config = make_config(
        block_size=BLOCK_SIZE, num_blocks=256, max_num_seqs=64, max_num_tokens=2048
    )
    driver = Driver(config, overlap=overlap)
    requests = [
        make_request(str(i), prompt(8) + prompt(12, 1000 + 100 * i), max_tokens=1)
        for i in range(num_requests)
    ]
    driver.add(*requests)
    driver.run()
    assert driver.runner.num_computed_tokens == 8 + 12 * num_requests
    assert driver.runner.num_copies == num_requests - 1
    driver.assert_equal_to_solo(*requests[:3])


def test_waste_is_under_four_percent_and_less_than_a_block_a_sequence():
    rng = random.Random(7)
    config = make_config(block_size=BLOCK_SIZE, num_blocks=600, max_num_seqs=16, max_num_tokens=512)
    driver = Driver(config)
    for i in range(16):
        start, length = 1000 * i, rng.randint(128, 512)
        driver.add(make_request(str(i), prompt(length, start), max_tokens=64))
    wastes = []
    while driver.scheduler.has_work:
        driver.step()
        running = driver.scheduler.roster.running
        used = [sequence.num_scheduled_total for sequence in running]
        unused = [
            len(sequence.block_table) * BLOCK_SIZE - num_tokens
            for sequence, num_tokens in zip(running, used, strict=True)
        ]
        assert all(0 <= slots < BLOCK_SIZE for slots in unused)
        if running and sum(used) / len(running) >= 256:
            wastes.append(sum(unused) / (sum(used) + sum(unused)))
    assert len(wastes) > 20
    assert sum(wastes) / len(wastes) < 0.04


def test_a_shared_block_counts_once_in_the_pool_picture():
    driver = Driver(make_config(block_size=4, num_blocks=6))
    driver.add(make_request("a", prompt(6), n=2, temperature=1.0))
    driver.step()
    roster = driver.scheduler.roster
    assert used_slots(roster, 4) == {1: 4, 2: 2}
    states = block_states(roster, 4)
    assert [state.references for state in states] == [0, 2, 2, 0, 0, 0, 0]
    assert [state.used_slots for state in states] == [0, 4, 2, 0, 0, 0, 0]
    assert [block for block, state in enumerate(states) if state.cached] == [1]
    driver.step()
    assert used_slots(roster, 4) == {1: 4, 2: 3, 3: 3}  # one of the two copied the tail
