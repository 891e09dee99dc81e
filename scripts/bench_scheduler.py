#!/usr/bin/env python3
"""Times the host's share of a step: schedule, pack and commit, without a model.

    scripts/bench_scheduler.py [--quick] [--json FILE]

Prints microseconds a step for a full batch of decoding sequences, in a small and a huge pool (block
operations are O(1): the figures must agree), and the cost of a warm prefix hit.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import EngineRequest
from jaxpaged.runner.buckets import make_buckets, pick_bucket
from jaxpaged.runner.pack import Packer
from jaxpaged.sampling_params import ResolvedParams
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.step_plan import StepPlan, StepResult

BLOCK_SIZE = 16
# So few that 256 sequences of up to 24 prompt tokens stay in 1,000 blocks: then come new ones.
STEPS_A_ROUND = 30
PARAMS = ResolvedParams(max_tokens=100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the host's share of a step.")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", help="write the figures there, too")
    options = parser.parse_args()
    num_steps = 200 if options.quick else 1000
    figures: dict[str, float] = {}
    print(f"{'256 decoding sequences, us a step':40} schedule     pack   commit    total")
    for num_blocks in (1_000, 1_000_000):
        parts = decode_step_us(num_blocks, num_steps)
        total = sum(parts)
        print(
            f"  {num_blocks:>9,} blocks" + " " * 21, *(f"{part:8.0f}" for part in (*parts, total))
        )
        figures[f"step_us_{num_blocks}"] = total
    figures["prefix_hit_us_per_1000_tokens"] = prefix_hit_us(20 if options.quick else 100)
    print(f"warm prefix hit: {figures['prefix_hit_us_per_1000_tokens']:.0f} us per 1000 tokens")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


def decode_step_us(num_blocks: int, num_steps: int) -> tuple[float, float, float]:
    """Median microseconds of schedule, pack and commit for 256 decoding sequences."""
    num_seqs, rng = 256, random.Random(0)
    scheduler = _scheduler(num_blocks, num_seqs, max_model_len=8192)
    buckets = make_buckets(max_num_seqs=num_seqs, max_num_tokens=8192)
    packer = Packer(buckets, max_num_seqs=num_seqs, block_size=BLOCK_SIZE)
    times: list[tuple[float, float, float]] = []
    while len(times) < num_steps:
        for i in range(num_seqs):
            # Lengths differ, so that every step has some rows that need a block.
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(8, 24))]
            scheduler.add(EngineRequest(str(i), tuple(prompt), PARAMS, frozenset({2})))
        for _ in range(STEPS_A_ROUND):
            plan, schedule_us = _timed(scheduler.schedule)
            assert plan is not None
            _, pack_us = _timed(lambda plan=plan: _pack(packer, buckets, plan))
            result = _result(plan, rng)
            _, commit_us = _timed(lambda plan=plan, result=result: scheduler.commit(plan, result))
            if plan.num_decode_rows == num_seqs:
                times.append((schedule_us, pack_us, commit_us))
        for i in range(num_seqs):
            scheduler.abort(str(i))
        scheduler.take_outputs()
    assert not scheduler.roster.num_preemptions, "the pool is too small for a round"
    schedule, pack, commit = (statistics.median(column) for column in zip(*times, strict=True))
    return schedule, pack, commit


def prefix_hit_us(num_hits: int) -> float:
    """Median microseconds that 1000 cached tokens add to the admission of a request."""
    rng = random.Random(0)
    scheduler = _scheduler(100_000, 256, max_model_len=8192)
    shared = [rng.randrange(1000) for _ in range(4000)]
    scheduler.add(EngineRequest("first", tuple(shared), PARAMS, frozenset()))
    _run_one(scheduler, rng)

    def admit(prompt: list[int]) -> float:
        scheduler.add(EngineRequest("next", tuple(prompt), PARAMS, frozenset()))
        plan, us = _timed(scheduler.schedule)
        assert plan is not None
        scheduler.commit(plan, _result(plan, rng))
        scheduler.abort("next")
        scheduler.take_outputs()
        return us

    hits = [admit([*shared, i]) for i in range(num_hits)]
    misses = [admit([1001 + i]) for i in range(num_hits)]
    return (statistics.median(hits) - statistics.median(misses)) / 4


def _run_one(scheduler: Scheduler, rng: random.Random) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, _result(plan, rng))
    scheduler.abort("first")
    scheduler.take_outputs()


def _scheduler(num_blocks: int, num_seqs: int, max_model_len: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=num_seqs,
            max_num_tokens=8192,
            max_model_len=max_model_len,
            step_sizes=(512, 2048, 8192),
        )
    )


def _pack(packer: Packer, buckets: list, plan: StepPlan) -> None:
    packer.start_rows(plan.starts)
    bucket = pick_bucket(buckets, plan)
    packer.variant(plan)
    packer.pack(plan, bucket, plan.table_updates[: bucket.num_rows])


def _result(plan: StepPlan, rng: random.Random) -> StepResult:
    num_samples = len(plan.sample_rows)
    tokens = [rng.randrange(3, 1000) for _ in range(num_samples)]
    return StepResult(tokens, [True] * num_samples)


def _timed[T](call: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    main()
