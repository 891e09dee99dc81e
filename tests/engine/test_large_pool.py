"""B79: block ids whose elements lie past 2^31 in the pool."""

import json
from dataclasses import replace

import pytest
from helpers.engines import fresh_engine, load_runner, run_to_end
from helpers.requests import make_request
from helpers.tiny_models import hf_config
from helpers.wrapped_runner import WrappedRunner

from jaxpaged.runner.runner import StepHandle
from jaxpaged.step_plan import StepPlan


class MirroredRunner(WrappedRunner):
    """Uses the pool from its end: block i is the i-th from the last."""

    def dispatch(self, plan: StepPlan) -> StepHandle:
        end = self.runner.config.num_blocks + 1
        return super().dispatch(
            replace(
                plan,
                table_updates=[(row, i, end - block) for row, i, block in plan.table_updates],
                copies=[(end - source, end - target) for source, target in plan.copies],
            )
        )


def tokens_from_both_ends(folder, **options):
    (folder / "config.json").write_text(
        json.dumps(hf_config(num_hidden_layers=1, num_key_value_heads=1, head_dim=64))
    )
    runner = load_runner(
        str(folder), load_format="random", max_num_seqs=2, max_num_tokens=16, **options
    )
    requests = [
        make_request(f"{i}", range(3, 20 + i), max_tokens=20, temperature=1.0, seed=i, n=2)
        for i in range(2)
    ]
    num_elements = runner.pool.data.size
    # The scheduler sees a small pool, so that the whole one is never walked on the host.
    found = [
        run_to_end(fresh_engine(runner, wrapped=wrapped, num_blocks=16), requests).tokens
        for wrapped in (runner, MirroredRunner(runner))
    ]
    runner.close()
    return num_elements, *found


def test_the_last_blocks_of_a_small_pool(tmp_path):
    _, first, last = tokens_from_both_ends(tmp_path, num_blocks=100)
    assert first == last and len({tuple(tokens) for tokens in first.values()}) == 4


@pytest.mark.long
def test_the_last_blocks_of_a_pool_past_32_bits(tmp_path):
    """Takes 4.3 GB."""
    options = {"num_blocks": 2**20 + 50, "max_model_len": 256, "dtype": "float16"}
    num_elements, first, last = tokens_from_both_ends(tmp_path, **options)
    assert num_elements > 2**31
    assert first == last and len({tuple(tokens) for tokens in first.values()}) == 4
