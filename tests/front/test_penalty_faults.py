"""Faults of penalties and bans that others had: every greedy token is the NumPy reference's."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front
from helpers.numpy_sampling import adjusted_for
from helpers.oracle_logprobs import MODEL, oracle_logits

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import InvalidFieldError
from jaxpaged.sampling_params import SamplingParams

VOCAB_SIZE = 300
A = 65
# Closer than this, float32 may order two logits otherwise.
MIN_MARGIN = 1e-3
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def check_greedy(
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    end_token_ids: Sequence[int] = (),
) -> None:
    """Each token is the reference's best behind the ones before it, or as good as that."""
    rows = oracle_logits([*prompt, *output])[len(prompt) - 1 :]
    for i, token_id in enumerate(output):
        logits = adjusted_for(params, rows[i], prompt, output[:i], end_token_ids)
        best = int(logits.argmax())
        assert logits[token_id] > logits[best] - MIN_MARGIN, f"token {i}: {token_id}, not {best}"


# Often the best, so that tokens come back and the prompt's count.
LOVED = {A: 6.0, 20: 6.0, 21: 5.5, 22: 5.0}
OPTIONS = {
    "none": {},
    "repetition": {"repetition_penalty": 1.7},
    "less repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bans": {"logit_bias": LOVED | {9: -1e6, A: -7.0, 10: 1e6}, "repetition_penalty": 30.0},
}


@OVERLAP
def test_every_greedy_token_is_the_reference_s(overlap: bool, tiny_runner):
    """B25, B36: all in one batch, the first token too."""
    params = [greedy(**({"logit_bias": LOVED} | options)) for options in OPTIONS.values()]
    for prompt in ([A, A, A], prompt_of(20)):
        prompts = [prompt] * len(params)
        outputs = ask_together(tiny_runner(MODEL), prompts, params, overlap=overlap)
        for output, asked in zip(outputs, params, strict=True):
            check_greedy(prompt, tokens_of(output), asked)
        answers = [tuple(tokens_of(output)) for output in outputs]
        assert len(set(answers)) == len(answers), "an option changes nothing: it shows nothing"
        with pytest.raises(AssertionError, match="not"):
            check_greedy(prompt, answers[1], params[0])


@OVERLAP
@pytest.mark.parametrize("max_num_tokens", [64, 16])
def test_a_loved_token_is_drawn_once(max_num_tokens: int, overlap: bool, tiny_runner):
    """B25: the last token counts at once, whatever the host knows of it."""
    prompt = prompt_of(30)
    loved = next(i for i in range(3, VOCAB_SIZE) if i not in prompt)
    params = greedy(repetition_penalty=1e6, logit_bias={loved: 100.0}, max_tokens=40)
    options = {"overlap": overlap, "max_num_tokens": max_num_tokens}
    tokens = tokens_of(ask(tiny_runner(MODEL), prompt, params, **options))
    assert tokens[0] == loved
    assert len({*tokens, *prompt}) == len(tokens) + len(set(prompt)), "a token came back"
    check_greedy(prompt, tokens, params)


@OVERLAP
def test_the_first_token_obeys_a_ban(overlap: bool, tiny_runner):
    """B25: also after a chunked prompt, after a hit, and in each of n sequences."""
    prompt = prompt_of(40)
    first = int(oracle_logits(prompt)[-1].argmax())
    params = [
        greedy(logit_bias={first: -100.0}),
        greedy(logit_bias={first: -100.0}, n=3),
        greedy(logit_bias={first: -100.0}, presence_penalty=1.0),
        greedy(allowed_token_ids=[i for i in range(VOCAB_SIZE) if i != first]),
    ]

    async def body(llm: AsyncLLM):
        before = await llm.generate(prompt, greedy())
        return before, await asyncio.gather(*(llm.generate(prompt, p) for p in params))

    options = {"overlap": overlap, "max_num_tokens": 16}
    before, outputs = with_model_front(tiny_runner(MODEL), body, **options)
    assert tokens_of(before)[0] == first
    for output, asked in zip(outputs, params, strict=True):
        assert output.usage.cached_prompt_tokens == 39
        for completion in output.completions:
            assert completion.token_ids[0] != first
            check_greedy(prompt, completion.token_ids, asked)


