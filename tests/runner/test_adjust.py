"""Masks, biases and penalties against a plain NumPy reference, on random logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.adjust_cases import (
    OPTIONS,
    VOCAB,
    Case,
    adjustments_of,
    ids_of,
    logits_of,
    random_case,
)
from helpers.numpy_sampling import adjusted_logits
from helpers.sampler import draw, make_inputs, words_of

from jaxpaged.runner.adjust import (
    Adjustments,
    adjust_logits,
    adjust_step,
    unpack_masks,
)
from jaxpaged.runner.sampling import Variant

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TOKENS = ("prompt_token_ids", "output_token_ids")
ALL_ALLOWED = -1  # every bit of a mask's word


def inputs_of(cases: list[Case], **changes: Any) -> Any:
    """What a step is told of these cases' rows."""
    num_prompt, num_output = (
        np.array([len(case.options.get(name, [])) for case in cases]) for name in TOKENS
    )
    min_tokens = np.array([case.options.get("min_tokens", 0) for case in cases])
    options: dict[str, Any] = {
        name: [case.options.get(name, float(name == "repetition_penalty")) for case in cases]
        for name in PENALTIES
    }
    options["first_end_position"] = num_prompt + min_tokens
    options["positions"] = num_prompt + num_output
    return make_inputs(len(cases), **(options | changes))


adjust = jax.jit(adjust_logits)


def adjusted(cases: list[Case], **changes: Any) -> np.ndarray:
    return np.asarray(adjust(logits_of(cases), *adjustments_of(cases), inputs_of(cases, **changes)))


def check(found: np.ndarray, case: Case, want: np.ndarray) -> None:
    """Masked exactly where the reference masks; elsewhere equal to a few roundings of float32.

    A rounding is relative to the numbers that were added, and the repetition penalty enlarges it.
    """
    with np.errstate(over="ignore"):
        is_masked = np.isneginf(want.astype(np.float32))
    np.testing.assert_array_equal(np.isneginf(found), is_masked)
    options = case.options
    scale = np.abs(case.logits.astype(np.float64))
    for i, bias in options.get("logit_bias", {}).items():
        scale[i] += abs(bias)
    output = options.get("output_token_ids", [])
    repetition = options.get("repetition_penalty", 1.0)
    for i in {*options.get("prompt_token_ids", []), *output}:
        scale[i] *= max(repetition, 1 / repetition)
    counts = np.bincount(np.array(output, int), minlength=len(scale))
    scale += counts * abs(options.get("frequency_penalty", 0.0))
    scale += abs(options.get("presence_penalty", 0.0))
    limit = 4 * np.finfo(np.float32).eps * scale + np.finfo(np.float32).tiny
    is_open = ~is_masked
    assert (np.abs(found[is_open] - want[is_open]) <= limit[is_open]).all()


# --- against the reference ---------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_the_reference_s(name):
    rng = np.random.default_rng(21)
    cases = [random_case(rng, (name,)) for _ in range(64)]
    found = adjusted(cases)
    assert not np.array_equal(found, logits_of(cases)), "the option did nothing"
    for row, case in zip(found, cases, strict=True):
        check(row, case, case.want())


def test_all_options_together_are_the_reference_s():
    rng = np.random.default_rng(22)
    some = [tuple(n for n in OPTIONS if rng.random() < 0.6) for _ in range(200)]
    cases = [random_case(rng, names) for names in [*some, *[tuple(OPTIONS)] * 100]]
    for row, case in zip(adjusted(cases), cases, strict=True):
        check(row, case, case.want())


def test_rows_without_options_come_back_bit_for_bit():
    rng = np.random.default_rng(23)
    cases = [random_case(rng, tuple(OPTIONS)) for _ in range(64)]
    cases[1].logits[[3, 4, 5]] = np.nan, -0.0, np.inf
    is_adjusted = np.arange(64) % 2 == 0
    penalties = [case.options["repetition_penalty"] for case in cases]
    found = adjusted(cases, repetition_penalty=np.where(is_adjusted, penalties, 0.0))
    for row, case, is_on in zip(found, cases, is_adjusted, strict=True):
        if is_on:
            check(row, case, case.want())
        else:
            np.testing.assert_array_equal(row.view(np.int32), case.logits.view(np.int32))


def test_first_token_is_adjusted_without_any_output():
    """B25, B36: the first token obeys too, and its prompt counts for the repetition penalty."""
    logits = np.zeros(VOCAB, np.float32)
    logits[[5, 6, 7]] = 9.0, 8.0, 7.0
    options = {"prompt_token_ids": [5, 5, 5], "repetition_penalty": 1e6, "logit_bias": {6: -100.0}}
    (row,) = adjusted([Case(logits, options | {"presence_penalty": 2.0, "frequency_penalty": 2.0})])
    assert row.argmax() == 7
    assert row[5] == pytest.approx(9e-6) and row[6] == -92.0 and row[0] == 0.0


