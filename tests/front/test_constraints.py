"""Constraints obeyed to the token: alone, in company, streamed, preempted, with every option."""

import asyncio
from collections.abc import Sequence

import pytest
from helpers.byte_tokenizer import EOS
from helpers.constraints import CASES, GREEDY, constrained, prompt_of, whole
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front
from helpers.numpy_sampling import adjusted_for
from helpers.oracle_logprobs import MODEL, check_position, oracle_logits, oracle_logprobs

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.outputs import Delta, RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import SamplingParams

PROMPT = [9, 40, 77, 130, 8]
A, B = ord("a"), ord("b")
# Closer than this, float32 may order two logits otherwise.
MIN_MARGIN = 1e-3
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
HOT = {"temperature": 1.0, "max_tokens": 100, "n": 3}


def every_case() -> tuple[list[str], list[SamplingParams]]:
    """Each constraint greedily, and three times at temperature 1."""
    names, params = [], []
    for seed, (name, case) in enumerate(CASES.items()):
        names += [name] * 2
        params += [
            constrained(case.constraint, **options) for options in (GREEDY, HOT | {"seed": seed})
        ]
    return names, params


def check_match(name: str, output: RequestOutput) -> None:
    for completion in output.completions:
        assert CASES[name].allows(completion.text), f"{name}: {completion.text!r}"
        assert completion.finish_reason is FinishReason.EOS
        assert completion.token_ids.index(EOS) == len(completion.token_ids) - 1
        assert bytes(completion.token_ids[:-1]).decode() == completion.text


def check_greedy(
    output: Sequence[int], params: SamplingParams, allowed: Sequence[Sequence[int]]
) -> None:
    """Each token is the reference's best of those allowed at its place."""
    rows = oracle_logits([*PROMPT, *output])[len(PROMPT) - 1 :]
    for i, token_id in enumerate(output):
        assert token_id in allowed[i]
        logits = adjusted_for(params, rows[i], PROMPT, output[:i])
        assert logits[token_id] > max(logits[list(allowed[i])]) - MIN_MARGIN


# --- every text matches ------------------------------------------------------------------------


def test_the_same_matching_texts_however_they_come_about(tiny_runner):
    """Together, alone, streamed, in both loops, with 8 blocks for all, and cut into chunks."""
    runner, (names, params) = tiny_runner(MODEL), every_case()
    prompts = [prompt_of(20, i) for i in range(len(names))]
    expected = [
        ask(runner, *pair, eos_token_ids=[EOS], enable_prefix_caching=False)
        for pair in zip(prompts, params, strict=True)
    ]
    texts = set()
    for name, output in zip(names, expected, strict=True):
        check_match(name, output)
        texts |= {completion.text for completion in output.completions}
    assert len(texts) > 12, "they hardly differ: equal ones would show nothing"
    for changes in (
        {"overlap": True},
        {"overlap": False},
        {"overlap": True, "num_blocks": 8},
        {"overlap": False, "num_blocks": 8},
        {"overlap": True, "max_num_tokens": 8},
    ):
        outputs = ask_together(runner, prompts, params, eos_token_ids=[EOS], **changes)
        assert list(map(whole, outputs)) == list(map(whole, expected)), changes
        if "num_blocks" in changes:
            assert sum(output.usage.preemptions for output in outputs) > 0


@OVERLAP
def test_streams_are_the_unary_answers(overlap: bool, tiny_runner):
    names, params = every_case()

    async def body(llm: AsyncLLM):
        async def read(options: SamplingParams) -> list[Delta]:
            return [delta async for delta in llm.stream(PROMPT, options)]

        unary = await asyncio.gather(*(llm.generate(PROMPT, options) for options in params))
        return unary, await asyncio.gather(*map(read, params))

    unary, streams = with_model_front(
        tiny_runner(MODEL), body, eos_token_ids=[EOS], overlap=overlap
    )
    for name, output, deltas in zip(names, unary, streams, strict=True):
        check_match(name, output)
        for completion in output.completions:
            own = [delta for delta in deltas if delta.index == completion.index]
            assert "".join(delta.text for delta in own) == completion.text
            assert [i for delta in own for i in delta.token_ids] == completion.token_ids
            assert own[-1].finish_reason is FinishReason.EOS


