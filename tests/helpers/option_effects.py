"""How each sampling option is seen to be obeyed: by its effect on a tiny model's answer."""

import math
from collections.abc import Awaitable, Callable
from typing import Any

import jax.numpy as jnp
import pytest
from helpers.every_field import Ask

# The tiny model's greedy answer to PROMPT (tests/goldens); its fifth token is an EOS id here, and
# H is a special token.
PROMPT = [259]
TOKENS = [133, 241, 133, ord("F"), 136, ord("H"), ord("/"), 132]
EOS, F, H = 136, ord("F"), ord("H")
LONG_PROMPT = list(range(40, 80))
GREEDY = {"temperature": 0.0, "max_tokens": len(TOKENS), "ignore_eos": True}
HOT = GREEDY | {"temperature": 1.5, "seed": 7}
Observe = Callable[[Ask], Awaitable[None]]
OBEYED: dict[str, Observe] = {}


def obeyed(observe: Observe) -> Observe:
    """Puts a function into the table under the name of its option."""
    OBEYED[observe.__name__] = observe
    return observe


async def tokens_of(ask: Ask, **options: Any) -> list[int]:
    return (await ask(PROMPT, **(GREEDY | options))).only.token_ids


# --- how each option is seen to be obeyed ------------------------------------------------------


@obeyed
async def max_tokens(ask: Ask) -> None:
    told = (await ask(PROMPT, **GREEDY | {"max_tokens": 3})).only
    assert (told.token_ids, told.finish_reason) == (TOKENS[:3], "max_tokens")


@obeyed
async def min_tokens(ask: Ask) -> None:
    assert await tokens_of(ask, stop_token_ids=[133, F]) == [133]
    tokens = await tokens_of(ask, stop_token_ids=[133, F], min_tokens=5)
    assert len(tokens) >= 5 and not {133, F} & set(tokens[:5])


@obeyed
async def temperature(ask: Ask) -> None:
    assert await tokens_of(ask, seed=7) == TOKENS
    assert await tokens_of(ask, temperature=1.5, seed=7) != TOKENS


@obeyed
async def top_k(ask: Ask) -> None:
    assert await tokens_of(ask, **HOT | {"top_k": 1}) == TOKENS


@obeyed
async def top_p(ask: Ask) -> None:
    assert await tokens_of(ask, **HOT | {"top_p": 1e-6}) == TOKENS


@obeyed
async def min_p(ask: Ask) -> None:
    assert await tokens_of(ask, **HOT | {"min_p": 1.0}) == TOKENS


@obeyed
async def repetition_penalty(ask: Ask) -> None:
    tokens = await tokens_of(ask, repetition_penalty=1e6)
    assert tokens[:2] == TOKENS[:2] and len(set(tokens)) == len(tokens)


@obeyed
async def presence_penalty(ask: Ask) -> None:
    """The third token was drawn before, and is less than 2 better than the next."""
    tokens = await tokens_of(ask, presence_penalty=2.0)
    assert tokens[:2] == TOKENS[:2] and tokens[2] != TOKENS[2] == TOKENS[0]


@obeyed
async def frequency_penalty(ask: Ask) -> None:
    """Having been drawn once would not be enough to bring F behind H."""
    biased = {"logit_bias": {F: 100.0, H: 95.0}}
    tokens = await tokens_of(ask, **biased, frequency_penalty=2.0)
    assert tokens[:3] == [F, F, H] and set(tokens) == {F, H}
    assert set(await tokens_of(ask, **biased, presence_penalty=2.0)) == {F}


@obeyed
async def seed(ask: Ask) -> None:
    answers = [(await ask(PROMPT, **HOT | {"seed": i})).only for i in (7, 7, -(2**63))]
    assert [told.seed for told in answers] == [7, 7, -(2**63)]
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids
    assert (await ask(PROMPT)).only.seed != (await ask(PROMPT)).only.seed


@obeyed
async def n(ask: Ask) -> None:
    answer = await ask(PROMPT, **HOT | {"n": 3})
    assert [told.seed for told in answer.completions] == [7, 8, 9]
    for told in answer.completions:
        assert told.token_ids == await tokens_of(ask, **HOT | {"seed": told.seed})


@obeyed
async def logit_bias(ask: Ask) -> None:
    assert await tokens_of(ask, logit_bias={H: 100.0}) == [H] * len(TOKENS)
    assert 133 not in await tokens_of(ask, logit_bias={133: -100.0})


@obeyed
async def allowed_token_ids(ask: Ask) -> None:
    assert set(await tokens_of(ask, **HOT, allowed_token_ids=[0, 299])) <= {0, 299}