def test_padding_is_no_token(tiny_runner):
    """B36: id 0 fills up every step, and was never in the text."""
    prompt = [A, A, A]
    logits = oracle_logits(prompt)[-1]
    bias = float(logits.max() - logits[0] + 1.0)
    assert logits[0] + bias > 2 and bias < 100
    params = greedy(logit_bias={0: bias}, repetition_penalty=2.0, max_tokens=8)
    tokens = tokens_of(ask(tiny_runner(MODEL), prompt, params))
    assert tokens[0] == 0
    check_greedy(prompt, tokens, params)


@OVERLAP
def test_penalties_survive_preemption_and_forks(overlap: bool, tiny_runner):
    """B25, B36: what was drawn before counts when a sequence comes back into another row."""
    params = greedy(
        repetition_penalty=1.3, frequency_penalty=1.0, logit_bias={9: 3.0}, max_tokens=60
    )
    prompts = [prompt_of(20, i) for i in range(4)]
    outputs = ask_together(tiny_runner(MODEL), prompts, params, num_blocks=12, overlap=overlap)
    assert sum(output.usage.preemptions for output in outputs) > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        check_greedy(prompt, tokens_of(output), params)


def test_a_row_forgets_the_penalties_of_the_one_before(tiny_runner):
    """B30, B36: a plain request behind one with every option, in the same row."""
    prompt = prompt_of(12)
    heavy = greedy(repetition_penalty=5.0, frequency_penalty=2.0, logit_bias={5: 100.0, 6: -50.0})

    async def body(llm: AsyncLLM):
        return [await llm.generate(prompt, p) for p in (greedy(), heavy, greedy(), heavy)]

    outputs = with_model_front(tiny_runner(MODEL), body, max_num_seqs=1)
    plain, first, again, second = map(tokens_of, outputs)
    assert plain == again and first == second and plain != first


BAD_VALUES = [
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "300"),
    ({"logit_bias": {-1: 1.0}}, "-1"),
    ({"logit_bias": {5: float("nan")}}, "nan"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "300"),
    ({"allowed_token_ids": [-1]}, "-1"),
]


def test_values_out_of_range_are_refused(tiny_runner):
    async def body(llm: AsyncLLM):
        for options, part in BAD_VALUES:
            with pytest.raises(InvalidFieldError, match=part) as error:
                await llm.generate([A], SamplingParams(**options))
            assert error.value.field == next(iter(options)) and "\n" not in str(error.value)

    with_model_front(tiny_runner(MODEL), body)


def test_the_reference_by_hand():
    logits = np.array([2.0, -2.0, 1.0, 0.5])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    np.testing.assert_allclose(adjusted_for(params, logits, [0, 1], [1, 1]), [1.0, -6.0, 1.0, 0.5])
    params = SamplingParams(min_tokens=1, logit_bias={2: 3.0, 3: -1e9}, allowed_token_ids=[0, 2, 3])
    np.testing.assert_allclose(
        adjusted_for(params, logits, [], [], [0]), [-np.inf, -np.inf, 4.0, -99.5]
    )


def test_end_ids_beyond_the_logits_are_never_drawn_and_harm_nobody(tiny_runner):
    """Tokenizers and generation configs name ids that a model has no logit for."""
    runner, prompt = tiny_runner(MODEL), prompt_of(9)
    params = [greedy(8, min_tokens=8), greedy(8, repetition_penalty=1.5), greedy(8)]
    ends, beyond = [2], [2, VOCAB_SIZE, 5000]
    wanted = ask_together(runner, [prompt] * 3, params, eos_token_ids=ends)
    found = ask_together(runner, [prompt] * 3, params, eos_token_ids=beyond)
    assert list(map(tokens_of, found)) == list(map(tokens_of, wanted))
