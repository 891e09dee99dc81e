"""What a reader gets: texts, stops, ends, counts; streamed and unary alike."""

import asyncio

import pytest
from helpers.byte_tokenizer import BOS, EOS, TURN_END, ByteTokenizer
from helpers.fronts import scripted_front

from jaxpaged.errors import InvalidFieldError
from jaxpaged.outputs import Accepted, Delta, Finished, RequestOutput, Started, StreamEvent
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import ChatPrompt, Prompt, SamplingParams

KOREAN = "안녕하세요 반갑습니다. 한국어!"
EMOJI = "😀🚀 and 👩‍👩‍👧 é"
TOKENIZER = ByteTokenizer()


def both_ways(
    answers: dict[str, str | list[int]], prompt: Prompt, params: SamplingParams, **options
) -> tuple[RequestOutput, list[StreamEvent]]:
    """Unary and streamed, checked to tell the same."""

    async def run():
        front = scripted_front(answers, **options)
        try:
            output = await front.llm.generate(prompt, params)
            return output, [event async for event in front.llm.stream_events(prompt, params)]
        finally:
            front.llm.close()

    output, events = asyncio.run(run())
    check_same(output, events)
    return output, events


def check_same(output: RequestOutput, events: list[StreamEvent]) -> None:
    assert isinstance(events[0], Accepted) and isinstance(events[1], Started)
    assert isinstance(events[-1], Finished)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) == len(events) - 3
    for completion in output.completions:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in own) == completion.text
        assert [i for delta in own for i in delta.token_ids] == completion.token_ids
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason is completion.finish_reason
        assert own[-1].matched_stop == completion.matched_stop
    assert events[0].prompt_token_ids == output.prompt_token_ids
    assert events[-1].usage.completion_tokens == output.usage.completion_tokens
    assert events[-1].usage.prompt_tokens == output.usage.prompt_tokens


# --- characters --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [KOREAN, EMOJI, "plain", " leading", "\n\n"])
def test_streams_show_whole_characters(text):
    output, events = both_ways({"p": text}, "p", SamplingParams(max_tokens=200))
    (completion,) = output.completions
    assert completion.text == text
    assert completion.token_ids == [*text.encode(), EOS]
    assert completion.finish_reason is FinishReason.EOS and completion.matched_stop == EOS
    assert completion.text == TOKENIZER.decode(completion.token_ids)
    texts = [event.text for event in events if isinstance(event, Delta)]
    assert "\ufffd" not in "".join(texts)


def test_a_character_cut_off_at_the_end_shows_once():
    output, _ = both_ways({"p": KOREAN}, "p", SamplingParams(max_tokens=5))
    assert output.completions[0].text == "안\ufffd"
    assert output.completions[0].finish_reason is FinishReason.MAX_TOKENS


def test_an_answer_never_repeats_the_prompt_s_bytes():
    prompt = list("안".encode()[:2])
    tokenizer = ByteTokenizer()
    tokenizer.encode = lambda text, add_special_tokens=True: (  # type: ignore[method-assign]
        prompt if text == "cut" else list(text.encode())
    )
    answers: dict[str, str | list[int]] = {"cut": [*"안".encode()[2:], *b"bc"]}
    output, _ = both_ways(answers, "cut", SamplingParams(max_tokens=9), tokenizer=tokenizer)
    assert output.completions[0].text == "\ufffdbc"