@obeyed
async def stop(ask: Ask) -> None:
    told = (await ask(PROMPT, **GREEDY, stop=["zz", "F"])).only
    assert (told.token_ids, told.matched_stop) == (TOKENS[:4], "F")
    assert told.finish_reason == "stop_string" and told.text and "F" not in told.text


@obeyed
async def include_stop_string(ask: Ask) -> None:
    for include in (False, True):
        told = (await ask(PROMPT, **GREEDY, stop=["F"], include_stop_string=include)).only
        assert told.text.endswith("F") == include


@obeyed
async def stop_token_ids(ask: Ask) -> None:
    told = (await ask(PROMPT, **GREEDY, stop_token_ids=[299, F])).only
    assert (told.token_ids, told.finish_reason) == (TOKENS[:4], "stop_token")
    assert told.matched_stop == F and "F" not in told.text


@obeyed
async def ignore_eos(ask: Ask) -> None:
    told = (await ask(PROMPT, **GREEDY | {"ignore_eos": False})).only
    assert (told.token_ids, told.finish_reason) == (TOKENS[:5], "eos")
    assert await tokens_of(ask) == TOKENS


@obeyed
async def logprobs(ask: Ask) -> None:
    assert (await ask(PROMPT, **GREEDY)).only.logprobs == []
    for k in (0, 3):
        told = (await ask(PROMPT, **HOT, logprobs=k)).only
        assert [position.chosen_id for position in told.logprobs] == told.token_ids
        for position in told.logprobs:
            assert len(position.top_ids) == k
            assert (position.chosen_id in position.top_ids) == (position.rank <= k)
        total = sum(position.logprob for position in told.logprobs)
        assert told.cumulative_logprob == pytest.approx(total) and total < 0
    greedy = (await ask(PROMPT, **GREEDY, logprobs=1)).only
    assert [position.top_ids for position in greedy.logprobs] == [[i] for i in TOKENS]


@obeyed
async def prompt_logprobs(ask: Ask) -> None:
    assert (await ask(LONG_PROMPT, **GREEDY)).prompt_logprobs == []
    for k in (0, 2):
        first, *others = (await ask(LONG_PROMPT, **GREEDY, prompt_logprobs=k)).prompt_logprobs
        assert first.chosen_id is None and first.top_ids == []
        assert [position.chosen_id for position in others] == LONG_PROMPT[1:]
        assert {len(position.top_ids) for position in others} == {k}
        assert all(-math.inf < position.logprob < 0 for position in others)


@obeyed
async def skip_special_tokens(ask: Ask) -> None:
    for skip in (True, False):
        told = (await ask(PROMPT, **GREEDY, skip_special_tokens=skip)).only
        assert told.token_ids == TOKENS and ("H" in told.text) != skip


@obeyed
async def use_prefix_cache(ask: Ask) -> None:
    await ask(LONG_PROMPT, **GREEDY)
    assert (await ask(LONG_PROMPT, **GREEDY, use_prefix_cache=False)).cached_prompt_tokens == 0
    assert (await ask(LONG_PROMPT, **GREEDY, use_prefix_cache=True)).cached_prompt_tokens == 32


@obeyed
async def cache_salt(ask: Ask) -> None:
    salts = ("a", "b", "a")
    answers = [await ask(LONG_PROMPT, **GREEDY, cache_salt=salt) for salt in salts]
    assert [answer.cached_prompt_tokens for answer in answers] == [0, 0, 32]


async def constrained(ask: Ask, **constraint: Any) -> str:
    """The text of an answer that would otherwise be another one."""
    return (await ask(PROMPT, temperature=0.0, max_tokens=30, **constraint)).only.text


@obeyed
async def json_schema(ask: Ask) -> None:
    text = await constrained(ask, json_schema='{"enum": ["one of one"]}')
    assert text == '"one of one"'


@obeyed
async def regex(ask: Ask) -> None:
    assert await constrained(ask, regex="F(az){3}") == "Fazazaz"


@obeyed
async def choice(ask: Ask) -> None:
    assert await constrained(ask, choice=["first", "second"]) in ("first", "second")


@obeyed
async def grammar(ask: Ask) -> None:
    assert await constrained(ask, grammar='start: "a" "b"') == "ab"


@obeyed
async def logits_processor(ask: Ask) -> None:
    def only_h(logits: Any, state: Any) -> Any:
        return jnp.where(jnp.arange(logits.shape[0]) == H, logits, -jnp.inf)

    assert await tokens_of(ask, logits_processor=only_h) == [H] * len(TOKENS)