@OVERLAP
def test_neighbours_without_a_constraint_are_as_alone(overlap: bool, tiny_runner):
    runner, (names, params) = tiny_runner(MODEL), every_case()
    plain = [
        SamplingParams(max_tokens=30, temperature=0),
        SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=2),
        SamplingParams(max_tokens=30, temperature=1.0, seed=4, logprobs=2),
        SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1.5),
    ]
    options = {"eos_token_ids": [EOS], "overlap": overlap}
    alone = [ask(runner, PROMPT, p, **options) for p in plain]
    mixed = [p for pair in zip(params, plain * 3, strict=False) for p in pair]
    outputs = ask_together(runner, [PROMPT] * len(mixed), mixed, **options)
    for name, output in zip(names, outputs[::2], strict=True):
        check_match(name, output)
    for i, output in enumerate(outputs[1::2]):
        assert whole(output) == whole(alone[i % len(plain)])


def test_many_requests_with_one_constraint(tiny_runner):
    """Each goes its own way through it."""
    params = [
        constrained(CASES["regex"].constraint, temperature=1.0, seed=seed) for seed in range(40)
    ]
    outputs = ask_together(tiny_runner(MODEL), [PROMPT] * 40, params, eos_token_ids=[EOS])
    for output in outputs:
        check_match("regex", output)
    assert len({output.completions[0].text for output in outputs}) > 30


# --- where it ends -----------------------------------------------------------------------------


@OVERLAP
def test_eos_comes_exactly_where_the_text_is_complete(overlap: bool, tiny_runner):
    """However much it is wanted or not; another id may stand for it."""
    cases = [
        ({"logit_bias": {EOS: 100.0}}, [A, A, EOS], FinishReason.EOS),
        ({"logit_bias": {EOS: -100.0}}, [A] * 4 + [EOS], FinishReason.EOS),
        ({"logit_bias": {7: 100.0}, "stop_token_ids": [7]}, [A, A, 7], FinishReason.STOP_TOKEN),
        (
            {"logit_bias": {7: -100.0, EOS: 100.0}, "stop_token_ids": [7], "ignore_eos": True},
            [A] * 4 + [7],
            FinishReason.STOP_TOKEN,
        ),
        ({"max_tokens": 4, "logit_bias": {EOS: -100.0}}, [A] * 4, FinishReason.MAX_TOKENS),
        ({"max_tokens": 5, "logit_bias": {EOS: -100.0}}, [A] * 4 + [EOS], FinishReason.EOS),
        ({"max_tokens": 1}, [A], FinishReason.MAX_TOKENS),
    ]
    params = [constrained(regex="a{2,4}", **options) for options, _, _ in cases]
    outputs = ask_together(
        tiny_runner(MODEL), [PROMPT] * len(params), params, eos_token_ids=[EOS], overlap=overlap
    )
    for output, (_, tokens, reason) in zip(outputs, cases, strict=True):
        (completion,) = output.completions
        assert (completion.token_ids, completion.finish_reason) == (tokens, reason)
        assert completion.text == "a" * tokens.count(A)


def test_the_context_cuts_a_text(tiny_runner):
    params = constrained(choice=["abcdefgh"])
    output = ask(tiny_runner(MODEL), prompt_of(60), params, eos_token_ids=[EOS], num_blocks=4)
    assert output.completions[0].text == "abcd"
    assert output.completions[0].finish_reason is FinishReason.CONTEXT_LENGTH


