"""Scheduling a step before the tokens of the one before are known."""

from helpers.requests import make_request, prompt
from helpers.scheduler_driver import Driver, make_config

from jaxpaged.request import SequenceStatus


def test_overlap_predicts_the_end_by_max_tokens():
    driver = Driver(make_config(block_size=4), overlap=True)
    request = make_request("a", prompt(3), max_tokens=3)
    driver.add(request)
    driver.run()
    assert [plan.kv_lens for plan in driver.plans] == [[3], [4], [5]]
    driver.assert_equal_to_solo(request)


def test_overlap_predicts_the_end_by_context():
    driver = Driver(make_config(block_size=4, max_model_len=6), overlap=True)
    request = make_request("a", prompt(3), max_tokens=30)
    driver.add(request)
    driver.run()
    assert [plan.kv_lens for plan in driver.plans] == [[3], [4], [5]]
    driver.assert_equal_to_solo(request)


def test_overlap_drops_the_token_after_an_end():
    request = make_request("a", prompt(3), max_tokens=8, stop_token_ids=range(7))
    driver = Driver(make_config(block_size=4), overlap=True)
    driver.add(request)
    driver.run()
    assert [plan.kv_lens for plan in driver.plans] == [[3], [4]]
    assert len(driver.tokens["a", 0]) == 1
    driver.assert_equal_to_solo(request)


def test_a_token_that_may_be_surplus_never_preempts():
    driver = Driver(make_config(block_size=4, num_blocks=4), overlap=True)
    a = make_request("a", prompt(7), max_tokens=9)
    b = make_request("b", prompt(7, 200), max_tokens=9)
    driver.add(a, b)
    assert driver.schedule() and driver.schedule()
    # Both need a third block for a token that their pending one may make superfluous.
    assert driver.schedule() is None
    assert driver.sequence("b").status is SequenceStatus.RUNNING
    driver.commit()
    driver.commit()
    plan = driver.schedule()
    assert plan is not None
    assert plan.rows == [0]
    assert driver.sequence("b").status is SequenceStatus.WAITING
    driver.run()
    driver.assert_equal_to_solo(a, b)
