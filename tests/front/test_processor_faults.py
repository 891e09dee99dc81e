"""A user's own function on the logits: compiled once, and failing alone."""

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front
from helpers.oracle_logprobs import MODEL
from helpers.processors import asked, only, position, prompt_of

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import InvalidFieldError
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.runner.processors import LogitsProcessor, LogitsState
from jaxpaged.sampling_params import SamplingParams

PROMPT = [9, 40, 77, 130, 8]
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


def positions(start: int, count: int) -> list[int]:
    """What `position` draws."""
    return list(range(start, start + count))


# --- compiled once -----------------------------------------------------------------------------


def test_each_function_is_traced_and_compiled_once(tiny_runner):
    """By requests at the same time, in later ones, and in steps of any size."""
    runner = tiny_runner(MODEL)
    num_traces = [0, 0]

    def make(index: int) -> LogitsProcessor:
        def counting(logits: jax.Array, state: LogitsState) -> jax.Array:
            num_traces[index] += 1
            return only(state.position)

        return counting

    functions = [make(0), make(1)]

    async def body(llm: AsyncLLM):
        for num_requests in (6, 1, 3):
            calls = [
                llm.generate(PROMPT, asked(f, n=2)) for f in functions for _ in range(num_requests)
            ]
            await asyncio.gather(*calls)
        return (await llm.stats()).compiles_after_warmup

    before = runner._executables.programs.num_compiles
    assert with_model_front(runner, body) == 0
    assert num_traces == [1, 1]
    kinds = [key[0] for key in runner._executables.programs._compiled if key[-1] in functions]
    assert kinds == ["process"] * 2
    assert runner._executables.programs.num_compiles - before >= 2


# --- failing alone -----------------------------------------------------------------------------


def raises(logits: jax.Array, state: LogitsState) -> jax.Array:
    raise RuntimeError("the first line\nand the second")


def branches(logits: jax.Array, state: LogitsState) -> jax.Array:
    return logits if logits[0] > 0 else -logits


def nothing(logits: jax.Array, state: LogitsState) -> Any:
    return None


def no_state(logits: jax.Array) -> jax.Array:
    return logits


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, logits: jax.Array, state: LogitsState) -> jax.Array:
        return logits


BAD = [
    (raises, "failed: RuntimeError: the first line and the second"),
    (branches, "failed: TracerBoolConversionError: "),
    (nothing, "failed: AttributeError"),
    (no_state, "failed: TypeError: .*positional argument"),
    (lambda logits, state: logits[1:], r"gave float32\[299\] a row: must be floats\[300\]"),
    (lambda logits, state: logits[0], r"gave float32\[\] a row: must be floats\[300\]"),
    (lambda logits, state: logits.astype(jnp.int32), r"gave int32\[300\] a row: must be floats"),
    (lambda logits, state: (logits, logits), "failed: AttributeError"),
    (5, "^logits_processor=5 must be a function"),
    (Unhashable(), "logits_processor=.*unhashable"),
]


def test_what_is_no_such_function_is_refused_in_one_line(tiny_runner):
    async def body(llm: AsyncLLM):
        neighbour = asyncio.ensure_future(llm.generate(PROMPT, asked(position)))
        for processor, line in BAD:
            with pytest.raises(InvalidFieldError, match=line) as error:
                await llm.generate(PROMPT, asked(processor))
            assert error.value.field == "logits_processor"
            assert "\n" not in str(error.value) and len(str(error.value)) < 300
        return await neighbour, await llm.stats()

    output, stats = with_model_front(tiny_runner(MODEL), body)
    assert tokens_of(output) == positions(5, 20)
    assert stats.completion_tokens == 20


def test_other_floats_will_do(tiny_runner):
    def halves(logits: jax.Array, state: LogitsState) -> jax.Array:
        return only(state.position).astype(jnp.bfloat16)

    assert tokens_of(ask(tiny_runner(MODEL), PROMPT, asked(halves))) == positions(5, 20)


def never(value: float) -> LogitsProcessor:
    """Lets four tokens pass, then gives `value` for all."""

    def process(logits: jax.Array, state: LogitsState) -> jax.Array:
        return jnp.where(state.position >= len(PROMPT) + 4, value, only(state.position))

    return process


@OVERLAP
def test_nan_ends_its_own_rows(overlap: bool, tiny_runner):
    bad = [never(float("nan")), never(float("inf")), never(float("-inf"))]
    params = [asked(f, n=2) for f in bad]
    plain = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    runner = tiny_runner(MODEL)
    outputs: list[RequestOutput] = ask_together(
        runner, [PROMPT] * 5, [*params, asked(position), plain], overlap=overlap
    )
    for output in outputs[:3]:
        for completion in output.completions:
            assert completion.token_ids == positions(5, 4)
            assert completion.finish_reason is FinishReason.ERROR
    assert tokens_of(outputs[3]) == positions(5, 20)
    assert tokens_of(outputs[4]) == tokens_of(ask(runner, PROMPT, plain, overlap=overlap))


def test_one_row_of_a_function_fails_alone(tiny_runner):
    """The same function, two requests in every step: one gets NaN, the other does not."""

    def nan_for_long(logits: jax.Array, state: LogitsState) -> jax.Array:
        return jnp.where(state.position > 30, jnp.nan, only(state.position))

    prompts = [prompt_of(28), prompt_of(5)]
    outputs = ask_together(tiny_runner(MODEL), prompts, asked(nan_for_long, 10))
    assert tokens_of(outputs[0]) == positions(28, 3)
    assert outputs[0].completions[0].finish_reason is FinishReason.ERROR
    assert tokens_of(outputs[1]) == positions(5, 10)
    assert outputs[1].completions[0].finish_reason is FinishReason.MAX_TOKENS


def test_a_function_that_calls_back_into_python_is_refused(tiny_runner):
    def calls_back(logits, state):
        shape = jax.ShapeDtypeStruct(logits.shape, "float32")
        return jax.pure_callback(lambda x: x, shape, logits, vmap_method="sequential")

    async def body(llm: AsyncLLM):
        with pytest.raises(InvalidFieldError, match="uses pure_callback: it must be JAX only"):
            await llm.generate([5, 6], SamplingParams(logits_processor=calls_back))

    with_model_front(tiny_runner(MODEL), body)
