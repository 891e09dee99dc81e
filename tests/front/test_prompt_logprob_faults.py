"""Faults of the prompt's log-probabilities that others had; the values are the NumPy model's."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front
from helpers.oracle_logprobs import MODEL, check_output, check_prompt
from helpers.scheduler_driver import preempt

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.engine import Engine
from jaxpaged.errors import ContextTooLongError, InvalidFieldError
from jaxpaged.outputs import Delta, PromptLogprobs
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams

VOCAB_SIZE = 300
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


@pytest.mark.parametrize("k", [0, 1, 20])
def test_prompt_logprobs_and_the_cache(k: int, tiny_runner):
    """B07: such a request does not read the cache, and fills it all the same."""
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=k)
    plain = replace(params, prompt_logprobs=None)

    async def body(llm: AsyncLLM):
        for num_prompt in (31, 33, 16, 1):
            prompt = prompt_of(num_prompt, num_prompt)
            outputs = [await llm.generate(prompt, params) for _ in range(2)]
            outputs += [await llm.generate(prompt, replace(plain, prompt_logprobs=k))]
            for output in outputs:
                assert output.usage.cached_prompt_tokens == 0
                check_prompt(output.prompt_logprobs or [], prompt, k)
            cached = await llm.generate(prompt, plain)
            assert cached.prompt_logprobs is None
            assert cached.usage.cached_prompt_tokens == (num_prompt - 1 if num_prompt > 4 else 0)
            assert len({tuple(tokens_of(output)) for output in [*outputs, cached]}) == 1

    with_model_front(tiny_runner(MODEL), body)


@OVERLAP
def test_every_chunk_of_a_prompt_is_told(overlap: bool, tiny_runner):
    """B08: three chunks, after and beside a request with a longer prompt."""
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    long, short = prompt_of(90, 1), prompt_of(40, 2)

    async def body(llm: AsyncLLM):
        outputs = [await llm.generate(long, params), await llm.generate(short, params)]
        return outputs + list(
            await asyncio.gather(llm.generate(long, params), llm.generate(short, params))
        )

    outputs = with_model_front(tiny_runner(MODEL), body, max_num_tokens=16, overlap=overlap)
    for output, prompt in zip(outputs, [long, short] * 2, strict=True):
        check_prompt(output.prompt_logprobs or [], prompt, 1)


@OVERLAP
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_prompt_logprobs_of_a_preempted_prompt(step: int, overlap: bool, tiny_runner):
    """B21: preempted between two chunks, or once the last one was scheduled."""
    prompt = prompt_of(70)

    def interrupt(engine: Engine, num_steps: int) -> None:
        if num_steps == step:
            preempt(engine.scheduler, next(iter(engine.scheduler.roster.running)))

    params = SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=2, logprobs=1)
    runner = tiny_runner(MODEL)
    output = ask(runner, prompt, params, max_num_tokens=16, overlap=overlap, interrupt=interrupt)
    assert output.usage.preemptions == 1
    check_prompt(output.prompt_logprobs or [], prompt, 2)
    check_output(output.completions[0].logprobs or [], prompt, tokens_of(output), 1)
    undisturbed = ask(runner, prompt, params)
    assert tokens_of(undisturbed) == tokens_of(output)


@OVERLAP
def test_prompt_logprobs_of_a_prompt_that_lost_its_blocks(overlap: bool, tiny_runner):
    """B21: taken by an older sequence that grows, not by the test."""
    prompts = [prompt_of(31, 1), prompt_of(70)]
    params = [
        SamplingParams(max_tokens=40, temperature=0, logprobs=0),
        SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=2),
    ]
    options = {"max_num_tokens": 16, "num_blocks": 7, "overlap": overlap}
    outputs = ask_together(tiny_runner(MODEL), prompts, params, **options)
    assert sum(output.usage.preemptions for output in outputs) > 0
    check_prompt(outputs[1].prompt_logprobs or [], prompts[1], 2)
    tokens = tokens_of(outputs[0])
    check_output(outputs[0].completions[0].logprobs or [], prompts[0], tokens, 0)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6])
def test_an_abort_amid_a_prompt_leaves_nothing_behind(step: int, tiny_runner):
    """B21."""
    prompt, other = prompt_of(70), prompt_of(40, 1)
    params = SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=2, n=2)

    def interrupt(engine: Engine, num_steps: int) -> None:
        if num_steps == step:
            engine.abort(next(iter(engine.scheduler.roster.requests)))

    async def body(llm: AsyncLLM):
        aborted = await llm.generate(prompt, params)
        return aborted, await llm.generate(other, params), await llm.generate(prompt, params)

    aborted, *outputs = with_model_front(
        tiny_runner(MODEL), body, max_num_tokens=16, interrupt=interrupt
    )
    reasons = {completion.finish_reason for completion in aborted.completions}
    assert reasons == {FinishReason.CANCELLED}
    for output, asked in zip(outputs, (other, prompt), strict=True):
        check_prompt(output.prompt_logprobs or [], asked, 2)


@pytest.mark.parametrize("num_prompt", [1, 40, 64])
def test_scoring_draws_nothing(num_prompt: int, tiny_runner):
    """B53: 64 tokens are the whole context."""
    prompt = prompt_of(num_prompt)
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    output = ask(tiny_runner(MODEL), prompt, params, num_blocks=4)
    check_prompt(output.prompt_logprobs or [], prompt, 3)
    (completion,) = output.completions
    assert (completion.token_ids, completion.text) == ([], "")
    assert completion.finish_reason is FinishReason.MAX_TOKENS
    assert output.usage.completion_tokens == 0


def test_no_tokens_are_for_scoring_alone(tiny_runner):
    """B53."""

    async def body(llm: AsyncLLM):
        with pytest.raises(InvalidFieldError, match="max_tokens=0"):
            await llm.generate(prompt_of(5), SamplingParams(max_tokens=0))
        for max_tokens in (0, 1):
            scoring = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0)
            with pytest.raises(ContextTooLongError, match="max_model_len=64"):
                await llm.generate(prompt_of(64 + (not max_tokens)), scoring)
        return await llm.generate(prompt_of(5), SamplingParams(max_tokens=1))

    assert len(tokens_of(with_model_front(tiny_runner(MODEL), body, num_blocks=4))) == 1


@OVERLAP
def test_a_prompt_is_told_once_whoever_computes_it_again(overlap: bool, tiny_runner):
    """B21: sequences that find no row compute the prompt again, and so does a preempted one."""
    prompt = prompt_of(40)

    def interrupt(engine: Engine, num_steps: int) -> None:
        if num_steps == 9:
            preempt(engine.scheduler, next(iter(engine.scheduler.roster.running)))

    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=4, prompt_logprobs=1)
    runner = tiny_runner(MODEL)
    options = {"max_num_seqs": 2, "max_num_tokens": 16, "overlap": overlap}
    output = ask(runner, prompt, params, interrupt=interrupt, **options)
    assert output.usage.preemptions == 1
    check_prompt(output.prompt_logprobs or [], prompt, 1)
    undisturbed = ask(runner, prompt, replace(params, prompt_logprobs=None))
    for i in range(4):
        assert tokens_of(output, i) == tokens_of(undisturbed, i)


def test_a_stream_tells_the_prompt_before_the_output(tiny_runner):
    """B08, B43: in order, without gaps, and the same as the whole answer."""
    prompt = prompt_of(40)
    params = SamplingParams(
        max_tokens=4, temperature=0, prompt_logprobs=2, use_prefix_cache=False, n=2
    )

    async def body(llm: AsyncLLM):
        unary = await llm.generate(prompt, params)
        return unary, [event async for event in llm.stream_events(prompt, params)]

    unary, events = with_model_front(tiny_runner(MODEL), body, max_num_tokens=16)
    told = []
    for event in events:
        if isinstance(event, PromptLogprobs):
            assert event.first_position == len(told)
            told += event.logprobs
        if isinstance(event, Delta):
            assert len(told) == 40, "a delta came before the prompt's last entry"
    assert told == unary.prompt_logprobs
    check_prompt(told, prompt, 2)
