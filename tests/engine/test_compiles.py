"""After warm-up nothing compiles, and the counter that says so is honest (B80)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import fresh_engine, run_to_end
from helpers.requests import make_request

from jaxpaged.runner.buckets import Bucket, make_buckets, pick_bucket
from jaxpaged.step_plan import StepPlan

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compiles() -> Iterator[list[str]]:
    """Every compile of this process, counted by JAX itself; one found on disk counts too."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_random_requests_compile_nothing(tiny_runner):
    runner, rng = tiny_runner("tiny_qwen3"), random.Random(2)
    engine = fresh_engine(runner, num_blocks=14)
    with counted_compiles() as compiles:
        for batch in range(12):
            requests = [
                make_request(
                    f"{batch}.{i}",
                    [rng.randrange(3, 300) for _ in range(rng.choice([1, 2, 15, 16, 17, 60, 130]))],
                    max_tokens=rng.randrange(1, 20),
                    temperature=rng.choice([0.0, 0.5, 1.0]),
                    top_k=rng.choice([0, 1, 9]),
                    top_p=rng.choice([1.0, 0.5]),
                    min_p=rng.choice([0.0, 0.1]),
                    n=rng.choice([1, 1, 3, 9]),
                    seed=rng.randrange(2**40),
                )
                for i in range(rng.randrange(1, 13))
            ]
            run_to_end(engine, requests)
    stats = engine.stats()
    assert stats.compiles_after_warmup == 0 and compiles == []
    assert stats.preemptions > 0 and stats.steps > 200


def test_both_counts_see_a_compile(tiny_runner):
    executables = tiny_runner("tiny_qwen3")._executables
    before = executables.num_compiles
    with counted_compiles() as compiles:
        executables.copy_blocks(3)
        assert executables.num_compiles == before + 1 and len(compiles) >= 1
        executables.copy_blocks(3)
        assert executables.num_compiles == before + 1
    with counted_compiles() as compiles:
        jax.jit(lambda x: x * 3 + jnp.float32(before))(jnp.zeros(7)).block_until_ready()
    assert compiles, "a compile outside of the runner shows in JAX's count alone"
    tiny_runner("tiny_qwen3")._num_warm_compiles += 1  # the session's other tests go on


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 10])
@pytest.mark.parametrize("max_num_tokens", [10, 16, 17, 64, 100])
def test_buckets_hold_every_plan(max_num_seqs, max_num_tokens):
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens)
    assert buckets == sorted(set(buckets))
    for num_rows in range(1, max_num_seqs + 1):
        for num_tokens in {num_rows, num_rows + 1, max_num_tokens}:
            if num_rows <= num_tokens <= max_num_tokens:
                plan = plan_of(num_rows, num_tokens, num_samples=max_num_seqs)
                bucket = pick_bucket(buckets, plan)
                assert bucket.num_tokens >= num_tokens and bucket.num_rows >= max_num_seqs
                assert not bucket.is_decode or num_tokens == num_rows


def test_a_plan_that_fits_no_bucket_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="no bucket holds 33 tokens in 2 rows"):
        pick_bucket([Bucket(2, 2), Bucket(32, 2)], plan_of(2, 33, num_samples=2))


def plan_of(num_rows: int, num_tokens: int, *, num_samples: int) -> StepPlan:
    q_lens = [1] * (num_rows - 1) + [num_tokens - num_rows + 1]
    return StepPlan(
        step_id=1,
        rows=list(range(num_rows)),
        q_lens=q_lens,
        kv_lens=q_lens,
        token_ids=[0] * num_tokens,
        sample_sources=[0] * num_samples,
        sample_rows=list(range(num_samples)),
    )