def test_the_empty_text_is_one(tiny_runner):
    output = ask(tiny_runner(MODEL), PROMPT, constrained(regex=""), eos_token_ids=[EOS])
    assert whole(output) == [([EOS], "", FinishReason.EOS)]


# --- with the other options --------------------------------------------------------------------


@OVERLAP
def test_with_penalties_and_biases(overlap: bool, tiny_runner):
    """Every greedy token is the reference's best of a and b, then comes the end."""
    options = [
        {},
        {"logit_bias": {A: 3.0}},
        {"logit_bias": {A: 100.0, B: 98.0}, "frequency_penalty": 1.5},
        {"logit_bias": {B: 100.0, A: 99.0}, "presence_penalty": 2.0},
        {"logit_bias": {A: 20.0, B: 20.0}, "repetition_penalty": 3.0},
    ]
    params = [constrained(regex="[ab]{8}", **changes) for changes in options]
    outputs = ask_together(
        tiny_runner(MODEL), [PROMPT] * len(params), params, eos_token_ids=[EOS], overlap=overlap
    )
    for output, asked in zip(outputs, params, strict=True):
        check_greedy(tokens_of(output), asked, [[A, B]] * 8 + [[EOS]])
    assert len({tuple(tokens_of(output)) for output in outputs}) >= 4
    with pytest.raises(AssertionError):
        check_greedy(tokens_of(outputs[2]), params[0], [[A, B]] * 8 + [[EOS]])


def test_with_allowed_ids_and_top_k(tiny_runner):
    runner = tiny_runner(MODEL)
    params = [
        constrained(regex="[ab]{8}", allowed_token_ids=[B, 5, EOS], temperature=1.0),
        constrained(regex="[ab]{8}", top_k=1, temperature=1.0),
        constrained(regex="[ab]{8}"),
    ]
    outputs = ask_together(runner, [PROMPT] * len(params), params, eos_token_ids=[EOS])
    assert tokens_of(outputs[0]) == [B] * 8 + [EOS]
    assert tokens_of(outputs[1]) == tokens_of(outputs[2]), "top_k is of what the mask leaves"


@OVERLAP
def test_logprobs_are_the_model_s_own(overlap: bool, tiny_runner):
    """Of the unmasked distribution: what the mask forbids has its rank before the drawn token."""
    params = [
        constrained(CASES["json_schema"].constraint, logprobs=3),
        constrained(CASES["regex"].constraint, logprobs=0, temperature=1.0, seed=2),
        constrained(choice=["ab"], prompt_logprobs=2),
    ]
    outputs = ask_together(
        tiny_runner(MODEL), [PROMPT] * 3, params, eos_token_ids=[EOS], overlap=overlap
    )
    for output, asked in zip(outputs[:2], params, strict=False):
        (completion,) = output.completions
        rows = oracle_logprobs([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        assert completion.logprobs is not None and asked.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        ranks = []
        for i, position in enumerate(completion.logprobs):
            check_position(position, rows[i], completion.token_ids[i], asked.logprobs)
            assert position.chosen is not None
            ranks.append(position.chosen.rank)
        assert max(ranks) > 20
    assert outputs[2].prompt_logprobs is not None and len(outputs[2].prompt_logprobs) == len(PROMPT)


def test_stop_strings_cut_a_text(tiny_runner):
    """Also across tokens; one that the text cannot hold changes nothing."""
    text = "first second third"
    params = [
        constrained(choice=[text], stop=stop, include_stop_string=include)
        for stop, include in ((" sec", False), (["zz", "nd t"], True), ("no such", False))
    ]
    outputs = ask_together(tiny_runner(MODEL), [PROMPT] * 3, params, eos_token_ids=[EOS])
    assert [o.completions[0].text for o in outputs] == ["first", "first second t", text]
    reasons = [o.completions[0].finish_reason for o in outputs]
    assert reasons == [FinishReason.STOP_STRING] * 2 + [FinishReason.EOS]
