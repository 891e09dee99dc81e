"""Bad input gets one clear line, and the front goes on (SEMANTICS; B33, B35, B52, B53)."""

import asyncio
import math

import numpy as np
import pytest
from helpers.fronts import scripted_front, scripted_llm

from jaxpaged.errors import (
    ContextTooLongError,
    DuplicateRequestIdError,
    InvalidFieldError,
    JaxpagedError,
    QueueFullError,
)
from jaxpaged.outputs import Delta
from jaxpaged.sampling_params import ChatPrompt, SamplingParams

NAN, INF = float("nan"), float("inf")

# (what is asked, the error's class, what its line says)
BAD_PROMPTS = [
    ("", InvalidFieldError, "the prompt is empty"),
    ([], InvalidFieldError, "the prompt is empty"),
    ([-1], InvalidFieldError, "prompt token 0 is -1: ids are 0 to 299"),
    ([5, 300], InvalidFieldError, "prompt token 1 is 300: ids are 0 to 299"),
    ([2**40], InvalidFieldError, "prompt token 0 is 1099511627776: ids are 0 to 299"),
    ([1.5], InvalidFieldError, "prompt token 0 is 1.5, not an integer"),
    ([None], InvalidFieldError, "prompt token 0 is None, not an integer"),
    ([True], InvalidFieldError, "prompt token 0 is True, not an integer"),
    (b"hi", InvalidFieldError, "prompt=b'hi' must be a text"),
    (None, InvalidFieldError, "prompt=None must be a text, a list of token ids or a ChatPrompt"),
    ({"prompt": "hi"}, InvalidFieldError, "prompt={'prompt': 'hi'} must be a text"),
    ([np.array([1, 2])], InvalidFieldError, "prompt token 0 is array"),
    ([1] * 256, ContextTooLongError, "256 tokens: with one more it must fit max_model_len=256"),
    ("x" * 256, ContextTooLongError, "256 tokens: with one more it must fit max_model_len=256"),
]
BAD_PARAMS = [
    ({"max_tokens": -5}, "max_tokens=-5 must be an integer at least 0"),
    ({"max_tokens": 1.5}, "max_tokens=1.5 must be an integer"),
    ({"max_tokens": True}, "max_tokens=True must be an integer"),
    ({"temperature": NAN}, "temperature=nan must be a finite number >= 0"),
    ({"temperature": INF}, "temperature=inf must be a finite number >= 0"),
    ({"temperature": -0.1}, "temperature=-0.1 must be a finite number >= 0"),
    ({"temperature": 10**400}, "must be a finite number >= 0"),
    ({"temperature": 1e39}, r"temperature=1e\+39 must be a finite number >= 0"),
    ({"temperature": "hot"}, "temperature='hot' must be a finite number"),
    ({"top_p": 0}, r"top_p=0 must be a finite number in \(0, 1\]"),
    ({"top_p": 1.01}, r"top_p=1.01 must be a finite number in \(0, 1\]"),
    ({"top_p": NAN}, r"top_p=nan must be a finite number in \(0, 1\]"),
    ({"top_k": -2}, "top_k=-2 must be an integer at least -1"),
    ({"top_k": 1.0}, "top_k=1.0 must be an integer"),
    ({"min_p": -0.1}, r"min_p=-0.1 must be a finite number in \[0, 1\]"),
    ({"min_p": 1.5}, r"min_p=1.5 must be a finite number in \[0, 1\]"),
    ({"n": 0}, "n=0 must be an integer between 1 and 64"),
    ({"n": 65}, "n=65 must be an integer between 1 and 64"),
    ({"seed": 2**63}, "seed=9223372036854775808 must be an integer between"),
    ({"seed": -(2**63) - 1}, "seed=-9223372036854775809 must be an integer between"),
    ({"stop": ""}, "stop='' must be a string of 1 to 256 characters"),
    ({"stop": ["x" * 257]}, "must be a string of 1 to 256 characters"),
    ({"stop": ["x"] * 17}, "stop has 17 strings: at most 16 are allowed"),
    ({"stop": 5}, "stop=5 must be a string or a list of strings"),
    ({"stop": [5]}, "stop=5 must be a string of 1 to 256 characters"),
    ({"stop_token_ids": [300]}, r"stop_token_ids\[0\] is 300: ids are 0 to 299"),
    ({"stop_token_ids": [1, -1]}, r"stop_token_ids\[1\] is -1: ids are 0 to 299"),
    ({"stop_token_ids": [2**31 - 1]}, r"stop_token_ids\[0\] is 2147483647"),
    ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of token ids"),
    ({"stop_token_ids": 0}, "stop_token_ids=0 must be a list of token ids"),
    ({"stop": ["\ud800"]}, "stop holds a lone surrogate at character 0"),
    ({"cache_salt": "\ud800"}, "cache_salt holds a lone surrogate at character 0"),
    ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
    ({"include_stop_string": "no"}, "include_stop_string='no' must be true or false"),
    ({"skip_special_tokens": 0}, "skip_special_tokens=0 must be true or false"),
    ({"use_prefix_cache": 0}, "use_prefix_cache=0 must be true or false"),
    ({"cache_salt": 7}, "cache_salt=7 must be a string"),
    ({"max_tokens": 0}, "max_tokens=0 must be at least 1, unless n=1 and prompt_logprobs is set"),
    ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "max_tokens=0 must be .*n=2"),
    ({"min_tokens": -1}, "min_tokens=-1 must be an integer at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 must be at most max_tokens=8"),
    ({"repetition_penalty": 0}, "repetition_penalty=0 must be a finite number > 0"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46 must be a finite number > 0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
    ({"presence_penalty": 2.5}, r"presence_penalty=2.5 must be a finite number in \[-2, 2\]"),
    ({"frequency_penalty": math.nan}, r"frequency_penalty=nan must be .* in \[-2, 2\]"),
    ({"logit_bias": [5]}, r"logit_bias=\[5\] must map token ids to numbers"),
    ({"logit_bias": {300: 1.0}}, "logit_bias key 0 is 300: ids are 0 to 299"),
    ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\]=nan must be a finite number"),
    ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
    ({"allowed_token_ids": [300]}, r"allowed_token_ids\[0\] is 300: ids are 0 to 299"),
    (
        {"allowed_token_ids": [4, 5], "stop_token_ids": [4, 5], "min_tokens": 1},
        "allowed_token_ids are all EOS or stop ids, which min_tokens=1 forbids",
    ),
    ({"logprobs": 21}, "logprobs=21 must be an integer between 0 and 20"),
    ({"logprobs": -1}, "logprobs=-1 must be an integer between 0 and 20"),
    ({"prompt_logprobs": 10**9}, "prompt_logprobs=1000000000 must be .* between 0 and 20"),
    ({"logits_processor": 5}, "logits_processor=5 must be a function"),
]


