"""Steps with prompts fill the sizes that they are padded to."""

import pytest
from helpers.requests import make_request, prompt
from helpers.scheduler_driver import Driver, make_config

from jaxpaged.scheduler.step_size import fill_size
from jaxpaged.step_plan import StepPlan

SIZES = (512, 2048, 8192)


@pytest.mark.parametrize(
    ("num_decodes", "num_wanted", "expected"),
    [
        (0, 1, 512),  # however little there is
        (0, 512, 512),
        (0, 1535, 512),
        (0, 1536, 2048),  # three quarters
        (0, 6143, 2048),
        (0, 6144, 8192),
        (0, 100_000, 8192),
        (256, 344, 512),
        (256, 1279, 512),
        (256, 1280, 2048),
        (384, 1, 512),
        (385, 1, 2048),  # under a quarter of 512 is left to prompts
    ],
)
def test_the_largest_size_that_is_filled_by_three_quarters(num_decodes, num_wanted, expected):
    assert fill_size(SIZES, num_decodes, num_wanted, 8192) == expected


def test_sizes_that_grow_by_two():
    assert fill_size((512, 1024), 256, 344, 8192) == 512
    assert fill_size((512, 1024), 256, 644, 8192) == 1024


@pytest.mark.parametrize(("num_decodes", "limit"), [(0, 10), (9, 10), (15, 15), (100, 300)])
def test_the_limit_of_any_step_holds(num_decodes, limit):
    """It may be below the smallest size, or between two."""
    sizes = (16,) if limit < 16 else (256, 1024)
    assert fill_size(sizes, num_decodes, 5000, limit) == min(limit, sizes[0])


@pytest.mark.parametrize("sizes", [SIZES, (512,), (257,), (300, 8192)])
def test_prompts_always_get_on(sizes):
    """With the sizes of any engine: the largest is the limit, and more than there are rows."""
    for num_decodes in range(257):
        for num_wanted in (1, 100, 1000, 10_000):
            assert fill_size(sizes, num_decodes, num_wanted, sizes[-1]) > num_decodes


def q_lens(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return plan.q_lens


def driver_of(*sizes: int, max_num_seqs: int = 4, num_blocks: int = 64) -> Driver:
    config = make_config(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_tokens=16, step_sizes=sizes
    )
    return Driver(config)


def with_two_decodes(*sizes: int) -> Driver:
    driver = driver_of(*sizes)
    driver.add(make_request("a", prompt(3), max_tokens=20))
    driver.add(make_request("b", prompt(3, 200), max_tokens=20))
    driver.step()
    return driver


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [((), [[1, 1, 9]]), ((8, 16), [[1, 1, 6], [1, 1, 3]])],
    ids=["no sizes", "sizes"],
)
def test_what_is_cut_off_a_prompt_comes_next(sizes, chunks):
    driver = with_two_decodes(*sizes)
    request = make_request("c", prompt(9, 300), max_tokens=4)
    driver.add(request)
    assert [q_lens(driver.step()) for _ in chunks] == chunks
    assert q_lens(driver.step()) == [1, 1, 1]
    driver.run()
    driver.assert_equal_to_solo(request)


def test_the_rest_goes_before_whoever_came_later():
    driver = with_two_decodes(8, 16)
    driver.add(make_request("c", prompt(9, 300)))
    driver.step()
    driver.add(make_request("d", prompt(4, 400)))
    assert q_lens(driver.step()) == [1, 1, 3, 3]  # "d" is cut in its turn
    assert q_lens(driver.step()) == [1, 1, 1, 1]


def test_more_prompts_make_a_larger_step():
    driver = with_two_decodes(8, 16)
    driver.add(make_request("c", prompt(9, 300)), make_request("d", prompt(4, 400)))
    assert q_lens(driver.step()) == [1, 1, 9, 4]


def test_what_is_cached_is_not_counted():
    driver = with_two_decodes(8, 16)
    cached = make_request("first", prompt(9, 300), max_tokens=1)
    driver.add(cached)
    while "first" not in driver.num_preemptions:
        driver.step()
    driver.add(make_request("c", prompt(9, 300)), make_request("d", prompt(7, 400)))
    # Two and 16 tokens would be a large step; 8 of the 16 are cached.
    assert q_lens(driver.step()) == [1, 1, 1, 5]
    driver.run()
    assert driver.num_cached == {"a": 0, "b": 0, "first": 0, "c": 8, "d": 0}


def test_who_waits_for_the_blocks_of_another_is_not_counted():
    """Prompts that begin alike: the first computes what they share, in full steps."""
    driver = driver_of(8, 16, max_num_seqs=6)
    requests = [make_request(f"r{i}", [*prompt(10, 300), i], max_tokens=2) for i in range(3)]
    driver.add(*requests)
    assert q_lens(driver.step()) == [8]
    assert q_lens(driver.step())[0] == 3
    driver.run()
    assert driver.num_cached == {"r0": 0, "r1": 8, "r2": 8}
    for request in requests:
        driver.assert_equal_to_solo(request)


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [({"max_num_seqs": 2}, 4), ({"num_blocks": 8}, 20)],
    ids=["no row", "no blocks"],
)
def test_who_cannot_start_is_not_counted(options, num_tokens):
    driver = driver_of(8, 16, **options)
    driver.add(make_request("a", prompt(3), max_tokens=20))
    driver.step()
    driver.add(make_request("c", prompt(9, 300)), make_request("d", prompt(num_tokens, 400)))
    assert q_lens(driver.step()) == [1, 7]
