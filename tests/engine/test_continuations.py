"""The whole engine against Hugging Face transformers' greedy continuations (tests/goldens)."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from helpers.engines import Answers, fresh_engine, run_to_end, solo_tokens
from helpers.golden_cases import check_continuation, golden_requests
from helpers.requests import make_request

from jaxpaged.request import FinishReason

TINY_MODELS = ["tiny_llama", "tiny_qwen2", "tiny_qwen3"]
# Changes of the engine that must not change a token, by name.
VARIANTS = {
    "overlapped": {},
    "plain": {"overlap": False},
    "no cache": {"enable_prefix_caching": False},
    "budget of 32": {"max_num_tokens": 32},
    "two rows": {"max_num_seqs": 2},
}
SMALL_POOL_BLOCKS = 12


def check_all(cases: list[dict], answers: Answers) -> None:
    for i, case in enumerate(cases):
        assert answers.reasons[str(i), 0] is FinishReason.MAX_TOKENS
        check_continuation(case, answers.tokens[str(i), 0])


# --- tiny models, every variant ----------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny_models_in_one_batch(model, variant, tiny_runner, goldens):
    cases = goldens(model)
    engine = fresh_engine(tiny_runner(model), **VARIANTS[variant])
    check_all(cases, run_to_end(engine, golden_requests(cases)))
    assert engine.stats().compiles_after_warmup == 0


@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny_models_with_a_warm_cache(model, tiny_runner, goldens):
    cases = goldens(model)
    engine = fresh_engine(tiny_runner(model))
    cold = run_to_end(engine, golden_requests(cases))
    warm = run_to_end(engine, golden_requests(cases))
    check_all(cases, warm)
    for i, case in enumerate(cases):
        cached, prompt_len = warm.started[str(i)].num_cached_tokens, len(case["prompt_token_ids"])
        # All full blocks but for the one that holds the last token, and what a copy saves.
        assert (prompt_len - 1) // 16 * 16 <= cached < prompt_len
    assert sum(started.num_cached_tokens for started in cold.started.values()) == 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny_models_when_preempted(model, overlap, tiny_runner, goldens):
    cases = goldens(model)
    engine = fresh_engine(tiny_runner(model), num_blocks=SMALL_POOL_BLOCKS, overlap=overlap)
    answers = run_to_end(engine, golden_requests(cases))
    check_all(cases, answers)
    assert engine.stats().preemptions > 0
    assert sum(answers.num_preemptions.values()) == engine.stats().preemptions


@pytest.mark.parametrize("model", TINY_MODELS)
def test_tiny_models_one_by_one(model, tiny_runner, goldens):
    runner = tiny_runner(model)
    for case, request in zip(goldens(model), golden_requests(goldens(model)), strict=True):
        check_continuation(case, solo_tokens(runner, request))


def test_a_wrong_token_shows(tiny_runner, goldens):
    case = goldens("tiny_qwen3")[3]
    tokens = list(case["output_token_ids"])
    tokens[4] += 1
    with pytest.raises(AssertionError, match="token 4 is"):
        check_continuation(case, tokens)
    with pytest.raises(AssertionError, match="31 tokens, not 32"):
        check_continuation(case, case["output_token_ids"][:-1])


def test_what_unused_slots_hold_does_not_matter(tiny_runner, goldens):
    """NaN everywhere in the pool at first, in the null block too."""
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")
    engine = fresh_engine(runner)
    runner.pool = replace(runner.pool, data=jnp.full_like(runner.pool.data, jnp.nan))
    check_all(cases, run_to_end(engine, golden_requests(cases)))


# --- n and seeds -------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 32, 40])
@pytest.mark.parametrize("num_blocks", [100, 8], ids=["roomy", "preempting"])
def test_n_seeded_sequences_are_solo_runs(prompt_len, num_blocks, tiny_runner, goldens):
    runner = tiny_runner("tiny_qwen3")
    prompt = goldens("tiny_qwen3")[-1]["prompt_token_ids"][:prompt_len]
    seed = 2**63 - 2  # the third one wraps
    options = {"max_tokens": 24, "temperature": 1.0, "top_p": 0.95}
    engine = fresh_engine(runner, num_blocks=num_blocks)
    together = run_to_end(engine, [make_request("r", prompt, n=3, seed=seed, **options)])
    seeds = [seed, seed + 1, -(2**63)]
    for i, of_sequence in enumerate(seeds):
        solo = solo_tokens(runner, make_request("s", prompt, seed=of_sequence, **options))
        assert together.tokens["r", i] == solo
    assert len({tuple(tokens) for tokens in together.tokens.values()}) == 3


def test_greedy_sequences_are_copies(tiny_runner, goldens):
    case = goldens("tiny_qwen3")[4]
    answers = run_to_end(fresh_engine(tiny_runner("tiny_qwen3")), golden_requests([case], n=4))
    for i in range(4):
        check_continuation(case, answers.tokens["0", i])


def test_a_seeded_row_does_not_see_its_neighbours(tiny_runner, goldens):
    runner, cases = tiny_runner("tiny_qwen3"), goldens("tiny_qwen3")
    options = {"max_tokens": 16, "temperature": 1.0, "seed": 7}
    request = make_request("mine", cases[4]["prompt_token_ids"], **options)
    expected = solo_tokens(runner, request)
    for num_before in (1, 3, 7):
        neighbours = [
            make_request(f"{i}", case["prompt_token_ids"], max_tokens=20, temperature=2.0, seed=i)
            for i, case in enumerate(cases[:num_before])
        ]
        answers = run_to_end(fresh_engine(runner), [*neighbours, request])
        assert answers.tokens["mine", 0] == expected
    other = replace(request, params=replace(request.params, seed=7 + 2**32))
    assert solo_tokens(runner, other) != expected, "only the low word of the seed counts"


# --- SmolLM2 -----------------------------------------------------------------------------------


def test_smollm2_in_one_batch_then_with_a_warm_cache(smollm2_runner, goldens):
    cases = goldens("smollm2")
    assert len(cases) >= 20 and max(len(case["prompt_token_ids"]) for case in cases) == 600
    engine = fresh_engine(smollm2_runner)
    check_all(cases, run_to_end(engine, golden_requests(cases)))
    few = cases[-8:]
    warm = run_to_end(engine, golden_requests(few))
    check_all(few, warm)
    assert sum(started.num_cached_tokens for started in warm.started.values()) > 1000
    assert engine.stats().compiles_after_warmup == 0


SHORT_CASES = slice(6, 14)  # 15 to 48 tokens


@pytest.mark.parametrize("variant", ["plain", "budget of 32"])
def test_smollm2_variants(variant, smollm2_runner, goldens):
    cases = goldens("smollm2")[SHORT_CASES]
    engine = fresh_engine(smollm2_runner, **VARIANTS[variant])
    check_all(cases, run_to_end(engine, golden_requests(cases)))


def test_smollm2_when_preempted(smollm2_runner, goldens):
    cases = goldens("smollm2")[SHORT_CASES]
    engine = fresh_engine(smollm2_runner, num_blocks=SMALL_POOL_BLOCKS)
    check_all(cases, run_to_end(engine, golden_requests(cases)))
    assert engine.stats().preemptions > 0


def test_smollm2_n_seeded_sequences_are_solo_runs(smollm2_runner, goldens):
    prompt = goldens("smollm2")[1]["prompt_token_ids"]
    options = {"max_tokens": 12, "temperature": 1.0}
    engine = fresh_engine(smollm2_runner)
    together = run_to_end(engine, [make_request("r", prompt, n=3, seed=11, **options)])
    for i in range(3):
        solo = solo_tokens(smollm2_runner, make_request("s", prompt, seed=11 + i, **options))
        assert together.tokens["r", i] == solo


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_smollm2_every_prompt_in_every_variant(variant, smollm2_runner, goldens):
    cases = goldens("smollm2")
    engine = fresh_engine(smollm2_runner, **VARIANTS[variant])
    check_all(cases, run_to_end(engine, golden_requests(cases)))
    check_all(cases, run_to_end(engine, golden_requests(cases)))


@pytest.mark.long
def test_smollm2_every_prompt_when_preempted(smollm2_runner, goldens):
    cases = goldens("smollm2")
    engine = fresh_engine(smollm2_runner, num_blocks=43)
    check_all(cases, run_to_end(engine, golden_requests(cases)))
    assert engine.stats().preemptions > 0


@pytest.mark.long
def test_smollm2_one_by_one(smollm2_runner, goldens):
    cases = goldens("smollm2")
    for case, request in zip(cases, golden_requests(cases), strict=True):
        check_continuation(case, solo_tokens(smollm2_runner, request))
