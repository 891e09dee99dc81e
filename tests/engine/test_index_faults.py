"""B77: every index that the device sees is in range, whatever happens to the blocks."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import fresh_engine, run_to_end
from helpers.golden_cases import golden_requests
from helpers.requests import make_request
from helpers.wrapped_runner import WrappedRunner

from jaxpaged.runner.buckets import pick_bucket
from jaxpaged.runner.inputs import StepLayout
from jaxpaged.runner.runner import Runner
from jaxpaged.runner.step import _place_tokens
from jaxpaged.step_plan import StepPlan
from kernels_pallas.checks import check_values


class ReadingRunner(WrappedRunner):
    """Reads the block tables back after each step, and checks what attention got.

    Args:
      spoil: changes the tables that were read.
    """

    def __init__(self, runner: Runner, spoil: Any = None):
        super().__init__(runner)
        self._spoil = spoil
        self.num_padded_rows = self.num_copies = self.num_steps = 0

    def dispatch(self, plan: StepPlan) -> Any:
        handle = super().dispatch(plan)
        self._check(plan)
        return handle

    def _check(self, plan: StepPlan) -> None:
        runner, config = self.runner, self.runner.config
        bucket = pick_bucket(runner._buckets, plan)
        packed = runner._packer.pack(plan, bucket, [])
        parts = StepLayout.of(bucket, config.block_size).split(packed)
        # A copy: the next step takes the state's memory.
        tables = np.array(runner._state.block_tables)
        assert not tables[-1].any(), "the null row has a block"
        if self._spoil is not None:
            self._spoil(tables)
        metadata, positions, row_of_token = _place_tokens(
            jnp.asarray(tables[parts["rows"]]),
            jnp.asarray(parts["q_lens"]),
            jnp.asarray(parts["kv_lens"]),
            bucket.num_tokens,
            jnp.asarray(parts["num_decode_rows"][0]),
            config.block_size,
        )
        check_values(metadata, num_blocks=config.num_blocks, block_size=config.block_size)
        assert positions.min() >= 0 and positions.max() < config.max_model_len
        assert row_of_token.min() >= 0 and row_of_token.max() < bucket.num_rows
        self.num_padded_rows += bucket.num_rows - len(plan.rows)
        self.num_copies += len(plan.copies)
        self.num_steps += 1


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
def test_every_index_is_in_range(overlap, tiny_runner, goldens):
    """Shared prefixes, forks, preemption and reused rows, in a pool of a few blocks."""
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")
    reading = ReadingRunner(runner)
    engine = fresh_engine(runner, wrapped=reading, overlap=overlap, num_blocks=12)
    forked = [
        make_request(f"f{i}", case["prompt_token_ids"], n=3, temperature=1.0, seed=i, max_tokens=24)
        for i, case in enumerate(cases[:9])
    ]
    few = golden_requests(cases[4:6])
    for requests in ([*golden_requests(cases), *forked], few, few):
        # A step that raises, as the checks do, ends requests.
        assert not any(run_to_end(engine, requests).errors.values())
    stats = engine.stats()
    assert stats.preemptions and stats.cached_prompt_tokens
    assert reading.num_padded_rows and reading.num_copies and reading.num_steps > 100


def last_used_block_becomes(block: int):
    def spoil(tables: np.ndarray) -> None:
        tables[tables == tables.max()] = block

    return spoil


@pytest.mark.parametrize("block", [-1, 0, 101, 2**31 - 1])
def test_a_wrong_index_shows(block, tiny_runner, goldens):
    runner = tiny_runner("tiny_qwen3")
    reading = ReadingRunner(runner, last_used_block_becomes(block))
    engine = fresh_engine(runner, wrapped=reading)
    with pytest.raises(ValueError, match=r"block ids|reads the null block"):
        reading.dispatch(_first_plan(engine, goldens("tiny_qwen3")[4]))


def _first_plan(engine: Any, case: dict[str, Any]) -> StepPlan:
    (request,) = golden_requests([case])
    engine.add(replace(request, request_id="first"))
    plan = engine.scheduler.schedule()
    assert plan is not None
    return plan