def test_bytes_that_are_no_text_do_not_stop_a_stream():
    noise = [255, 254, 0x80, 0xC3, 0x28, 0xF0, 0x9F, 65, 0xED, 0xA0, 0x80, 66, 280, 299]
    output, _ = both_ways({"p": noise}, "p", SamplingParams(max_tokens=len(noise)))
    assert output.completions[0].text == TOKENIZER.decode(noise)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip):
    ids = [*b"a", TURN_END, *b"b"]
    params = SamplingParams(max_tokens=3, skip_special_tokens=skip)
    output, _ = both_ways({"p": ids}, "p", params)
    assert output.completions[0].text == ("ab" if skip else "a<|end|>b")
    assert output.completions[0].token_ids == ids


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEFGHI", "ABC"),
        (["zz", "DEFGHI"], "ABC"),
        (["HIJ", "DEFGHI", "EFG"], "ABCD"),
        ("A", ""),
        ("K", "ABCDEFGHIJ"),
        ("한", "ABCDEFGHIJK"),
    ],
)
def test_stop_strings_across_tokens(stop, text, include):
    params = SamplingParams(max_tokens=60, stop=stop, include_stop_string=include)
    output, _ = both_ways({"p": "ABCDEFGHIJK한국"}, "p", params)
    completion = output.completions[0]
    matched = completion.matched_stop
    assert isinstance(matched, str) and (matched == stop or matched in stop)
    assert completion.text == text + (matched if include else "")
    assert completion.finish_reason is FinishReason.STOP_STRING
    # Tokens end where the stop string ended, whatever was drawn before the engine knew.
    assert bytes(completion.token_ids).decode() == text + matched
    assert output.usage.completion_tokens == len(completion.token_ids)


def test_held_back_text_comes_out_at_the_end():
    output, _ = both_ways({"p": "abcde"}, "p", SamplingParams(max_tokens=5, stop="def"))
    assert output.completions[0].text == "abcde"
    assert output.completions[0].finish_reason is FinishReason.MAX_TOKENS
    output, _ = both_ways({"p": "abcde"}, "p", SamplingParams(max_tokens=9, stop="def"))
    assert output.completions[0].finish_reason is FinishReason.EOS


def test_a_stop_string_in_the_last_token_comes_before_max_tokens():
    output, _ = both_ways({"p": "abcde"}, "p", SamplingParams(max_tokens=3, stop="c"))
    completion = output.completions[0]
    assert (completion.text, completion.finish_reason) == ("ab", FinishReason.STOP_STRING)


def test_a_stop_id_is_kept_in_the_ids_and_not_in_the_text():
    params = SamplingParams(max_tokens=9, stop_token_ids=[ord("c"), 299], stop="zzz")
    output, _ = both_ways({"p": "abcde"}, "p", params)
    completion = output.completions[0]
    assert (completion.text, completion.token_ids) == ("ab", list(b"abc"))
    assert completion.finish_reason is FinishReason.STOP_TOKEN
    assert completion.matched_stop == ord("c")


def test_ignore_eos_goes_on():
    output, _ = both_ways({"p": "ab"}, "p", SamplingParams(max_tokens=6, ignore_eos=True))
    completion = output.completions[0]
    assert completion.token_ids == [*b"ab", EOS, EOS, EOS, EOS]
    assert (completion.text, completion.finish_reason) == ("ab", FinishReason.MAX_TOKENS)


def test_the_context_ends_an_answer():
    output, _ = both_ways(
        {"prompt": "x" * 99}, "prompt", SamplingParams(max_tokens=99), max_model_len=16
    )
    completion = output.completions[0]
    assert completion.finish_reason is FinishReason.CONTEXT_LENGTH
    assert len(completion.token_ids) == 10


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_default_and_least_number_of_tokens(max_tokens):
    params = SamplingParams() if max_tokens == 16 else SamplingParams(max_tokens=max_tokens)
    output, _ = both_ways({"p": "x" * 99}, "p", params)
    assert output.completions[0].text == "x" * max_tokens


def test_chat_runs_to_the_end_of_the_context():
    messages = [{"role": "user", "content": "hi"}]
    rendered = "<|turn|>user\nhi<|end|><|turn|>assistant\n"
    answers: dict[str, str | list[int]] = {rendered: "x" * 400}
    output, _ = both_ways(answers, ChatPrompt(messages), SamplingParams())
    # Both limits are met at once; max_tokens is checked first.
    assert output.completions[0].finish_reason is FinishReason.MAX_TOKENS
    assert output.usage.prompt_tokens + output.usage.completion_tokens == 256
    assert output.prompt_token_ids == TOKENIZER.encode(rendered)


# --- several sequences, counts -----------------------------------------------------------------


