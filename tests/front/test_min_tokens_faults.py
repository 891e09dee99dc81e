"""Faults of min_tokens that others had: ends and stop strings wait, the context does not."""

import asyncio

import numpy as np
import pytest
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front
from helpers.numpy_sampling import adjusted_for
from helpers.oracle_logprobs import MODEL, oracle_logits

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import InvalidFieldError
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams

VOCAB_SIZE = 300
LETTERS = list(range(ord("a"), ord("z") + 1))
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


@OVERLAP
@pytest.mark.parametrize("kind", ["eos", "stop ids", "both"])
def test_every_end_is_masked_until_then(kind: str, overlap: bool, tiny_runner):
    """B37: three ids that would end the answer early, the first of them as its first token."""
    runner, prompt = tiny_runner(MODEL), prompt_of(17)
    free = tokens_of(ask(runner, prompt, SamplingParams(max_tokens=40, temperature=0)))
    ends = list(dict.fromkeys(free))[:3]
    eos = {"eos": ends, "stop ids": [], "both": ends[:1]}[kind]
    stops = [token_id for token_id in ends if token_id not in eos]
    params = SamplingParams(max_tokens=40, min_tokens=20, temperature=0, stop_token_ids=stops)
    output = ask(runner, prompt, params, eos_token_ids=eos, overlap=overlap)
    (completion,) = output.completions
    tokens = completion.token_ids
    assert len(tokens) >= 20 and not set(tokens[:20]) & set(ends)
    rows = oracle_logits([*prompt, *tokens])[len(prompt) - 1 :]
    for i, token_id in enumerate(tokens):
        logits = adjusted_for(params, rows[i], prompt, tokens[:i], ends)
        assert logits[token_id] > logits.max() - 1e-3
    assert not set(tokens[:-1]) & set(ends), "it went on behind an end"
    # Without it, the very first token is the end.
    early = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=stops)
    assert len(tokens_of(ask(runner, prompt, early, eos_token_ids=eos))) == 1


@OVERLAP
def test_the_end_comes_right_after(overlap: bool, tiny_runner):
    """B37: an end that is wanted all the time comes as token min_tokens + 1."""
    params = SamplingParams(
        max_tokens=40, min_tokens=20, temperature=0, stop_token_ids=[7], logit_bias={7: 100.0}
    )
    output = ask(tiny_runner(MODEL), prompt_of(17), params, overlap=overlap)
    assert output.completions[0].finish_reason is FinishReason.STOP_TOKEN
    assert tokens_of(output).index(7) == 20 and len(tokens_of(output)) == 21


@OVERLAP
def test_stop_strings_wait_too(overlap: bool, tiny_runner):
    """B37: one that comes early does not end the answer, nor is it cut from it."""
    runner, prompt = tiny_runner(MODEL), prompt_of(9)
    free = SamplingParams(max_tokens=30, temperature=1.0, seed=2, allowed_token_ids=LETTERS)
    text = ask(runner, prompt, free).completions[0].text
    early, late = text[2:5], text[24:28]
    assert early not in text[3:] and late not in text[:27]
    for stop, expected in ((early, text), (late, text[:24]), ([early, late], text[:24])):
        params = SamplingParams(
            max_tokens=30,
            min_tokens=20,
            temperature=1.0,
            seed=2,
            allowed_token_ids=LETTERS,
            stop=stop,
        )

        async def body(llm: AsyncLLM, params: SamplingParams = params):
            unary = await llm.generate(prompt, params)
            return unary, [delta async for delta in llm.stream(prompt, params)]

        unary, deltas = with_model_front(runner, body, overlap=overlap)
        assert unary.completions[0].text == expected
        assert "".join(delta.text for delta in deltas) == expected
        reason = FinishReason.MAX_TOKENS if expected == text else FinishReason.STOP_STRING
        assert unary.completions[0].finish_reason is deltas[-1].finish_reason is reason


def test_the_context_ends_an_answer_all_the_same(tiny_runner):
    """B37."""
    params = SamplingParams(max_tokens=40, min_tokens=30, temperature=0, stop_token_ids=[5])
    outputs = ask_together(
        tiny_runner(MODEL), [prompt_of(59), prompt_of(63, 1)], params, num_blocks=4
    )
    for output, room in zip(outputs, (5, 1), strict=True):
        assert len(tokens_of(output)) == room and 5 not in tokens_of(output)
        assert output.completions[0].finish_reason is FinishReason.CONTEXT_LENGTH


def test_stop_ids_with_min_tokens_stay_in_their_row(tiny_runner):
    """B33: the highest id there is, beside a neighbour; ids above it are refused."""
    runner, prompt = tiny_runner(MODEL), prompt_of(12)
    plain = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    banned = SamplingParams(
        max_tokens=20, min_tokens=20, temperature=1.0, seed=3, stop_token_ids=[VOCAB_SIZE - 1]
    )
    alone = ask(runner, prompt, plain)

    async def body(llm: AsyncLLM):
        calls = [llm.generate(prompt, params) for params in (banned, plain, banned)]
        for token_id in (VOCAB_SIZE, -1, 2**31 - 1):
            bad = SamplingParams(min_tokens=1, stop_token_ids=[token_id])
            with pytest.raises(InvalidFieldError, match=f"is {token_id}: ids are 0 to 299"):
                await llm.generate(prompt, bad)
        return await asyncio.gather(*calls)

    first, neighbour, last = with_model_front(runner, body)
    assert tokens_of(neighbour) == tokens_of(alone)
    assert tokens_of(first) == tokens_of(last) and len(tokens_of(first)) == 20


def test_what_cannot_be_kept_is_refused(tiny_runner):
    """B37: bounds, and options that leave no token at all."""

    async def body(llm: AsyncLLM):
        for options, part in [
            ({"min_tokens": -1}, "min_tokens=-1"),
            ({"min_tokens": 6, "max_tokens": 5}, "min_tokens=6"),
            ({"min_tokens": 1.5}, "min_tokens=1.5"),
            ({"min_tokens": 1, "allowed_token_ids": [2, 9], "stop_token_ids": [9]}, "allowed"),
        ]:
            with pytest.raises(InvalidFieldError, match=part):
                await llm.generate([5], SamplingParams(**options))

    with_model_front(tiny_runner(MODEL), body, eos_token_ids=[2])
