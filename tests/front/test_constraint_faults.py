"""Constraints that are refused, that fail midway, and readers that leave in the middle."""

import asyncio
from typing import Any

import pytest
from helpers.byte_tokenizer import EOS
from helpers.constraints import constrained, whole
from helpers.model_fronts import ask, ask_together, with_model_front
from helpers.oracle_logprobs import MODEL

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidFieldError, UnsupportedOptionError
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import Constraint, SamplingParams

PROMPT = [9, 40, 77, 130, 8]
A = ord("a")
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
# More derivatives than llguidance makes of one grammar, after some tokens.
TOO_COMPLEX = "((a{1,1000}){1,1000}){1,1000}"
REFUSED = [
    ({"regex": "a("}, "constraint.regex", r"regex is refused: .*unclosed group"),
    ({"regex": r"(a)\1"}, "constraint.regex", "backreferences are not supported"),
    ({"grammar": "start: missing"}, "constraint.grammar", "refused: .*missing"),
    ({"json_schema": "{"}, "constraint.json_schema", "is not JSON"),
    ({"json_schema": {"type": "nothing"}}, "constraint.json_schema", "refused: .*nothing"),
    ({"json_schema": {"enum": []}}, "constraint.json_schema", "refused: "),
    ({"choice": []}, "constraint.choice", "must hold at least one string"),
    ({"choice": "yes"}, "constraint.choice", "must be a sequence of strings, not str"),
    ({}, "constraint", "must set exactly one of .*, it sets none"),
    ({"regex": "a", "choice": ["b"]}, "constraint", "it sets regex, choice"),
]


def test_what_is_no_constraint_is_refused_in_the_compiler_s_words(tiny_runner):
    async def body(llm: AsyncLLM):
        for fields, name, line in REFUSED:
            with pytest.raises(InvalidFieldError, match=line) as error:
                await llm.generate(PROMPT, SamplingParams(constraint=Constraint(**fields)))
            assert error.value.field == name and "\n" not in str(error.value)
        contradictions: list[dict[str, Any]] = [{"min_tokens": 1}, {"ignore_eos": True}]
        for options in contradictions:
            (field,) = options
            with pytest.raises(InvalidFieldError, match=f"{field}=.* with a constraint") as error:
                await llm.generate(PROMPT, constrained(regex="a", **options))
            assert error.value.field == field
        with pytest.raises(InvalidFieldError, match="must hold an EOS or stop id") as error:
            await llm.generate(PROMPT, constrained(regex="a", allowed_token_ids=[5]))
        assert error.value.field == "allowed_token_ids"
        assert (await llm.stats()).steps == 0, "nothing was queued"

    with_model_front(tiny_runner(MODEL), body, eos_token_ids=[EOS])


def test_without_a_tokenizer_there_are_no_constraints(tiny_runner):
    async def body(llm: AsyncLLM):
        with pytest.raises(UnsupportedOptionError, match="needs a tokenizer") as error:
            await llm.generate(PROMPT, constrained(regex="a"))
        assert error.value.field == "constraint"
        assert len((await llm.generate(PROMPT, SamplingParams(max_tokens=3))).completions) == 1

    with_model_front(tiny_runner(MODEL), body, has_tokenizer=False)


@OVERLAP
def test_a_grammar_that_fails_midway_ends_its_own_row(overlap: bool, tiny_runner, caplog):
    runner = tiny_runner(MODEL)
    params = [
        constrained(regex=TOO_COMPLEX, logit_bias={EOS: -100.0}),
        constrained(regex="(a{90})", n=2),
        SamplingParams(max_tokens=90, temperature=1.0, seed=5),
    ]
    alone = ask(runner, PROMPT, params[2], eos_token_ids=[EOS], overlap=overlap)
    hostile, constrained_one, plain = ask_together(
        runner, [PROMPT] * 3, params, eos_token_ids=[EOS], overlap=overlap
    )
    (failed,) = hostile.completions
    assert failed.finish_reason is FinishReason.ERROR and set(failed.token_ids) == {A}
    assert failed.text == "a" * len(failed.token_ids)
    assert whole(constrained_one) == [([A] * 90 + [EOS], "a" * 90, FinishReason.EOS)] * 2
    assert whole(plain) == whole(alone)
    (record,) = caplog.records
    assert "its grammar failed: " in record.message and "\n" not in record.message


@OVERLAP
def test_those_who_leave_take_nothing_with_them(overlap: bool, tiny_runner):
    """A closed stream, a cancelled call and an abort, each in the middle of the text."""
    long = constrained(regex="a{200}", n=2, max_tokens=300)

    async def body(llm: AsyncLLM):
        stayed = asyncio.ensure_future(llm.generate(PROMPT, constrained(regex="a{60}")))
        stream = llm.stream(PROMPT, long)
        await anext(stream)
        cancelled = asyncio.ensure_future(llm.generate(PROMPT, long))
        aborted = asyncio.ensure_future(llm.generate(PROMPT, long, request_id="x"))
        await anext(stream)
        await stream.aclose()
        cancelled.cancel()
        while not await llm.abort(["x"]):
            await asyncio.sleep(0)
        results = await asyncio.gather(cancelled, aborted, return_exceptions=True)
        again = await llm.generate(PROMPT, constrained(regex="a{60}"))
        return await stayed, again, results

    stayed, again, results = with_model_front(
        tiny_runner(MODEL), body, eos_token_ids=[EOS], overlap=overlap
    )
    assert whole(stayed) == whole(again) == [([A] * 60 + [EOS], "a" * 60, FinishReason.EOS)]
    cancelled, aborted = results
    assert isinstance(cancelled, asyncio.CancelledError) and isinstance(aborted, RequestOutput)
    assert {c.finish_reason for c in aborted.completions} == {FinishReason.CANCELLED}


def test_a_failed_step_forgets_who_was_where(tiny_runner):
    """Matchers of lost requests are of no consequence for the next."""

    def fail_once(engine: Engine, num_steps: int) -> None:
        if num_steps == 6:
            raise RuntimeError("injected")

    async def body(llm: AsyncLLM):
        params = constrained(regex="a{20}", n=2)
        calls = [llm.generate(PROMPT, params) for _ in range(2)]
        lost = await asyncio.gather(*calls, return_exceptions=True)
        return lost, await llm.generate(PROMPT, params)

    lost, after = with_model_front(
        tiny_runner(MODEL), body, eos_token_ids=[EOS], interrupt=fail_once
    )
    assert {type(error).__name__ for error in lost} == {"EngineFailedError"}
    assert whole(after) == [([A] * 20 + [EOS], "a" * 20, FinishReason.EOS)] * 2