def test_every_sequence_of_n_is_told():
    params = SamplingParams(n=6, seed=2**63 - 3, max_tokens=99)
    output, events = both_ways({"p": KOREAN}, "p", params)
    assert [c.index for c in output.completions] == list(range(6))
    whole = [*KOREAN.encode(), EOS]
    assert [c.token_ids for c in output.completions] == [whole] * 6
    assert {c.text for c in output.completions} == {KOREAN}
    seeds = [2**63 - 3, 2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1, -(2**63) + 2]
    assert [c.seed for c in output.completions] == seeds
    assert output.usage.completion_tokens == 6 * len(whole)
    assert isinstance(events[0], Accepted) and events[0].seed == 2**63 - 3


def test_usage_and_cached_counts():
    async def run():
        front = scripted_front({"prompt of 19 tokens": "answer"})
        llm = front.llm
        first = await llm.generate("prompt of 19 tokens", SamplingParams())
        second = await llm.generate("prompt of 19 tokens", SamplingParams())
        salted = await llm.generate("prompt of 19 tokens", SamplingParams(cache_salt="other"))
        unread = await llm.generate("prompt of 19 tokens", SamplingParams(use_prefix_cache=False))
        forgotten = await llm.reset_prefix_cache()
        after = await llm.generate("prompt of 19 tokens", SamplingParams())
        stats = await llm.stats()
        llm.close()
        return first, second, salted, unread, after, forgotten, stats

    first, second, salted, unread, after, forgotten, stats = asyncio.run(run())
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (19, 7)
    assert first.usage.preemptions == 0
    cached = [o.usage.cached_prompt_tokens for o in (first, second, salted, unread, after)]
    assert cached == [0, 18, 0, 0, 0]
    assert forgotten > 0
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (19 * 5, 18)
    assert stats.completion_tokens == 7 * 5
    assert (stats.used_blocks, stats.running_requests, stats.queued_requests) == (0, 0, 0)
    assert first.timing.total_s >= first.timing.time_to_first_token_s >= first.timing.queued_s >= 0


def test_an_unseeded_request_draws_a_new_seed_and_tells_it():
    async def run(seed):
        front = scripted_front({"p": "x"}, seed=seed)
        outputs = [await front.llm.generate("p", SamplingParams()) for _ in range(3)]
        front.llm.close()
        return [output.completions[0].seed for output in outputs]

    first, again, other = (asyncio.run(run(seed)) for seed in (0, 0, 1))
    assert len(set(first)) == 3 and first == again and not set(first) & set(other)


def test_without_a_tokenizer_there_are_ids_and_no_text():
    async def run():
        front = scripted_front({"p": "xyz"}, has_tokenizer=False)
        output = await front.llm.generate(list(b"p"), SamplingParams())
        with pytest.raises(InvalidFieldError, match="no tokenizer: give token ids"):
            await front.llm.generate("p", SamplingParams())
        with pytest.raises(InvalidFieldError, match=r"stop=.* needs a tokenizer"):
            await front.llm.generate([1], SamplingParams(stop="x"))
        front.llm.close()
        return output

    (completion,) = asyncio.run(run()).completions
    assert (completion.text, completion.token_ids) == ("", [*b"xyz", EOS])


def test_a_beginning_of_sequence_is_added_to_texts_alone():
    answers: dict[str, str | list[int]] = {"p": "x"}
    tokenizer = ByteTokenizer(adds_bos=True)
    output, _ = both_ways(answers, "p", SamplingParams(), tokenizer=tokenizer)
    assert output.prompt_token_ids == [BOS, *b"p"]
    output, _ = both_ways(answers, [BOS, *b"p"], SamplingParams(), tokenizer=tokenizer)
    assert output.prompt_token_ids == [BOS, *b"p"]
    # B52: an empty text is no empty prompt there.
    output, _ = both_ways({"": "x"}, "", SamplingParams(), tokenizer=tokenizer)
    assert output.prompt_token_ids == [BOS]


def test_a_slow_reader_gets_merged_deltas():
    async def run():
        front = scripted_front({"p": KOREAN})
        events = front.llm.stream_events("p", SamplingParams(max_tokens=200))
        taken = [await anext(events)]
        while (await front.llm.stats()).completion_tokens < len(KOREAN.encode()) + 1:
            pass
        taken += [event async for event in events]
        front.llm.close()
        return taken

    events = asyncio.run(run())
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) <= 2, "one a token was kept"
    assert "".join(delta.text for delta in deltas) == KOREAN