def test_bad_prompts_and_params_are_refused_and_the_front_goes_on():
    async def run():
        front = scripted_front({"p": "fine"})
        llm = front.llm
        for prompt, kind, line in BAD_PROMPTS:
            with pytest.raises(kind, match=line) as error:
                await llm.generate(prompt, SamplingParams())
            assert "\n" not in str(error.value)
        for options, line in BAD_PARAMS:
            with pytest.raises(InvalidFieldError, match=line) as error:
                await llm.generate("p", SamplingParams(**options))
            assert error.value.field == next(iter(options)) and "\n" not in str(error.value)
            with pytest.raises(InvalidFieldError, match=line):
                async for _ in llm.stream_events("p", SamplingParams(**options)):
                    pass
        assert front.runner.num_steps == 0, "nothing was queued"
        output = await llm.generate("p", SamplingParams())
        assert output.completions[0].text == "fine"
        stats = await llm.stats()
        assert (stats.running_requests, stats.queued_requests, stats.used_blocks) == (0, 0, 0)
        llm.close()

    asyncio.run(run())


def test_priority_is_obeyed_where_it_is_scheduled():
    async def run():
        front = scripted_front(
            {"a": "1", "b": "2", "c": "3"}, scheduling="priority", max_num_seqs=1
        )
        order: list[str] = []

        async def ask(prompt: str, priority: int) -> None:
            await front.llm.generate(prompt, SamplingParams(priority=priority))
            order.append(prompt)

        front.runner.open.clear()
        tasks = [asyncio.ensure_future(ask("a", 5))]
        while not front.runner.num_steps:
            await asyncio.sleep(0)
        # The engine waits in the first step of "a"; the others queue up meanwhile.
        tasks += [asyncio.ensure_future(ask(prompt, i)) for prompt, i in (("b", 9), ("c", -3))]
        await asyncio.sleep(0)
        front.runner.open.set()
        await asyncio.gather(*tasks)
        front.llm.close()
        return order

    assert asyncio.run(run()) == ["a", "c", "b"]


