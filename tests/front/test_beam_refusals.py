"""Beam searches that are refused, each with the field, the value and the limit."""

import pytest
from helpers.model_fronts import with_model_front

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ContextTooLongError, InvalidFieldError

REFUSALS = [
    ({"beam_width": 0}, "beam_width", "beam_width=0 must be an integer between 1 and 64"),
    ({"beam_width": -1}, "beam_width", "beam_width=-1 must be"),
    ({"beam_width": True}, "beam_width", "beam_width=True must be an integer"),
    ({"beam_width": 2.0}, "beam_width", "beam_width=2.0 must be an integer"),
    ({"beam_width": None}, "beam_width", "beam_width=None must be an integer"),
    ({"beam_width": 65}, "beam_width", "between 1 and 64"),
    ({"beam_width": 9}, "beam_width", "beam_width=9 must be at most 8: .*max_num_seqs=8"),
    (
        {"beam_width": 8, "stop_token_ids": range(13)},
        "beam_width",
        "beam_width=8 must be at most 7: 20 best tokens less 13 end ids",
    ),
    ({"stop_token_ids": range(50)}, "beam_width", "50 end ids"),
    ({"length_penalty": float("nan")}, "length_penalty", r"length_penalty=nan .*in \[-10, 10\]"),
    ({"length_penalty": 11}, "length_penalty", r"length_penalty=11 .*in \[-10, 10\]"),
    ({"length_penalty": -10.5}, "length_penalty", "length_penalty=-10.5 must be"),
    ({"length_penalty": None}, "length_penalty", "length_penalty=None must be a finite number"),
    ({"length_penalty": True}, "length_penalty", "length_penalty=True must be a finite number"),
    ({"length_penalty": "1"}, "length_penalty", "length_penalty='1' must be a finite number"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be at least 1"),
    ({"max_tokens": -3}, "max_tokens", "max_tokens=-3 must be"),
    ({"stop_token_ids": [300]}, "stop_token_ids", r"stop_token_ids\[0\] is 300"),
    ({"ignore_eos": 1}, "ignore_eos", "ignore_eos=1 must be true or false"),
]


def test_refusals(tiny_runner):
    async def body(llm: AsyncLLM) -> None:
        for options, field, message in REFUSALS:
            with pytest.raises(InvalidFieldError, match=message) as refused:
                await llm.beam_search("hello", **options)
            assert refused.value.field == field, options
        with pytest.raises(ContextTooLongError, match="max_model_len"):
            await llm.beam_search([5] * llm.info.max_model_len)
        with pytest.raises(InvalidFieldError, match="prompt"):
            await llm.beam_search([])
        assert len((await llm.beam_search("hello", 8, 1, -10)).hypotheses) == 8
        assert len((await llm.beam_search("hello", 1, 1, 10)).hypotheses) == 1

    with_model_front(tiny_runner("tiny_qwen3"), body)
