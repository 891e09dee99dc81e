"""The whole engine over the TPU's kernels (in the interpreter) and over XLA: the same tokens."""

from pathlib import Path

from helpers.engines import Answers, fresh_engine, load_runner, run_to_end
from helpers.requests import make_request

from jaxpaged.engine import Engine
from jaxpaged.request import EngineRequest

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