# --- the comparison can fail -------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda o: {"prompt_token_ids": []},
        lambda o: {"output_token_ids": o["output_token_ids"][:-1]},
        lambda o: {"output_token_ids": o["prompt_token_ids"] + o["output_token_ids"]},
        lambda o: {"min_tokens": 0},
        lambda o: {"end_token_ids": o["end_token_ids"][1:]},
        lambda o: {"allowed_token_ids": None},
        lambda o: {"logit_bias": {i: 1.001 * b for i, b in o["logit_bias"].items()}},
        lambda o: {"repetition_penalty": 1.3001},
        lambda o: {"presence_penalty": o["frequency_penalty"]},
    ],
)
def test_a_wrong_value_shows(wrong):
    ids = list(range(0, VOCAB, 2))
    options = {
        "prompt_token_ids": [2, 4, 6],
        "output_token_ids": [4, 8, 8, 10],
        "end_token_ids": [12, 14],
        "min_tokens": 5,
        "logit_bias": {2: 3.0, 12: 50.0, 40: -7.0},
        "allowed_token_ids": ids,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    case = Case(np.random.default_rng(2).normal(0, 3, VOCAB).astype(np.float32), options)
    (row,) = adjusted([case])
    check(row, case, case.want())
    with pytest.raises(AssertionError):
        check(row, case, case.want(**wrong(options)))


def test_reference_by_hand():
    def of(logits: list[float], **options: Any) -> list[float]:
        return adjusted_logits(np.array(logits), **options).tolist()

    inf = np.inf
    assert of([1, 2, 3]) == [1, 2, 3]
    assert of([1, 2, 3], allowed_token_ids=[2], logit_bias={0: 100.0, 2: -1.0}) == [-inf, -inf, 2]
    # Until two tokens are there.
    ends = {"end_token_ids": [1], "min_tokens": 2, "logit_bias": {1: 100.0}}
    assert of([1, 2, 3], output_token_ids=[0], **ends) == [1, -inf, 3]
    assert of([1, 2, 3], output_token_ids=[0, 0], **ends) == [1, 102, 3]
    # Over prompt and output, once each; after the bias, by whose sign it goes.
    repeated = {"repetition_penalty": 2.0, "prompt_token_ids": [0, 0], "output_token_ids": [1, 1]}
    assert of([4, -4, 4], **repeated) == [2, -8, 4]
    assert of([-1, 1, 0], **repeated, logit_bias={0: 5.0, 1: -5.0}) == [2, -8, 0]
    # Presence and frequency only over the output, after the repetition penalty.
    assert of([4, 4, 4], **repeated, presence_penalty=1.0) == [2, 1, 4]
    assert of([4, 4, 4], **repeated, frequency_penalty=0.5) == [2, 1, 4]
    assert of([4, 4, 4], **repeated, frequency_penalty=-0.5, presence_penalty=0.25) == [2, 2.75, 4]
    assert of([-inf, 1, 1], **repeated, presence_penalty=-2.0) == [-inf, 2.5, 1]


# --- a sequence as it grows --------------------------------------------------------------------


def run_steps(cases: list[Case], num_steps: int, options: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens of each case, step by step, counted on the device.

    Rows lie in other places of the batch every step, and one padding row writes to the null row.
    """
    num_rows, rng = len(cases), np.random.default_rng(31)
    tokens, bias = adjustments_of([*cases, Case(cases[0].logits)])
    adjustments = Adjustments(tokens, bias)
    step = jax.jit(adjust_step)
    num_prompt = np.array([len(case.options["prompt_token_ids"]) for case in cases])
    drawn: list[list[int]] = [[] for _ in cases]
    for at in range(num_steps):
        places = rng.permutation(num_rows)
        inputs = make_inputs(
            num_rows + 1,
            rows=[*places, num_rows],
            positions=[*(num_prompt[places] + at), 0],
            last_token_ids=[*((drawn[i] or [VOCAB - 1])[-1] for i in places), VOCAB - 1],
            is_decode=[*[at > 0] * num_rows, False],
            first_end_position=[*num_prompt[places], 0],
            **{name: [*[value] * num_rows, 0.0] for name, value in options.items()},
        )
        logits = logits_of([*(cases[i] for i in places), cases[0]])
        masks = jnp.full((num_rows + 1, -(-VOCAB // 32)), ALL_ALLOWED, jnp.int32)
        adjusted_rows, adjustments = step(logits, adjustments, words_of(inputs), masks)
        for i, token in zip(
            places, np.asarray(draw(adjusted_rows, inputs, Variant.GREEDY)[0]), strict=False
        ):
            drawn[i].append(int(token))
    return drawn


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1.0, "presence_penalty": -2.0},
    ],
    ids=str,
)
def test_drawn_tokens_are_counted(options):
    rng = np.random.default_rng(32)
    cases = [
        Case(rng.normal(0, 1.5, VOCAB).astype(np.float32), {"prompt_token_ids": ids_of(rng, i)})
        for i in range(6)
    ]
    for case, drawn in zip(cases, run_steps(cases, 25, options), strict=True):
        for at, token in enumerate(drawn):
            want = case.want(output_token_ids=drawn[:at], **options)
            assert want[token] >= want.max() - 1e-5, f"token {at} is {token}"


def test_a_loved_token_never_comes_twice():
    """B25: not even with a step's delay, nor when the prompt had it."""
    logits = np.abs(np.random.default_rng(33).normal(3, 1, VOCAB)).astype(np.float32)
    logits[77] = 50.0
    cases = [Case(logits, {"prompt_token_ids": prompt}) for prompt in ([1], [77, 77])]
    first, second = run_steps(cases, 30, {"repetition_penalty": 1e6})
    assert first[0] == 77 and 77 not in second
    assert len(set(first)) == len(set(second)) == 30


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, VOCAB])
def test_masks_are_read_bit_by_bit(vocab):
    words = np.random.default_rng(34).integers(0, 2**32, (5, -(-vocab // 32)), np.uint32)
    words[0], words[1] = 0, 2**32 - 1
    found = np.asarray(unpack_masks(jnp.asarray(words.view(np.int32)), vocab))
    for row, mask in zip(words.tolist(), found, strict=True):
        assert mask.tolist() == [bool(row[i // 32] >> i % 32 & 1) for i in range(vocab)]
