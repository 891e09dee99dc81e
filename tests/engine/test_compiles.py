"""After warm-up nothing compiles, and the counter that says so is honest (B80)."""

import asyncio

import jax
import jax.numpy as jnp
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.compiles import counted_compiles
from helpers.engines import fresh_engine, run_to_end
from helpers.random_requests import EOS_TOKEN_IDS, PROCESSORS, RandomRequest, random_requests
from helpers.requests import make_request

from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.grammar import Vocabulary
from jaxpaged.request import EngineRequest
from jaxpaged.request_maker import FrontModel, RequestMaker
from jaxpaged.runner.buckets import Bucket, make_buckets, pick_bucket
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.step_plan import PromptChunk, StepPlan

VOCABULARY = Vocabulary.of(ByteTokenizer(), ByteTokenizer().vocab_size)


def test_random_requests_compile_nothing(tiny_runner):
    """200 of them, with every option there is."""
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, num_blocks=14, vocabulary=VOCABULARY)
    requests = engine_requests(engine, random_requests(2, 200))
    for processor in PROCESSORS:
        engine.prepare(processor)
    with counted_compiles() as compiles:
        for start in range(0, len(requests), 12):
            run_to_end(engine, requests[start : start + 12])
    stats = engine.stats()
    assert stats.compiles_after_warmup == 0 and compiles == []
    assert stats.preemptions > 0 and stats.steps > 200


def engine_requests(engine: Engine, requests: list[RandomRequest]) -> list[EngineRequest]:
    eos_token_ids = frozenset(EOS_TOKEN_IDS)
    model = FrontModel(
        EngineConfig("tiny"), ByteTokenizer(), SamplingDefaults(), eos_token_ids, engine.vocabulary
    )
    maker = RequestMaker(model, engine.config)

    async def make() -> list[EngineRequest]:
        return [await maker.make(str(i), r.prompt, r.params) for i, r in enumerate(requests)]

    return asyncio.run(make())


def test_both_counts_see_a_compile(tiny_runner):
    executables = tiny_runner("tiny_qwen3")._executables
    before = executables.programs.num_compiles
    with counted_compiles() as compiles:
        executables.copy_blocks(3)
        assert executables.programs.num_compiles == before + 1 and len(compiles) >= 1
        executables.copy_blocks(3)
        assert executables.programs.num_compiles == before + 1
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


def test_accelerators_have_few_sizes_and_more_of_the_large():
    buckets = make_buckets(max_num_seqs=256, max_num_tokens=8192, on_cpu=False)
    decode = [bucket.num_tokens for bucket in buckets if bucket.is_decode]
    prompts = [bucket.num_tokens for bucket in buckets if not bucket.is_decode]
    assert decode == [8, 16, 32, 64, 128, 256] and prompts == [512, 2048, 4096, 8192]


def test_the_scheduler_fills_the_sizes_that_were_compiled(tiny_runner):
    runner = tiny_runner("tiny_qwen3")
    engine = fresh_engine(runner, enable_prefix_caching=False)
    sizes = [bucket.num_tokens for bucket in runner._buckets if not bucket.is_decode]
    assert len(sizes) > 1 and engine.scheduler.config.step_sizes == tuple(sizes)
    small, large = sizes[:2]
    engine.add(make_request("a", [5] * (large // 2 + 1), max_tokens=1))
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.num_tokens == small


def test_a_step_that_scores_a_prompt_is_no_decode_step():
    """A chunk of one token: what the last layer gives is needed, which decode steps drop."""
    buckets = make_buckets(max_num_seqs=8, max_num_tokens=64)
    plan = plan_of(3, 3, num_samples=2)
    assert pick_bucket(buckets, plan).is_decode
    plan.prompt_chunks.append(PromptChunk(2, (5,), 1))
    assert not pick_bucket(buckets, plan).is_decode


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
