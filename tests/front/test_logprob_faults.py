"""Faults of log-probabilities that others had; the values are the plain NumPy model's."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front
from helpers.oracle_logprobs import (
    MODEL,
    TOLERANCE,
    check_output,
    check_position,
    check_prompt,
    oracle_logprobs,
)

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import InvalidFieldError
from jaxpaged.logprobs import PositionLogprobs, TokenLogprob
from jaxpaged.outputs import Delta, RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams

VOCAB_SIZE = 300
LETTERS = list(range(ord("a"), ord("z") + 1))
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


def entries_of(output: RequestOutput) -> list[TokenLogprob]:
    """Every entry there is."""
    prompt = output.prompt_logprobs or []
    positions = [p for c in output.completions for p in c.logprobs or []]
    return [entry for position in [*prompt, *positions] for entry in position.entries]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_twenty_are_refused(name: str, tiny_runner):
    """B39."""

    async def body(llm: AsyncLLM):
        for value in (21, VOCAB_SIZE + 1, -1, -2, 10**9, 1.5, True, "1"):
            options: dict[str, Any] = {name: value}
            with pytest.raises(InvalidFieldError, match=f"{name}={value!r} must be") as error:
                await llm.generate([5], SamplingParams(**options))
            assert error.value.field == name
        options = {name: 20}
        return await llm.generate([5, 6], SamplingParams(max_tokens=1, **options))

    output = with_model_front(tiny_runner(MODEL), body)
    assert len(entries_of(output)) >= 20


@pytest.mark.parametrize("options", [{"top_k": 1}, {"temperature": 1e-30}, {"top_p": 1e-9}])
def test_masked_tokens_keep_finite_values(options: dict, tiny_runner):
    """B40, B28: values are the model's own, whatever sampling leaves of them."""
    params = SamplingParams(
        max_tokens=9, logprobs=5, prompt_logprobs=1, allowed_token_ids=LETTERS, **options
    )
    prompt = prompt_of(20)
    output = ask(tiny_runner(MODEL), prompt, params)
    entries = entries_of(output)
    assert len(entries) >= 9 * 5 and all(math.isfinite(entry.logprob) for entry in entries)
    assert all(entry.logprob <= 0 for entry in entries)
    check_output(output.completions[0].logprobs or [], prompt, tokens_of(output), 5)


@OVERLAP
@pytest.mark.parametrize("k", [0, 1, 3, 20])
def test_values_are_raw_and_the_drawn_token_is_always_there(k: int, overlap: bool, tiny_runner):
    """B41."""
    prompt = prompt_of(17)
    options = [
        {"temperature": 0.0},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 8.0, "seed": 2, "min_p": 0.01},
        {"temperature": 8.0, "seed": 3, "repetition_penalty": 1.8, "presence_penalty": 2.0},
        {"temperature": 1.0, "seed": 4, "logit_bias": {7: 50.0, 8: 50.0}},
    ]
    params = [SamplingParams(max_tokens=12, logprobs=k, **option) for option in options]
    outputs = ask_together(tiny_runner(MODEL), [prompt] * 5, params, overlap=overlap)
    ranks = []
    for output in outputs:
        (completion,) = output.completions
        positions = completion.logprobs or []
        check_output(positions, prompt, completion.token_ids, k)
        chosen = [position.chosen for position in positions if position.chosen is not None]
        ranks += [entry.rank for entry in chosen]
        assert completion.cumulative_logprob == pytest.approx(
            sum(entry.logprob for entry in chosen), abs=TOLERANCE
        )
    assert max(ranks) > 20, "every drawn token is among the best: the test shows nothing"


def test_nothing_is_told_unless_it_is_asked_for(tiny_runner):
    """B41."""
    asked = SamplingParams(max_tokens=6, temperature=0, logprobs=2)
    outputs = ask_together(
        tiny_runner(MODEL), [prompt_of(9)] * 2, [asked, replace(asked, logprobs=None)]
    )
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    completion = outputs[1].completions[0]
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert outputs[1].prompt_logprobs is None


def test_equal_logits_rank_by_id(tiny_runner):
    """B29, B41: told by the best twenty of a position, and by what a draw's rank says."""
    params = SamplingParams(max_tokens=4, temperature=5.0, seed=3, logprobs=20)
    output = ask(tiny_runner(MODEL), prompt_of(9), params)
    for position in output.completions[0].logprobs or []:
        for better, worse in zip(position.top, position.top[1:], strict=False):
            assert (-better.logprob, better.token_id) < (-worse.logprob, worse.token_id)


