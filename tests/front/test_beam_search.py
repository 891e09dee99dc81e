"""LLM.beam_search and AsyncLLM.beam_search: what users give and get; cancels and aborts."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.engines import fresh_engine
from helpers.fake_runner import FakeRunner
from helpers.model_fronts import KeptRunner, with_model_front

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.errors import (
    ContextTooLongError,
    InvalidFieldError,
    NonFiniteLogitsError,
    RequestCancelledError,
)
from jaxpaged.llm import LLM
from jaxpaged.outputs import BeamSearchOutput
from jaxpaged.request import FinishReason
from jaxpaged.runner.runner import Runner
from jaxpaged.sampling_params import ChatPrompt, SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults

GOLDEN = Path(__file__).parents[1] / "goldens" / "tiny_qwen3_beams.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
# Four hypotheses, three of which end before max_tokens.
CASE = CASES[1]


@pytest.fixture
def qwen3(tiny_runner) -> Runner:
    return tiny_runner("tiny_qwen3")


def front_over(engine: Engine, eos_token_ids: frozenset[int] = frozenset()) -> AsyncLLM:
    config = EngineConfig(engine.config.model, seed=0)
    return AsyncLLM.from_engine(config, engine, ByteTokenizer(), SamplingDefaults(), eos_token_ids)


@contextmanager
def model_llm(runner: Runner) -> Iterator[LLM]:
    front = front_over(fresh_engine(runner, wrapped=KeptRunner(runner)))
    with patch("jaxpaged.llm.AsyncLLM", lambda model: front):
        llm = LLM("tiny_qwen3")
    with llm:
        yield llm


def search_of(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "beam_width": case["beam_width"],
        "max_tokens": case["max_tokens"],
        "length_penalty": case["length_penalty"],
    }


def tokens_of(output: BeamSearchOutput) -> list[list[int]]:
    return [hypothesis.token_ids for hypothesis in output.hypotheses]


def check(output: BeamSearchOutput, case: dict[str, Any], ended_by: FinishReason) -> None:
    found, expected = output.hypotheses, case["hypotheses"]
    assert output.prompt_token_ids == case["prompt_token_ids"]
    assert tokens_of(output) == [h["token_ids"] for h in expected]
    for hypothesis, golden in zip(found, expected, strict=True):
        tokens, ends = hypothesis.token_ids, hypothesis.token_ids[-1] in case["end_token_ids"]
        assert hypothesis.score == pytest.approx(golden["score"], abs=2e-3)
        weight = len(tokens) ** case["length_penalty"]
        assert hypothesis.score == pytest.approx(hypothesis.cumulative_logprob / weight)
        assert hypothesis.finish_reason is (ended_by if ends else FinishReason.MAX_TOKENS)
        assert hypothesis.text == ByteTokenizer().decode(tokens[:-1] if ends else tokens)
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    assert output.usage.prompt_tokens == len(case["prompt_token_ids"])
    assert output.usage.completion_tokens == sum(len(h.token_ids) for h in found)


# --- answers -----------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts(qwen3):
    prompts = ["hello", list(b"hello"), ChatPrompt([{"role": "user", "content": "hi"}]), "hi"]
    with model_llm(qwen3) as llm:
        outputs = llm.beam_search(prompts, 3, 5, use_tqdm=False)
        texts = ["hello", "hello", "<|turn|>user\nhi<|end|><|turn|>assistant\n", "hi"]
        assert [o.prompt_token_ids for o in outputs] == [ByteTokenizer().encode(t) for t in texts]
        assert tokens_of(outputs[0]) == tokens_of(outputs[1]) != tokens_of(outputs[3])
        assert {len(output.hypotheses) for output in outputs} == {3}
        assert len({output.request_id for output in outputs}) == 4
        alone = [llm.beam_search(p, 3, 5, use_tqdm=False) for p in (prompts[0], prompts[1])]
        assert [[tokens_of(o) for o in answer] for answer in alone] == [[tokens_of(outputs[0])]] * 2
        assert llm.beam_search([], use_tqdm=False) == []


def test_the_defaults_and_the_progress_bar(qwen3, capsys):
    with model_llm(qwen3) as llm:
        (output,) = llm.beam_search("hello")
        assert "beam search" in capsys.readouterr().err
        assert [len(h.token_ids) for h in output.hypotheses] == [16] * 4
        named = llm.beam_search(
            "hello", beam_width=4, max_tokens=16, length_penalty=1.0, use_tqdm=False
        )
        assert tokens_of(named[0]) == tokens_of(output)
        assert capsys.readouterr().err == ""


def test_the_scores_are_those_of_teacher_forcing(qwen3):
    with model_llm(qwen3) as llm:
        (output,) = llm.beam_search(list(range(40, 60)), 3, 6, use_tqdm=False)
        for hypothesis in output.hypotheses:
            (score,) = llm.score(list(range(40, 60)), hypothesis.token_ids, use_tqdm=False)
            assert score.cumulative_logprob == pytest.approx(
                hypothesis.cumulative_logprob, abs=1e-4
            )


@pytest.mark.parametrize("case", CASES[1:6])
def test_finish_reasons_texts_and_scores(case, qwen3):
    """The same ends as EOS ids, as stop ids in their place, and as both."""
    prompt, ends = case["prompt_token_ids"], case["end_token_ids"]

    async def as_eos(llm: AsyncLLM) -> BeamSearchOutput:
        return await llm.beam_search(prompt, **search_of(case))

    async def as_stop_ids(llm: AsyncLLM) -> BeamSearchOutput:
        return await llm.beam_search(
            prompt, **search_of(case), ignore_eos=True, stop_token_ids=ends
        )

    async def as_both(llm: AsyncLLM) -> BeamSearchOutput:
        return await llm.beam_search(prompt, **search_of(case), stop_token_ids=ends[:-1])

    other = [255]
    check(with_model_front(qwen3, as_eos, eos_token_ids=ends), case, FinishReason.EOS)
    stopped = with_model_front(qwen3, as_stop_ids, eos_token_ids=other)
    check(stopped, case, FinishReason.STOP_TOKEN)
    mixed = with_model_front(qwen3, as_both, eos_token_ids=ends[-1:])
    assert tokens_of(mixed) == tokens_of(stopped)
    for hypothesis in mixed.hypotheses:
        is_eos = hypothesis.token_ids[-1] == ends[-1]
        assert (hypothesis.finish_reason is FinishReason.EOS) == is_eos


def test_the_context_ends_a_search(qwen3):
    async def body(llm: AsyncLLM) -> BeamSearchOutput:
        room = llm.info.max_model_len - 3
        return await llm.beam_search(list(range(5, 5 + room)), 2, 50)

    output = with_model_front(qwen3, body, num_blocks=4)
    reasons = {(len(h.token_ids), h.finish_reason) for h in output.hypotheses}
    assert reasons == {(3, FinishReason.CONTEXT_LENGTH)}


def test_the_block_saving_is_told(qwen3):
    async def body(llm: AsyncLLM) -> list[float | None]:
        prompt = list(range(5, 45))
        outputs = [await llm.beam_search(prompt, width, 6) for width in (1, 4)]
        return [output.block_saving for output in outputs]

    narrow, wide = with_model_front(qwen3, body)
    assert narrow == 0 and wide is not None and 0.3 < wide < 0.75


def test_searches_and_answers_run_together(qwen3):
    prompt, params = CASE["prompt_token_ids"], SamplingParams(max_tokens=12, temperature=0)

    async def body(llm: AsyncLLM):
        searches = [llm.beam_search(prompt, **search_of(CASE)) for _ in range(3)]
        answers = [llm.generate("hello", params) for _ in range(3)]
        return await asyncio.gather(*searches), await asyncio.gather(*answers)

    searches, answers = with_model_front(qwen3, body, eos_token_ids=CASE["end_token_ids"])
    for output in searches:
        check(output, CASE, FinishReason.EOS)
    assert len({tuple(answer.completions[0].token_ids) for answer in answers}) == 1


def test_one_refused_prompt_refuses_the_list(qwen3):
    with model_llm(qwen3) as llm:
        with pytest.raises(InvalidFieldError, match="beam_width=0"):
            llm.beam_search(["a", "b"], 0, use_tqdm=False)
        with pytest.raises(ContextTooLongError):
            llm.beam_search(["a", [5] * 10_000], use_tqdm=False)
        with pytest.raises(TypeError, match="logprobs"):
            llm.beam_search("a", logprobs=3, use_tqdm=False)
        (output,) = llm.beam_search("a", 2, 2, use_tqdm=False)
        assert len(output.hypotheses) == 2


# --- ends from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_cancelled_search_frees_everything(at, overlap, qwen3):
    """`with_model_front` asserts that every block is back."""
    cancelled = []

    async def body(llm: AsyncLLM) -> None:
        loop = asyncio.get_running_loop()
        call = asyncio.ensure_future(llm.beam_search(list(range(5, 45)), 4, 60))
        cancelled.append(lambda: loop.call_soon_threadsafe(call.cancel))
        with pytest.raises(asyncio.CancelledError):
            await call
        (hypothesis,) = (await llm.beam_search("hello", 1, 3)).hypotheses
        assert len(hypothesis.token_ids) == 3 and len(llm.live) == 0

    def interrupt(engine: Engine, num_steps: int) -> None:
        if num_steps == at:
            cancelled[0]()

    with_model_front(qwen3, body, interrupt=interrupt, overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_aborted_search_raises(at, overlap, qwen3):
    prompt = CASE["prompt_token_ids"]

    async def body(llm: AsyncLLM) -> None:
        aborted = llm.beam_search(list(range(5, 45)), 3, 60)
        other = llm.beam_search(prompt, **search_of(CASE))
        error, output = await asyncio.gather(aborted, other, return_exceptions=True)
        assert isinstance(error, RequestCancelledError) and "was aborted" in str(error)
        assert isinstance(output, BeamSearchOutput)
        check(output, CASE, FinishReason.EOS)

    def interrupt(engine: Engine, num_steps: int) -> None:
        if num_steps == at:
            assert engine.abort("1")  # the first request of this front

    ends = CASE["end_token_ids"]
    with_model_front(qwen3, body, interrupt=interrupt, overlap=overlap, eos_token_ids=ends)


# --- a tiny vocabulary -------------------------------------------------------------------------


class TinyRunner(FakeRunner):
    """The fake model with what an engine wants besides."""

    num_compiles_after_warmup = 0

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


def search_tiny(runner: Runner, *args: int, bad: int | None = None, **options) -> BeamSearchOutput:
    """A search among three tokens; drawing the token `bad` means non-finite logits."""
    config = replace(fresh_engine(runner).config, vocab_size=3)

    async def run() -> BeamSearchOutput:
        fake = TinyRunner(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            vocab_size=3,
            non_finite_token_id=bad,
        )
        llm = front_over(Engine(config, fake))
        try:
            return await asyncio.wait_for(llm.beam_search([1, 2], *args, **options), timeout=20)
        finally:
            assert (await llm.stats()).used_blocks == 0
            llm.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("beam_width", "max_tokens", "ends", "num_hypotheses"),
    [
        (8, 1, [], 3),
        (8, 2, [], 8),
        (8, 9, [0, 1, 2], 3),
        (8, 2, [0], 7),
        (2, 9, [0, 1, 2], 2),
    ],
)
def test_fewer_hypotheses_than_beams(beam_width, max_tokens, ends, num_hypotheses, qwen3):
    output = search_tiny(qwen3, beam_width, max_tokens, stop_token_ids=ends)
    tokens = {tuple(hypothesis.token_ids) for hypothesis in output.hypotheses}
    assert len(tokens) == len(output.hypotheses) == num_hypotheses


def test_non_finite_logits_raise(qwen3):
    with pytest.raises(NonFiniteLogitsError, match="non-finite logits"):
        search_tiny(qwen3, 3, 30, bad=0)
