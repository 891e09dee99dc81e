"""The whole engine over the TPU's kernels (in the interpreter) and over XLA: the same tokens."""

from pathlib import Path
from typing import Any

import pytest
from helpers.engines import Answers, fresh_engine, load_runner, run_to_end
from helpers.requests import make_request

from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidFieldError
from jaxpaged.request import EngineRequest
from jaxpaged.runner.runner import Runner
from jaxpaged.runner.start import resolve_config

MODEL = Path(__file__).parents[1] / "goldens" / "tiny_llama"
# Five sequences of up to 26 tokens want more blocks than there are, so some are preempted.
SIZES = {"num_blocks": 7, "block_size": 8, "max_num_seqs": 4, "max_num_tokens": 16}
PREFIX = [5, 9, 2, 40, 77, 123, 8, 31, 66, 250, 17, 4]


def requests() -> list[EngineRequest]:
    return [
        make_request("first", [*PREFIX, 90, 91, 92, 93, 94, 95], max_tokens=8, ignore_eos=True),
        make_request("shares", [*PREFIX, 12, 13, 14], max_tokens=9, ignore_eos=True),
        make_request(
            "three", [*PREFIX[:9], 200, 201], n=3, max_tokens=9, temperature=1.0, seed=7,
            ignore_eos=True,
        ),
    ]  # fmt: skip


def run(impl: str) -> tuple[Engine, Answers]:
    runner = load_runner(str(MODEL), attention_impl=impl, max_model_len=40, **SIZES)
    engine = fresh_engine(runner)
    answers = run_to_end(engine, requests())
    assert engine.stats().compiles_after_warmup == 0
    return engine, answers


def test_the_same_tokens_as_xla():
    engine, answers = run("tpu_interpret")
    # What makes the comparison worth its time:
    assert engine.stats().preemptions > 0
    assert any(started.num_cached_tokens for started in answers.started.values())
    assert len({tuple(answers.tokens["three", index]) for index in range(3)}) == 3
    assert answers.tokens == run("xla")[1].tokens


def test_a_context_too_long_for_block_tables(tiny_runner, caplog):
    """256 rows of (2**18 - 8192) / 256 - 12 = 980 blocks fill a TPU's scalar memory."""
    runner: Runner = tiny_runner("tiny_llama")
    sizes: dict[str, Any] = {
        "attention_impl": "tpu_interpret",
        "max_num_seqs": 256,
        "max_num_tokens": 8192,
        "block_size": 8,
        "num_blocks": 20_000,
    }
    with pytest.raises(InvalidFieldError, match="lower max_model_len to 7840, or lower max_num_se"):
        config = EngineConfig(str(MODEL), max_model_len=7841, **sizes)
        resolve_config(config, "tiny", runner.weights)
    config = EngineConfig(str(MODEL), max_model_len=7840, **sizes)
    assert resolve_config(config, "tiny", runner.weights).max_model_len == 7840
    sizes["block_size"] = 1
    resolve_config(EngineConfig(str(MODEL), **sizes), "tiny", runner.weights)
    assert "lowered" not in caplog.text
    sizes["max_num_seqs"] = 512
    resolved = resolve_config(EngineConfig(str(MODEL), **sizes), "tiny", runner.weights)
    assert resolved.max_model_len == (2**18 - 8192) // 512 - 12
    assert "max_model_len lowered from 512 to 484: block tables of 512 sequences" in caplog.text
