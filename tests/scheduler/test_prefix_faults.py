"""Faults of prefix caches and block managers that others had (blocks of 16 unless noted)."""

import pytest
from helpers.requests import make_request, prompt
from helpers.scheduler_driver import Driver, make_config, preempt

from jaxpaged.request import FinishReason, SequenceStatus

BLOCK_SIZE = 16


def make_driver(*, overlap: bool = False, **config) -> Driver:
    return Driver(make_config(block_size=BLOCK_SIZE, **config), overlap=overlap)


@pytest.mark.parametrize("num_prompt", [32, 31, 33, 16, 1])
def test_b01_at_least_one_token_of_a_cached_prompt_is_computed(num_prompt: int):
    driver = make_driver()
    driver.add(make_request("before", prompt(48), max_tokens=1))
    driver.run()
    requests = [make_request(f"{i}", prompt(num_prompt), max_tokens=20) for i in range(2)]
    for request in requests:
        driver.add(request)
        driver.run()
        assert driver.num_cached[request.request_id] <= num_prompt - 1
    assert driver.num_cached["0"] == (num_prompt - 1 if num_prompt > 4 else 0)
    driver.assert_equal_to_solo(*requests)


def test_b01_blocks_after_a_full_hit_are_found_again():
    driver = make_driver()
    driver.add(make_request("a", prompt(32), max_tokens=40))
    driver.run()
    again = [*prompt(32), *driver.tokens["a", 0][:33]]
    driver.add(make_request("b", again, max_tokens=2))
    driver.run()
    assert driver.num_cached["b"] == 64


class Collision(int):
    """A token id whose hash is that of all others."""

    def __hash__(self) -> int:
        return 7


def test_b02_equal_hashes_do_not_mix_prompts():
    driver = make_driver()
    requests = [
        make_request(str(start), [Collision(t) for t in prompt(32, start)], max_tokens=3)
        for start in (100, 200, 300)
    ]
    for request in requests:
        driver.add(request)
        driver.run()
    assert driver.num_cached == {"100": 0, "200": 0, "300": 0}
    again = make_request("again", [Collision(t) for t in prompt(32, 200)], max_tokens=3)
    driver.add(again)
    driver.run()
    assert driver.num_cached["again"] == 31
    driver.assert_equal_to_solo(*requests, again)


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_b05_nothing_is_published_before_its_step_is_committed(how: str):
    driver = make_driver()
    a = make_request("a", prompt(48), max_tokens=3)
    driver.add(a)
    plan = driver.scheduler.schedule()
    assert plan is not None
    assert driver.scheduler.kv.cache.published_blocks() == set()
    if how == "abort":
        driver.scheduler.abort("a")
    else:
        preempt(driver.scheduler, driver.sequence("a"))
    driver.scheduler.commit(plan, driver.runner.dispatch(plan))
    driver.scheduler.check_integrity()
    assert driver.scheduler.kv.cache.published_blocks() == set()
    b = make_request("b", prompt(48), max_tokens=3)
    driver.add(b)
    driver.run()
    driver.assert_equal_to_solo(b)


def test_b05_the_other_owner_of_a_key_keeps_it():
    driver = make_driver()
    a = make_request("a", prompt(40), max_tokens=9)
    b = make_request("b", prompt(40), max_tokens=9, use_prefix_cache=False)
    driver.add(a, b)
    driver.step()  # both computed the same two blocks, those of "a" have the keys
    driver.scheduler.abort("b")
    c = make_request("c", prompt(40), max_tokens=9)
    driver.add(c)
    driver.step()
    assert driver.sequence("c").block_table[:2] == driver.sequence("a").block_table[:2]
    driver.run()
    driver.assert_equal_to_solo(a, c)


def test_b05_non_finite_logits_take_the_keys_back():
    driver = Driver(make_config(block_size=4), vocab_size=1, non_finite_token_id=0)
    driver.add(make_request("a", prompt(9)))
    driver.run()
    assert driver.reasons["a", 0] is FinishReason.ERROR
    assert driver.tokens["a", 0] == []
    assert driver.scheduler.kv.cache.published_blocks() == set()


@pytest.mark.parametrize("num_shared", [0, 1, 15, 16, 17, 80])
@pytest.mark.parametrize("num_suffix", [1, 16, 32])
def test_b06_a_hit_computes_as_a_miss(num_shared: int, num_suffix: int):
    driver = make_driver(max_num_tokens=24)
    driver.add(make_request("first", prompt(96), max_tokens=1))
    driver.run()
    request = make_request("a", prompt(num_shared) + prompt(num_suffix, 500), max_tokens=20)
    driver.add(request)
    driver.run()
    copied = num_shared % BLOCK_SIZE
    assert driver.num_cached["a"] == num_shared - (copied if copied < 4 else 0)
    driver.assert_equal_to_solo(request)


