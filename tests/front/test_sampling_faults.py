"""Faults of sampling, limits and requests that others had, asked through the front."""

import asyncio

import numpy as np
import pytest
from helpers.fronts import scripted_front, scripted_llm
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ContextTooLongError, InvalidFieldError
from jaxpaged.outputs import Delta
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams

VOCAB_SIZE = 300
PROMPT = [9, 40, 77, 130, 8]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


def test_what_can_never_fit_is_refused_and_holds_up_nobody(tiny_runner):
    """B16: four blocks of 16."""
    greedy = SamplingParams(temperature=0, max_tokens=200)

    async def body(llm: AsyncLLM):
        calls = [llm.generate(prompt_of(n), greedy) for n in (100, 40)]
        small = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3))
        return await asyncio.gather(*calls, small, return_exceptions=True)

    refused, cut, small = with_model_front(tiny_runner("tiny_qwen3"), body, num_blocks=4)
    assert isinstance(refused, ContextTooLongError) and "max_model_len=64" in str(refused)
    assert not isinstance(cut, BaseException) and not isinstance(small, BaseException)
    assert cut.completions[0].finish_reason is FinishReason.CONTEXT_LENGTH
    assert len(tokens_of(cut)) == 24 and len(tokens_of(small)) == 3


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_a_reader_sees_no_preemption(options: dict, tiny_runner):
    """B20, B30: neither a repeat nor a gap in streams, and the same counts."""
    runner = tiny_runner("tiny_qwen3")
    params = SamplingParams(max_tokens=60, **options)
    prompts = [prompt_of(20, i) for i in range(4)]
    expected = ask_together(runner, prompts, params)

    async def body(llm: AsyncLLM):
        async def read(prompt: list[int]) -> list[Delta]:
            return [delta async for delta in llm.stream(prompt, params)]

        streams = await asyncio.gather(*map(read, prompts))
        return streams, await llm.stats()

    streams, stats = with_model_front(runner, body, num_blocks=12)
    assert stats.preemptions > 0
    for output, deltas in zip(expected, streams, strict=True):
        assert [i for delta in deltas for i in delta.token_ids] == tokens_of(output)
        assert "".join(delta.text for delta in deltas) == output.completions[0].text
        assert output.usage.preemptions == 0
    outputs = ask_together(runner, prompts, params, num_blocks=12)
    assert sum(output.usage.preemptions for output in outputs) > 0
    for output, found in zip(expected, outputs, strict=True):
        assert tokens_of(found) == tokens_of(output)
        assert found.usage.prompt_tokens == output.usage.prompt_tokens == 20
        assert found.usage.completion_tokens == output.usage.completion_tokens == 60


def test_top_k_off_is_not_greedy(tiny_runner):
    """B26."""
    off = [None, 0, -1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**40]
    params = [SamplingParams(max_tokens=1, seed=7, n=40, top_k=top_k) for top_k in off]
    outputs = ask_together(tiny_runner("tiny_qwen3"), [PROMPT] * len(off), params)
    drawn = [[completion.token_ids[0] for completion in output.completions] for output in outputs]
    assert drawn == [drawn[0]] * len(off)
    assert len(set(drawn[0])) > 3


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-30, 1e-45])
def test_tiny_temperatures_are_greedy(temperature: float, tiny_runner):
    """B28."""
    params = [SamplingParams(max_tokens=20, temperature=t) for t in (0.0, temperature)]
    greedy, tiny = ask_together(tiny_runner("tiny_qwen3"), [PROMPT] * 2, params)
    assert tokens_of(tiny) == tokens_of(greedy)
    assert tiny.completions[0].finish_reason is FinishReason.MAX_TOKENS


