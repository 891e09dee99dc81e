"""Beam searches in the scheduler: the hypotheses are those of the search alone, whatever happens.

The model is the fake runner's, which reads every prefix back through block tables: a wrong fork,
copy or token changes the hypotheses, or fails at once.
"""

from collections.abc import Callable

import pytest
from helpers.requests import make_beam_request, make_request, prompt
from helpers.scheduler_driver import Driver, expected_beams, make_config, preempt

from jaxpaged.request import EngineRequest, FinishReason, Sequence

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
CACHE = pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
MAX_STEPS = 500


def some_requests() -> list[EngineRequest]:
    """Searches that end in every way, between ordinary requests; all fit 16 tokens."""
    long, short = prompt(9), prompt(3, start=200)
    return [
        make_beam_request("wide", long, beam_width=4, max_tokens=6),
        make_request("plain", long[:6], max_tokens=8, temperature=1.0, seed=3, n=2),
        make_beam_request(
            "ends", short, beam_width=3, max_tokens=7, eos_token_ids=(5,), stop_token_ids=(0,)
        ),
        make_request("scored", [*short, 5, 6, 7], max_tokens=4, prompt_logprobs=1),
        make_beam_request(
            "short", long[:8], beam_width=2, length_penalty=-1.0, max_tokens=7, eos_token_ids=(2, 3)
        ),
        make_beam_request("narrow", short[:1], beam_width=1, max_tokens=9),
        make_beam_request("context", long[:5], beam_width=2, max_tokens=64),
    ]


def make_driver(
    *,
    overlap: bool = False,
    caching: bool = True,
    non_finite_token_id: int | None = None,
    **settings,
) -> Driver:
    settings = {"num_blocks": 16, "max_model_len": 16, "enable_prefix_caching": caching} | settings
    config = make_config(**settings)
    return Driver(config, overlap=overlap, non_finite_token_id=non_finite_token_id)


def run_steps(driver: Driver, after_step: Callable[[int], object] = lambda num_steps: None) -> None:
    """To the end, which must come, with a check of everything after each step."""
    for num_steps in range(1, MAX_STEPS):
        if not (driver.scheduler.has_work or driver.in_flight):
            break
        driver.step()
        driver.scheduler.check_integrity()
        after_step(num_steps)
        driver.scheduler.check_integrity()
    driver.run(max_steps=1)
    assert driver.pool.num_used == 0


def test_the_requests_end_in_every_way():
    reasons = {
        reason
        for request in some_requests()
        if request.params.beam
        for _, reason, _ in expected_beams(request, 16)
    }
    assert reasons == {
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.MAX_TOKENS,
        FinishReason.CONTEXT_LENGTH,
    }


@OVERLAP
@CACHE
@pytest.mark.parametrize("num_blocks", [4, 16])
@pytest.mark.parametrize("request_", some_requests(), ids=lambda request: request.request_id)
def test_a_request_alone(request_, num_blocks, caching, overlap):
    driver = make_driver(overlap=overlap, caching=caching, num_blocks=num_blocks)
    driver.add(request_)
    run_steps(driver)
    driver.assert_equal_to_solo(request_)


@OVERLAP
@CACHE
@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 9])
@pytest.mark.parametrize("num_blocks", [4, 5, 7, 16])
def test_all_together(num_blocks, max_num_seqs, caching, overlap):
    """With few rows a search is as wide as the batch, and others want the rows too."""
    driver = make_driver(
        overlap=overlap, caching=caching, num_blocks=num_blocks, max_num_seqs=max_num_seqs
    )
    driver.add(*some_requests())
    run_steps(driver)
    driver.assert_equal_to_solo(*some_requests())


