"""A user's own function on the logits: what it sees, what it may do, and how it fails alone."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from helpers.byte_tokenizer import EOS
from helpers.model_fronts import ask, ask_together, tokens_of, with_model_front
from helpers.numpy_sampling import adjusted_for
from helpers.oracle_logprobs import MODEL, check_position, oracle_logits, oracle_logprobs
from helpers.processors import IDS, asked, only, position, prompt_of

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.request import FinishReason
from jaxpaged.runner.processors import LogitsProcessor, LogitsState
from jaxpaged.sampling_params import Constraint, SamplingParams

VOCAB_SIZE = 300
PROMPT = [9, 40, 77, 130, 8]
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])


# --- functions that spell out what they see ----------------------------------------------------


def next_id(logits: jax.Array, state: LogitsState) -> jax.Array:
    return only((state.last_token_id + 1) % VOCAB_SIZE)


def lowest_of_prompt(logits: jax.Array, state: LogitsState) -> jax.Array:
    return only(jnp.argmax(state.in_prompt))


def num_output(logits: jax.Array, state: LogitsState) -> jax.Array:
    return only(state.output_counts.sum())


def in_threes(logits: jax.Array, state: LogitsState) -> jax.Array:
    """The lowest id from 100 that came less than three times."""
    return only(jnp.argmax((state.output_counts < 3) & (IDS >= 100)))


def as_it_is(logits: jax.Array, state: LogitsState) -> jax.Array:
    return logits


def even_less(logits: jax.Array, state: LogitsState) -> jax.Array:
    return jnp.where(IDS % 2 == 0, logits - 3.0, logits)


def all_equal(logits: jax.Array, state: LogitsState) -> jax.Array:
    return jnp.zeros_like(logits)


SEEN: dict[LogitsProcessor, Callable[[Sequence[int], int], int]] = {
    position: lambda prompt, i: len(prompt) + i,
    next_id: lambda prompt, i: (prompt[-1] + 1 + i) % VOCAB_SIZE,
    lowest_of_prompt: lambda prompt, i: min(prompt),
    num_output: lambda prompt, i: i,
    in_threes: lambda prompt, i: 100 + i // 3,
}


def wanted(processor: LogitsProcessor, prompt: Sequence[int], num_tokens: int) -> list[int]:
    return [SEEN[processor](prompt, i) for i in range(num_tokens)]


@OVERLAP
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_tokens": 8}, {"num_blocks": 14}, {"max_num_seqs": 2}],
    ids=["as it is", "chunked", "preempted", "queued"],
)
def test_what_they_see(changes: dict[str, int], overlap: bool, tiny_runner):
    """Several functions and plain rows in one batch; n sequences each count their own."""
    runner = tiny_runner(MODEL)
    plain = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
    params = [asked(f, 60, n=1 + 2 * (f is in_threes), temperature=0.7) for f in SEEN]
    prompts = [prompt_of(20, i) for i in range(len(params))]
    together = ask_together(
        runner,
        [p for prompt in prompts for p in (prompt, PROMPT)],
        [p for own in params for p in (own, plain)],
        overlap=overlap,
        **changes,
    )
    for processor, prompt, output in zip(SEEN, prompts, together[::2], strict=True):
        for completion in output.completions:
            assert completion.token_ids == wanted(processor, prompt, 60), processor.__name__
    alone = tokens_of(ask(runner, PROMPT, plain))
    assert [tokens_of(output) for output in together[1::2]] == [alone] * len(params)
    preemptions = sum(output.usage.preemptions for output in together)
    assert (preemptions > 0) == ("num_blocks" in changes)


def test_a_hit_in_the_cache_changes_nothing(tiny_runner):
    prompt = prompt_of(40)

    async def body(llm: AsyncLLM):
        return [await llm.generate(prompt, asked(f)) for f in SEEN for _ in range(2)]

    outputs = with_model_front(tiny_runner(MODEL), body)
    assert outputs[-1].usage.cached_prompt_tokens == 39
    for i, output in enumerate(outputs):
        assert tokens_of(output) == wanted(list(SEEN)[i // 2], prompt, 20)


def test_a_row_forgets_the_function_of_the_one_before(tiny_runner):
    plain = SamplingParams(max_tokens=10, temperature=0)

    async def body(llm: AsyncLLM):
        params = [plain, asked(position, 10), plain, asked(next_id, 10), plain]
        return [tokens_of(await llm.generate(PROMPT, p)) for p in params]

    first, *others = with_model_front(tiny_runner(MODEL), body, max_num_seqs=1)
    expected = [wanted(position, PROMPT, 10), first, wanted(next_id, PROMPT, 10), first]
    assert others == expected


# --- with the other options --------------------------------------------------------------------


def test_the_same_function_gives_the_same_as_none(tiny_runner):
    options = [
        {},
        {"temperature": 1.0, "seed": 5, "n": 3},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
        {"temperature": 0.8, "seed": 1, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"min_tokens": 5, "stop_token_ids": [40, 9]},
    ]
    params = [asked(f, **changes) for changes in options for f in (None, as_it_is)]
    outputs = ask_together(tiny_runner(MODEL), [PROMPT] * len(params), params)
    for without, same in zip(outputs[::2], outputs[1::2], strict=True):
        assert [c.token_ids for c in same.completions] == [c.token_ids for c in without.completions]


@OVERLAP
def test_it_comes_behind_penalties_and_biases(overlap: bool, tiny_runner):
    params = asked(
        even_less, repetition_penalty=1.6, frequency_penalty=1.0, logit_bias={20: 8.0, 21: 6.0}
    )
    tokens = tokens_of(ask(tiny_runner(MODEL), PROMPT, params, overlap=overlap))
    rows = oracle_logits([*PROMPT, *tokens])[len(PROMPT) - 1 :]
    for i, token_id in enumerate(tokens):
        logits = adjusted_for(params, rows[i], PROMPT, tokens[:i])
        logits[::2] -= 3.0
        assert logits[token_id] > logits.max() - 1e-3
    without = tokens_of(ask(tiny_runner(MODEL), PROMPT, asked(None)))
    assert tokens != without


@OVERLAP
def test_what_was_masked_stays_masked(overlap: bool, tiny_runner):
    """Allowed ids, min_tokens and a grammar hold, whatever the function makes of the logits."""
    params = [
        asked(all_equal, 4, allowed_token_ids=[7, 5]),
        asked(all_equal, 9, stop_token_ids=[0], min_tokens=3),
        asked(all_equal, 50, constraint=Constraint(regex="[b-d]{3}x[0-9]?")),
        asked(num_output, 9, constraint=Constraint(regex="abc")),
    ]
    outputs = ask_together(
        tiny_runner(MODEL), [PROMPT] * len(params), params, eos_token_ids=[EOS], overlap=overlap
    )
    assert [tokens_of(output) for output in outputs] == [
        [5] * 4,
        [1, 1, 1, 0],
        [*b"bbbx0", EOS],
        [],
    ]
    assert outputs[3].completions[0].finish_reason is FinishReason.ERROR


def test_texts_stops_and_logprobs_are_as_ever(tiny_runner):
    def alphabet(logits: jax.Array, state: LogitsState) -> jax.Array:
        return only(state.output_counts.sum() + ord("a"))

    params = asked(alphabet, stop="fg", logprobs=2)
    (completion,) = ask(tiny_runner(MODEL), PROMPT, params).completions
    assert (completion.text, completion.matched_stop) == ("abcde", "fg")
    assert completion.logprobs is not None
    rows = oracle_logprobs([*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    for i, told in enumerate(completion.logprobs):
        check_position(told, rows[i], completion.token_ids[i], 2)