def test_every_sequence_of_a_seeded_request_gets_its_own_end(tiny_runner):
    """B31: they end at different times, and each is told to its end."""
    runner = tiny_runner("tiny_qwen3")
    free = SamplingParams(max_tokens=24, temperature=1.0, seed=7, n=4)
    whole = [completion.token_ids for completion in ask(runner, PROMPT, free).completions]
    assert len({tuple(tokens) for tokens in whole}) == 4
    stops = [whole[0][3], whole[1][9]]
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, n=4, stop_token_ids=stops)
    expected = [
        tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stops), 24)]
        for tokens in whole
    ]

    async def body(llm: AsyncLLM):
        return [delta async for delta in llm.stream(PROMPT, params)]

    deltas = with_model_front(runner, body)
    for index in range(4):
        own = [delta for delta in deltas if delta.index == index]
        assert [i for delta in own for i in delta.token_ids] == expected[index]
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [
            True
        ]
    assert len(set(map(len, expected))) > 1
    for index in range(4):
        solo = SamplingParams(max_tokens=24, temperature=1.0, seed=7 + index, stop_token_ids=stops)
        assert tokens_of(ask(runner, PROMPT, solo)) == expected[index]


def test_no_seed_is_another_one_each_time(tiny_runner):
    """B32."""
    for seed, num_distinct in ((None, 3), (0, 1)):
        params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.99, seed=seed)
        outputs = ask_together(tiny_runner("tiny_qwen3"), [PROMPT] * 3, params)
        assert len({tuple(tokens_of(output)) for output in outputs}) == num_distinct
        assert len({output.completions[0].seed for output in outputs}) == num_distinct


def test_ids_outside_the_vocabulary_change_no_neighbour(tiny_runner):
    """B33, B35: the bound is the width of the logits, wider here than the tokenizer's 260 ids."""
    runner = tiny_runner("tiny_qwen3")
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
    expected = ask(runner, PROMPT, params)

    async def body(llm: AsyncLLM):
        neighbour = asyncio.ensure_future(llm.generate(PROMPT, params))
        await asyncio.sleep(0)
        for token_id in (VOCAB_SIZE, -1, 2**31 - 1, 2**40):
            with pytest.raises(InvalidFieldError, match=f"is {token_id}: ids are 0 to 299"):
                await llm.generate(PROMPT, SamplingParams(stop_token_ids=[token_id]))
            with pytest.raises(InvalidFieldError, match=f"is {token_id}: ids are 0 to 299"):
                await llm.generate([token_id], params)
        # What the model may draw is also a prompt.
        last = SamplingParams(max_tokens=2, stop_token_ids=[VOCAB_SIZE - 1])
        accepted = await llm.generate([VOCAB_SIZE - 1], last)
        assert accepted.usage.prompt_tokens == 1
        return await neighbour

    assert tokens_of(with_model_front(runner, body)) == tokens_of(expected)


@pytest.mark.parametrize("prompts", ["", [""], ["p", ""], [[]], []])
def test_empty_prompts(prompts):
    """B52: an empty list of prompts is none."""
    with scripted_llm({"p": "fine"}) as scripted:
        if prompts == []:
            assert scripted.llm.generate(prompts, use_tqdm=False) == []
        else:
            with pytest.raises(InvalidFieldError, match="the prompt is empty"):
                scripted.llm.generate(prompts, use_tqdm=False)
        (output,) = scripted.llm.generate("p", use_tqdm=False)
        assert output.completions[0].text == "fine"


def test_the_one_token_allowed_may_be_the_end():
    """B53: max_tokens 1 and EOS at once."""

    async def run():
        front = scripted_front({"p": "", "q": "x"})
        outputs = [await front.llm.generate(p, SamplingParams(max_tokens=1)) for p in "pq"]
        front.llm.close()
        return outputs

    ended, cut = (output.completions[0] for output in asyncio.run(run()))
    assert (len(ended.token_ids), ended.text, ended.finish_reason) == (1, "", FinishReason.EOS)
    assert (len(cut.token_ids), cut.text, cut.finish_reason) == (1, "x", FinishReason.MAX_TOKENS)