def test_ten_megabytes_of_text_are_refused_without_tokenising_them():
    async def run():
        front = scripted_front({"p": "fine"})
        assert front.llm.tokenizer is not None
        encoded: list[int] = []
        encode = front.llm.tokenizer.encode

        def counted(text: str, add_special_tokens: bool = True) -> list[int]:
            encoded.append(len(text))
            return encode(text, add_special_tokens)

        front.llm.tokenizer.encode = counted  # type: ignore[method-assign]
        for character in "x한":
            with pytest.raises(ContextTooLongError, match=r"at least [0-9]+ tokens"):
                await front.llm.generate(character * 10_000_000, SamplingParams())
            with pytest.raises(ContextTooLongError, match=r"at least [0-9]+ tokens"):
                await front.llm.tokenize(character * 10_000_000)
            message = {"role": "user", "content": character * 10_000_000}
            with pytest.raises(ContextTooLongError, match=r"at least [0-9]+ tokens"):
                await front.llm.generate(ChatPrompt([message]), SamplingParams())
        with pytest.raises(ContextTooLongError, match="at least 100000 tokens"):
            await front.llm.tokenize(ChatPrompt([{"role": "user", "content": "x"}] * 100_000))
        assert encoded == []
        output = await front.llm.generate("p", SamplingParams())
        assert output.completions[0].text == "fine"
        front.llm.close()

    asyncio.run(run())


def test_a_request_id_runs_once_at_a_time():
    """B55."""

    async def run():
        front = scripted_front({"p": "x" * 9, "q": "y" * 9})
        llm, params = front.llm, SamplingParams()
        first = llm.stream("p", params, request_id="same")
        await anext(first)
        for _ in range(2):
            with pytest.raises(DuplicateRequestIdError, match="request_id='same' is running"):
                await llm.generate("q", params, request_id="same")
        assert await llm.abort(["same", "unknown"]) in (["same"], [])
        assert "".join([d.text async for d in first if isinstance(d, Delta)]) in "x" * 9
        # Free again after an abort, after an end, and after a refusal.
        for prompt in "pq":
            output = await llm.generate(prompt, params, request_id="same")
            assert output.request_id == "same" and output.completions[0].text[0] in "xy"
        with pytest.raises(InvalidFieldError, match="empty"):
            await llm.generate([], params, request_id="same")
        assert (await llm.generate("p", params, request_id="same")).request_id == "same"
        with pytest.raises(InvalidFieldError, match="request_id of 257 characters"):
            await llm.generate("p", params, request_id="i" * 257)
        llm.close()

    asyncio.run(run())


def test_a_full_queue_refuses_at_once():
    async def run():
        front = scripted_front({"p": "x"}, max_num_seqs=1, max_queued_requests=3)
        front.runner.open.clear()
        tasks = [
            asyncio.ensure_future(front.llm.generate("p", SamplingParams())) for _ in range(12)
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(task.exception(), QueueFullError) for task in done)
        assert "max_queued_requests=3" in str(next(iter(done)).exception())
        front.runner.open.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = [type(answer).__name__ for answer in answers]
        assert kinds.count("RequestOutput") >= 3 and kinds.count("QueueFullError") >= 1
        assert set(kinds) == {"RequestOutput", "QueueFullError"}
        # Nobody is counted for ever.
        for _ in range(5):
            await front.llm.generate("p", SamplingParams())
        front.llm.close()

    asyncio.run(run())


def test_one_bad_prompt_of_a_list_refuses_the_list():
    with scripted_llm({"p": "fine"}) as scripted:
        with pytest.raises(InvalidFieldError, match="ids are 0 to 299"):
            scripted.llm.generate(["p", [300]], use_tqdm=False)
        with pytest.raises(InvalidFieldError, match="params has 2 entries for 1 prompts"):
            scripted.llm.generate(["p"], [SamplingParams()] * 2, use_tqdm=False)
        assert scripted.llm.generate(["p"], use_tqdm=False)[0].completions[0].text == "fine"
        assert scripted.llm.generate([], use_tqdm=False) == []


def test_bad_conversations():
    async def run():
        front = scripted_front({"p": "fine"})
        with pytest.raises(JaxpagedError):
            await front.llm.generate(ChatPrompt([]), SamplingParams())
        front.llm.close()

    asyncio.run(run())


@pytest.mark.parametrize("request_id", ["a\nb", "\x00", "é", "한", "x" * 257])
def test_a_request_id_that_headers_cannot_carry_is_refused(request_id):
    async def run():
        front = scripted_front({"p": "fine"})
        with pytest.raises(InvalidFieldError, match="request_id"):
            await front.llm.generate("p", SamplingParams(), request_id=request_id)
        assert (await front.llm.generate("p", SamplingParams(), request_id="a b~")).request_id
        front.llm.close()

    asyncio.run(run())