@pytest.mark.parametrize("overlap", [False, True])
def test_b10_nothing_stays_in_use(overlap: bool):
    driver = Driver(make_config(block_size=4, num_blocks=8, max_num_tokens=8), overlap=overlap)
    for i in range(12):
        driver.add(make_request(f"{i}", prompt(3 + i, 100 * (i % 3)), n=1 + i % 3, temperature=1.0))
    driver.run()
    assert driver.pool.num_used == 0
    assert not driver.scheduler.kv._copy_sources


def test_b10_a_block_freed_twice_is_noticed():
    pool = make_driver().pool
    taken = pool.allocate()
    assert taken is not None
    pool.release(taken[0], cached=False)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(taken[0], cached=False)


def test_b11_a_hit_without_room_for_the_rest_takes_nothing():
    driver = make_driver(num_blocks=8, max_num_seqs=3)
    holder = make_request("holder", prompt(30, 900), max_tokens=3)
    driver.add(make_request("cached", prompt(64), max_tokens=1))
    driver.run()
    driver.add(holder)
    driver.step()
    before = list(driver.pool.references), driver.pool.cached_free_blocks()
    request = make_request("a", prompt(64) + prompt(48, 500), max_tokens=3)  # needs 4 + 3 blocks
    driver.add(request)
    driver.step()
    assert driver.sequence("a").status is SequenceStatus.WAITING
    assert (list(driver.pool.references), driver.pool.cached_free_blocks()) == before
    driver.run()
    assert driver.num_cached["a"] == 64
    driver.assert_equal_to_solo(holder, request)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_prompt", [16, 17, 24, 31, 32])
def test_b12_forks_do_not_write_into_a_shared_tail(num_prompt: int, overlap: bool):
    driver = make_driver(overlap=overlap)
    request = make_request("a", prompt(num_prompt), n=3, temperature=1.0, seed=5, max_tokens=40)
    driver.add(request)
    driver.run()
    driver.assert_equal_to_solo(request)
    assert driver.runner.num_copies == (2 if num_prompt % BLOCK_SIZE else 0)
    assert len({tuple(driver.tokens["a", i]) for i in range(3)}) == 3


def test_b13_forks_of_a_cached_prompt_leave_its_blocks_alone():
    driver = make_driver()
    driver.add(make_request("first", prompt(32), max_tokens=1))
    driver.run()
    published = driver.scheduler.kv.cache.published_blocks()
    content = {block: list(driver.runner.pool[block]) for block in published}
    request = make_request("a", prompt(32), n=4, temperature=1.0, max_tokens=20)
    driver.add(request)
    driver.run()
    assert driver.num_cached["a"] == 31
    driver.assert_equal_to_solo(request)
    assert {block: driver.runner.pool[block] for block in published} == content


def test_forks_agree_on_keys_when_a_twin_block_was_evicted():
    # "a" computes what block 1 held already and forks while its first chunk is in flight: parent
    # and child then give keys to the same blocks, before and after block 1 was evicted.
    driver = Driver(make_config(block_size=2, num_blocks=8, max_num_tokens=4), overlap=True)
    driver.add(make_request("twin", prompt(3), max_tokens=1))
    driver.run()
    request = make_request(
        "a", prompt(5), n=2, temperature=1.0, max_tokens=8, use_prefix_cache=False
    )
    driver.add(request)
    assert driver.schedule()
    assert driver.schedule()
    driver.commit()
    (twin,) = driver.pool.cached_free_blocks()
    driver.scheduler.kv.cache.forget(twin)
    driver.pool.forget_cached(twin)
    driver.run()
    driver.assert_equal_to_solo(request)


def test_a_reset_forgets_what_is_free_and_spares_what_runs():
    driver = Driver(make_config(block_size=4))
    done, running = make_request("a", prompt(9)), make_request("b", prompt(9, 200), max_tokens=9)
    driver.add(done)
    driver.run()
    driver.add(running)
    driver.step()
    driver.step()
    assert driver.scheduler.kv.reset_cache() == 3
    again = make_request("again", prompt(9), max_tokens=1)
    same = make_request("same", prompt(9, 200), max_tokens=1)
    driver.add(again, same)
    driver.run()
    assert (driver.num_cached["again"], driver.num_cached["same"]) == (0, 0)
    driver.assert_equal_to_solo(done, running, again, same)


def test_after_a_failed_step_everything_ends_and_the_pool_is_new():
    driver = Driver(make_config(block_size=4))
    driver.add(make_request("a", prompt(9), n=2), make_request("b", prompt(9, 200)))
    driver.add(make_request("aborted", prompt(9, 300)))
    driver.step()
    assert driver.scheduler.schedule() is not None
    driver.scheduler.abort("aborted")
    outputs = driver.scheduler.fail_all("lost")
    driver.note(outputs)
    error, cancelled = FinishReason.ERROR, FinishReason.CANCELLED
    assert driver.reasons == {("a", 0): error, ("a", 1): error, ("b", 0): error} | {
        ("aborted", 0): cancelled
    }
    assert {ended.request_id: ended.error for ended in outputs.ended} == {
        "aborted": None,
        "a": "lost",
        "b": "lost",
    }
    driver.scheduler.check_integrity()
    assert driver.pool.num_used == 0
    assert not driver.scheduler.has_work
