"""LLM.score: teacher-forced log-probabilities are those that decoding the same tokens told."""

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from helpers.engines import fresh_engine
from helpers.model_fronts import KeptRunner, with_model_front
from helpers.oracle_logprobs import MODEL, TOLERANCE, oracle_logprobs

from jaxpaged import checkpoint
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ContextTooLongError, InvalidFieldError
from jaxpaged.llm import LLM
from jaxpaged.outputs import RequestOutput, Score
from jaxpaged.sampling_params import ChatPrompt, SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.text import load_tokenizer

GREEDY = SamplingParams(max_tokens=24, temperature=0, logprobs=0)
# Float32, one position a step against a whole chunk: measured 5e-6 (tiny) and 2e-5 (SmolLM2).
BOUND = 1e-4
# Of a token that another one took the place of, to see that the bound tells something.
APART = 0.01


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, num_tokens).tolist()


def values(score: Score) -> list[float]:
    assert [entry.token_id for entry in score.logprobs] == score.token_ids
    assert score.cumulative_logprob == pytest.approx(sum(e.logprob for e in score.logprobs))
    return [entry.logprob for entry in score.logprobs]


def largest_difference(output: RequestOutput, score: Score) -> float:
    (completion,) = output.completions
    assert score.prompt_token_ids == output.prompt_token_ids
    assert score.token_ids == completion.token_ids and completion.logprobs is not None
    drawn = [at.chosen for at in completion.logprobs if at.chosen is not None]
    assert [entry.rank for entry in drawn] == [entry.rank for entry in score.logprobs]
    pairs = zip(drawn, values(score), strict=True)
    return max(abs(entry.logprob - value) for entry, value in pairs)


async def generate_and_score(
    llm: AsyncLLM, prompts: Sequence[Any], params: SamplingParams = GREEDY
) -> list[tuple[RequestOutput, Score]]:
    outputs = await asyncio.gather(*(llm.generate(prompt, params) for prompt in prompts))
    calls = [
        llm.score(prompt, output.completions[0].token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return list(zip(outputs, await asyncio.gather(*calls), strict=True))


@pytest.mark.parametrize(
    "changes", [{}, {"overlap": False}, {"max_num_tokens": 16}, {"num_blocks": 14}]
)
def test_scores_are_what_decoding_told(changes: dict[str, Any], tiny_runner):
    """Together, in chunks, preempted; greedy ones of rank 1, drawn ones of any."""
    prompts = [prompt_of(n, n) for n in (1, 2, 15, 16, 17, 70)]
    hot = SamplingParams(max_tokens=24, temperature=1.5, seed=1, logprobs=0)
    for params in (GREEDY, hot):
        pairs = with_model_front(
            tiny_runner(MODEL), lambda llm, p=params: generate_and_score(llm, prompts, p), **changes
        )
        for output, score in pairs:
            assert largest_difference(output, score) < BOUND
            rows = oracle_logprobs([*score.prompt_token_ids, *score.token_ids])
            for i, entry in enumerate(score.logprobs, len(score.prompt_token_ids)):
                assert abs(entry.logprob - rows[i - 1][entry.token_id]) < TOLERANCE
        ranks = {entry.rank for _, score in pairs for entry in score.logprobs}
        assert (ranks == {1}) == (params is GREEDY)


def test_a_token_more_or_less_is_seen(tiny_runner):
    """The control: no neighbour's value would pass for a token's own."""

    async def body(llm: AsyncLLM):
        prompt, completion = prompt_of(20), prompt_of(8, 1)
        right = await llm.score(prompt, completion)
        for other in ([*prompt, 5], prompt[:-1], prompt[1:]):
            pairs = zip(values(right), values(await llm.score(other, completion)), strict=True)
            assert max(abs(a - b) for a, b in pairs) > APART

    with_model_front(tiny_runner(MODEL), body)


def test_texts_are_tokenised_apart(tiny_runner):
    async def body(llm: AsyncLLM):
        chat = ChatPrompt([{"role": "user", "content": "안녕"}])
        for prompt in ("ab", chat, [97, 98]):
            text, ids = (
                await llm.score(prompt, "cd 한"),
                await llm.score(prompt, list("cd 한".encode())),
            )
            assert text == ids and bytes(text.token_ids).decode() == "cd 한"
            assert text.prompt_token_ids == await llm.tokenize(prompt)

    with_model_front(tiny_runner(MODEL), body)


def test_the_whole_context_and_no_more(tiny_runner):
    """Prompt and completion of exactly max_model_len, which no generation could follow."""
    tokens = prompt_of(65)

    async def body(llm: AsyncLLM):
        assert llm.info.max_model_len == 64
        scores = [await llm.score(tokens[:n], tokens[n:64]) for n in (1, 40, 63)]
        for n in (1, 40, 64):
            with pytest.raises(
                ContextTooLongError, match="65 tokens: it must fit max_model_len=64"
            ):
                await llm.score(tokens[:n], tokens[n:])
        return scores

    longest, *others = with_model_front(tiny_runner(MODEL), body, num_blocks=4)
    assert len(longest.logprobs) == 63
    for score in others:
        tail = values(longest)[-len(score.logprobs) :]
        assert values(score) == pytest.approx(tail, abs=BOUND)


@pytest.mark.parametrize(
    ("prompt", "completion", "field", "line"),
    [
        ("ab", "", "completion", "the completion is empty"),
        ([5], [], "completion", "the completion is empty"),
        ("", "ab", "prompt", "the prompt is empty"),
        ([], [5, 6], "prompt", "the prompt is empty"),
        ([5], [300], "prompt", "is 300: ids are 0 to 299"),
    ],
)
def test_refusals(prompt, completion, field, line, tiny_runner):
    async def body(llm: AsyncLLM):
        with pytest.raises(InvalidFieldError, match=line) as error:
            await llm.score(prompt, completion)
        assert error.value.field == field
        assert (await llm.stats()).steps == 0

    with_model_front(tiny_runner(MODEL), body)


def test_the_synchronous_face_and_a_real_model(smollm2_runner):
    """Lists in, lists out; what the model wrote is likelier than what it did not."""
    tokenizer = load_tokenizer(checkpoint.locate("smollm2"))
    engine = fresh_engine(smollm2_runner, wrapped=KeptRunner(smollm2_runner))
    front = AsyncLLM.from_engine(
        EngineConfig("smollm2"), engine, tokenizer, SamplingDefaults(), frozenset({2})
    )
    with patch("jaxpaged.llm.AsyncLLM", lambda model: front), LLM("smollm2") as llm:
        prompts = ["The capital of France is", "안녕하세요, 저는", "def add(a, b):"]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        completions = [output.completions[0].token_ids for output in outputs]
        scores = llm.score(prompts, completions, use_tqdm=False)
        for output, score in zip(outputs, scores, strict=True):
            assert largest_difference(output, score) < BOUND
        (paris,) = llm.score(prompts[0], " Paris", use_tqdm=False)
        (rome,) = llm.score(prompts[0], " Rome", use_tqdm=False)
        assert paris.cumulative_logprob > rome.cumulative_logprob + 1
        (alone,) = llm.score([5, 6], [7, 8], use_tqdm=False)
        assert (alone.prompt_token_ids, alone.token_ids) == ([5, 6], [7, 8])
        with pytest.raises(InvalidFieldError, match="completions has 1 entries for 3 prompts"):
            llm.score(prompts, ["one"], use_tqdm=False)
        with pytest.raises(InvalidFieldError, match="the completion is empty"):
            llm.score(prompts, ["a", "", "b"], use_tqdm=False)
        assert llm.stats().used_blocks == 0