@OVERLAP
@pytest.mark.parametrize("block_size", [1, 3])
def test_other_block_sizes_and_prompts_in_chunks(block_size, overlap):
    num_blocks = -(-16 // block_size) + 2
    driver = make_driver(
        overlap=overlap, block_size=block_size, num_blocks=num_blocks, max_num_tokens=4
    )
    driver.add(*some_requests())
    run_steps(driver)
    driver.assert_equal_to_solo(*some_requests())


# --- interrupted -------------------------------------------------------------------------------


def state_of(beam: Sequence) -> str:
    if beam.awaits_selection:
        return "told"
    if beam.num_pending_tokens:
        return "drawing"
    return "computing again" if beam.num_output_tokens else "in its prompt"


@OVERLAP
@CACHE
def test_preempted_in_every_state(caching, overlap):
    """Every beam in turn, after every step in turn."""
    request, states = make_beam_request("a", prompt(6), beam_width=3, max_tokens=6), set()

    def preempt_running(which: int) -> bool:
        running = [s for s in driver.scheduler.roster.running if s.request.is_beam_search]
        if which < len(running):
            states.add(state_of(running[which]))
            preempt(driver.scheduler, running[which])
        return which < len(running)

    for at in range(1, 14):
        for which in range(3):
            driver = make_driver(overlap=overlap, caching=caching, max_num_tokens=4)
            driver.add(request, make_request("other", prompt(5, start=50), max_tokens=9))
            # Again in the next step: then it computes what it lost.
            run_steps(
                driver, lambda step, at=at, i=which: step in (at, at + 1) and preempt_running(i)
            )
            driver.assert_equal_to_solo(request)
    assert states >= {"told", "in its prompt", "drawing" if overlap else "computing again"}


@OVERLAP
@pytest.mark.parametrize("every", [1, 2, 3])
def test_all_preempted_again_and_again(every, overlap):
    driver = make_driver(overlap=overlap)
    driver.add(*some_requests())

    def preempt_all(step: int) -> None:
        if step % (every + 1) == 0 and step < 60:
            for sequence in list(driver.scheduler.roster.running):
                preempt(driver.scheduler, sequence)

    run_steps(driver, preempt_all)
    driver.assert_equal_to_solo(*some_requests())


@OVERLAP
@pytest.mark.parametrize("num_blocks", [5, 16])
def test_aborted_at_any_step(num_blocks, overlap):
    others = [r for r in some_requests() if r.request_id != "wide"]
    ends = {"aborted": 0, "before": 0}
    for at in range(1, 40, 2):
        driver = make_driver(overlap=overlap, num_blocks=num_blocks)
        driver.add(*some_requests())
        aborted: list[bool] = []
        run_steps(
            driver,
            lambda step, at=at, to=aborted, driver=driver: (
                step == at and to.append(driver.scheduler.abort("wide"))
            ),
        )
        driver.assert_equal_to_solo(*others)
        assert "wide" in driver.num_preemptions, "its end was told"
        if aborted == [True]:
            assert driver.answers("wide") == []
        ends["aborted" if aborted == [True] else "before"] += 1
    assert all(ends.values()), ends


NON_FINITE = 0


def fails_within(max_tokens: int, start: int) -> bool:
    """Whether that search meets bad logits; `start` says which prompt it has."""
    request = make_beam_request("", prompt(6, start), beam_width=3, max_tokens=max_tokens)
    answers = expected_beams(request, 16, non_finite_token_id=NON_FINITE)
    return answers[0][1] is FinishReason.ERROR


@OVERLAP
def test_non_finite_logits_fail_one_search_alone(overlap):
    """Bad logits in a step of several beams; what the search left in the cache is right."""
    starts = range(0, 10_000, 10)
    bad = next(i for i in starts if fails_within(4, i) and not fails_within(2, i))
    good = [i for i in starts if not fails_within(4, i)][:2]
    requests = [
        make_beam_request(f"{i}", prompt(6, i), beam_width=3, max_tokens=4)
        for i in (good[0], bad, good[1])
    ]
    driver = make_driver(overlap=overlap, max_num_seqs=9, non_finite_token_id=NON_FINITE)
    driver.add(*requests)
    run_steps(driver)
    assert driver.answers(f"{bad}") == [([], FinishReason.ERROR, None)]
    again = make_beam_request("again", prompt(6, bad), beam_width=3, max_tokens=2)
    driver.add(again)
    run_steps(driver)
    driver.assert_equal_to_solo(requests[0], requests[2], again)


@OVERLAP
@pytest.mark.parametrize("num_blocks", [5, 16])
def test_the_cache_is_reset_in_between(num_blocks, overlap):
    driver = make_driver(overlap=overlap, num_blocks=num_blocks)
    driver.add(*some_requests())
    run_steps(driver, lambda step: step % 3 or driver.scheduler.kv.reset_cache())
    driver.assert_equal_to_solo(*some_requests())


@OVERLAP
@pytest.mark.parametrize("at", range(1, 8))
def test_a_failed_step(at, overlap):
    driver = make_driver(overlap=overlap)
    search = make_beam_request("a", prompt(6), beam_width=3, max_tokens=8)
    driver.add(search)
    for _ in range(at):
        driver.step()
    driver.schedule()  # its tokens never come
    driver.in_flight.clear()
    outputs = driver.scheduler.fail_all("boom")
    assert outputs.sequences == [] and [e.error for e in outputs.ended] == ["boom"]
    driver.scheduler.check_integrity()
    assert not driver.scheduler.has_work and driver.pool.num_used == 0
    driver.num_cached.clear()
    driver.add(search)
    run_steps(driver)
    driver.assert_equal_to_solo(search)
