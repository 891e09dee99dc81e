"""Random operations: the invariants hold after each one, and tokens are those of solo runs."""

import pytest
from helpers.scheduler_world import NUM_OPERATIONS, random_world

NUM_WORLDS = 240
WORLDS_PER_TEST = 20
# Seeds that found faults once, of ten thousands.
SEEDS_TO_KEEP = [111347]


def test_at_least_ten_thousand_operations():
    assert NUM_WORLDS * NUM_OPERATIONS >= 10_000
    assert NUM_WORLDS % WORLDS_PER_TEST == 0


@pytest.mark.parametrize("first_seed", range(0, NUM_WORLDS, WORLDS_PER_TEST))
def test_random_operations(first_seed: int):
    for seed in range(first_seed, first_seed + WORLDS_PER_TEST):
        assert random_world(seed).num_operations == NUM_OPERATIONS


@pytest.mark.parametrize("seed", SEEDS_TO_KEEP)
def test_worlds_that_found_faults(seed: int):
    random_world(seed)