def test_tokens_that_are_no_text_stay_apart(tiny_runner):
    """B42: parts of characters all look like U+FFFD; ids and bytes tell them apart."""
    emoji = sorted(set("😀🚀👩한".encode()))
    params = SamplingParams(
        max_tokens=12, temperature=1.0, seed=1, logprobs=20, allowed_token_ids=emoji
    )
    output = ask(tiny_runner(MODEL), "🤖", replace(params, prompt_logprobs=20))
    tokenizer = ByteTokenizer()
    (completion,) = output.completions
    assert set(completion.token_ids) <= set(emoji)
    for entry in entries_of(output):
        assert entry.token_bytes == tokenizer.token_bytes(entry.token_id)
    for position in completion.logprobs or []:
        texts = [entry.token_bytes.decode(errors="replace") for entry in position.entries]
        assert texts.count("\ufffd") > 1, "nothing collides: the test shows nothing"
        assert len({entry.token_id for entry in position.entries}) in (20, 21)
    joined = b"".join(p.chosen.token_bytes for p in completion.logprobs or [] if p.chosen)
    assert joined.decode(errors="replace") == completion.text


@OVERLAP
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_logprobs_with_the_ids(include: bool, overlap: bool, tiny_runner):
    """B43: a stop string of three tokens; streamed and unary tell the same."""
    runner, prompt = tiny_runner(MODEL), prompt_of(9)
    free = SamplingParams(
        max_tokens=30,
        temperature=1.0,
        seed=2,
        logprobs=1,
        allowed_token_ids=LETTERS,
        use_prefix_cache=False,  # a hit computes in other widths, which round otherwise
    )
    text = ask(runner, prompt, free).completions[0].text
    assert len(text) == 30
    params = replace(free, stop=[text[10:13]], include_stop_string=include)

    async def body(llm: AsyncLLM):
        unary = await llm.generate(prompt, params)
        return unary, [delta async for delta in llm.stream(prompt, params)]

    unary, deltas = with_model_front(runner, body, overlap=overlap)
    (completion,) = unary.completions
    assert completion.finish_reason is FinishReason.STOP_STRING
    end = text.index(text[10:13]) + 3
    assert completion.text == text[: end if include else end - 3]
    assert len(completion.token_ids) == len(completion.logprobs or []) == end
    check_output(completion.logprobs or [], prompt, completion.token_ids, 1)
    check_deltas(deltas, unary)


def check_deltas(deltas: list[Delta], unary: RequestOutput) -> None:
    (completion,) = unary.completions
    assert all(len(delta.logprobs or []) == len(delta.token_ids) for delta in deltas)
    joined = [position for delta in deltas for position in delta.logprobs or []]
    assert joined == completion.logprobs
    assert [i for delta in deltas for i in delta.token_ids] == completion.token_ids
    assert "".join(delta.text for delta in deltas) == completion.text


@pytest.mark.parametrize("num_blocks", [100, 6], ids=["roomy", "preempting"])
def test_each_of_n_sequences_has_its_own(num_blocks: int, tiny_runner):
    """B43: the first tokens of all of them come from one row of logits."""
    prompt = prompt_of(20)
    params = SamplingParams(
        max_tokens=40, temperature=3.0, seed=9, n=4, logprobs=2, stop_token_ids=[40, 41, 42, 43]
    )
    output = ask(tiny_runner(MODEL), prompt, params, num_blocks=num_blocks)
    assert (output.usage.preemptions > 0) == (num_blocks == 6)
    assert len({tuple(completion.token_ids) for completion in output.completions}) == 4
    for completion in output.completions:
        check_output(completion.logprobs or [], prompt, completion.token_ids, 2)


def test_the_comparison_notices_what_is_wrong():
    """The negative control of every test here."""
    prompt = prompt_of(6)
    row = oracle_logprobs(prompt)[-1]
    order = np.argsort(-row)

    def entry(place: int, **changes) -> TokenLogprob:
        token_id = int(order[place - 1])
        return replace(TokenLogprob(token_id, float(row[token_id]), place), **changes)

    check_position(PositionLogprobs(entry(3), [entry(1), entry(2)]), row, int(order[2]), 2)
    check_position(PositionLogprobs(entry(2), [entry(1), entry(2)]), row, int(order[1]), 2)
    wrong = [
        PositionLogprobs(entry(3), [entry(1)]),
        PositionLogprobs(entry(3), [entry(2), entry(1)]),
        PositionLogprobs(entry(3, rank=4), [entry(1), entry(2)]),
        PositionLogprobs(entry(3, logprob=entry(3).logprob + 0.01), [entry(1), entry(2)]),
        PositionLogprobs(entry(4), [entry(1), entry(2)]),
        PositionLogprobs(None, [entry(1), entry(2)]),
    ]
    for position in wrong:
        with pytest.raises(AssertionError):
            check_position(position, row, int(order[2]), 2)
    with pytest.raises(AssertionError):
        check_prompt([PositionLogprobs(None, [])], prompt, 0)
