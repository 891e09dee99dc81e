"""jaxpaged.client against a real server with the fake front."""

import asyncio

import grpc
import pytest
from helpers.fake_async_llm import ANSWER, BLOCKS, MODEL_INFO, STATS, TIMING, USAGE
from helpers.running_server import Running, with_server

from jaxpaged import errors
from jaxpaged.client import AsyncClient, Client
from jaxpaged.outputs import Accepted, Completion, Delta, Finished, Started
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import ChatPrompt, SamplingParams

TEXT = "".join(ANSWER)
COMPLETION = Completion(0, TEXT, [10, 11, 12, 13], FinishReason.MAX_TOKENS, None, 99)


def with_client(use) -> None:
    """Runs `use(client, running)` in a thread beside the server's event loop."""

    async def body(running: Running) -> None:
        def run() -> None:
            with Client(running.address, running.admin_address) as client:
                use(client, running)

        await asyncio.to_thread(run)

    with_server(body)


def test_generate_returns_what_llm_returns():
    def use(client: Client, running: Running) -> None:
        params = [SamplingParams(n=2, seed=5), SamplingParams()]
        first, second = client.generate(["one", [4, 5]], params)
        assert [c.seed for c in first.completions] == [5, 6]
        assert second.completions == [COMPLETION]
        assert second.prompt_token_ids == [1, 2, 3]
        assert (second.usage, second.timing) == (USAGE, TIMING)
        sent = sorted(running.llm.calls, key=lambda call: str(call[0]))
        assert [call[0] for call in sent] == [[4, 5], "one"]
        assert [call[1] for call in sent] == params[::-1]
        assert client.generate([]) == []

    with_client(use)


def test_generate_takes_a_lone_prompt_and_refuses_what_is_none():
    def use(client: Client, running: Running) -> None:
        assert len(client.generate("text")) == len(client.generate([1, 2])) == 1
        num_calls = len(running.llm.calls)
        for prompts in ({"prompt": "text"}, 5, [{"prompt_token_ids": [1]}]):
            with pytest.raises(errors.InvalidFieldError, match="must be a text"):
                client.generate(prompts)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidFieldError, match="1 entries for 2 prompts"):
            client.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(errors.InvalidFieldError, match="must be SamplingParams"):
            client.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
        with pytest.raises(errors.UnsupportedOptionError, match="stream_events"):
            next(client.stream("a", SamplingParams(prompt_logprobs=1)))
        assert len(running.llm.calls) == num_calls

    with_client(use)


def test_stream_events_and_deltas():
    def use(client: Client, running: Running) -> None:
        running.llm.matched_stop = "stop"
        events = list(client.stream_events("x", request_id="mine"))
        assert events[:2] == [Accepted("mine", [1, 2, 3], 99), Started(1)]
        assert events[-1] == Finished(USAGE, TIMING)
        deltas = list(client.stream("x"))
        assert events[2:-1] == deltas
        assert deltas[-1] == Delta(0, ANSWER[-1], [13], FinishReason.MAX_TOKENS, "stop")
        assert "".join(delta.text for delta in deltas) == TEXT

    with_client(use)


def test_closing_a_stream_cancels_the_request():
    async def body(running: Running) -> None:
        running.llm.hold.clear()

        def read_one() -> None:
            with Client(running.address) as client:
                deltas = client.stream("x")
                next(deltas)
                deltas.close()

        await asyncio.to_thread(read_one)
        async with asyncio.timeout(10):
            while not running.llm.ended:
                await asyncio.sleep(0.01)

    with_server(body)


def test_chat_tokenizer_info_stats_and_reset():
    def use(client: Client, running: Running) -> None:
        messages = [{"role": "user", "content": "hey"}]
        assert client.chat(messages).completions == [COMPLETION]
        assert running.llm.calls[-1][0] == ChatPrompt(messages)
        options = {"add_generation_prompt": False, "template_args": {"deep": True}}
        client.chat(messages, **options)
        assert running.llm.calls[-1][0] == ChatPrompt(messages, **options)
        assert client.tokenizer.encode("hi") == [0, 104, 105]
        assert client.tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
        assert client.tokenizer.decode([0, 104]) == "h"
        assert client.tokenizer.decode([0, 104], skip_special_tokens=False) == "\0h"
        assert client.model_info() == MODEL_INFO
        assert client.stats() == STATS and client.block_states() == BLOCKS
        assert client.reset_prefix_cache() == 3

    with_client(use)


def test_errors_come_back_as_our_classes():
    def use(client: Client, running: Running) -> None:
        running.llm.error = errors.UnsupportedOptionError("logprobs", "logprobs=3: not yet")
        with pytest.raises(errors.UnsupportedOptionError, match="logprobs=3") as caught:
            client.generate(["x"])
        assert caught.value.field == "logprobs"
        running.llm.error = errors.QueueFullError("full")
        with pytest.raises(errors.QueueFullError, match="full"):
            list(client.stream("x"))
        with pytest.raises(errors.InvalidFieldError, match="vocab_size"):
            client.tokenizer.decode([300])

    with_client(use)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_is_tried_again_until_it_is_accepted_and_never_after(is_stream: bool):
    async def ask(client: AsyncClient) -> str:
        if is_stream:
            return "".join([delta.text async for delta in client.stream("x")])
        return (await client.generate("x")).completions[0].text

    async def body(running: Running) -> None:
        llm, stream_events = running.llm, running.llm.stream_events

        def first_two_fail(*arguments, **options):
            llm.error = errors.ServerDrainingError("later") if len(llm.calls) < 2 else None
            return stream_events(*arguments, **options)

        llm.stream_events = first_two_fail  # type: ignore[method-assign]
        async with AsyncClient(running.address) as client:
            assert await ask(client) == TEXT
            assert len(llm.calls) == 3, "two were refused before they were accepted"
            del llm.stream_events
            llm.error, llm.error_after = errors.EngineRestartingError("died"), 0
            with pytest.raises(errors.EngineRestartingError):
                await ask(client)
            assert len(llm.calls) == 4, "a call that was accepted was sent again"
        llm.error_after = None
        async with AsyncClient(running.address, retries=False) as client:
            with pytest.raises(errors.EngineRestartingError):
                await ask(client)
        assert len(llm.calls) == 5

    with_server(body)


def test_without_admin_address_and_without_server():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="admin_address"):
            client.stats()
        with pytest.raises(grpc.RpcError):
            client.generate(["x"])


def test_async_client_has_the_same_calls():
    async def body(running: Running) -> None:
        async with AsyncClient(running.address, running.admin_address) as client:
            output = await client.generate("x", SamplingParams(seed=99), request_id="mine")
            assert output.request_id == "mine" and output.completions == [COMPLETION]
            assert [delta.text async for delta in client.stream("x")] == ANSWER
            assert (await client.chat([])).completions == [COMPLETION]
            assert await client.tokenizer.encode("h") == [0, 104]
            assert await client.tokenizer.decode([104]) == "h"
            assert await client.model_info() == MODEL_INFO
            assert await client.stats() == STATS and await client.block_states() == BLOCKS
            assert await client.reset_prefix_cache() == 3
            running.llm.error = errors.ContextTooLongError("prompt", "too long")
            with pytest.raises(errors.ContextTooLongError, match="too long"):
                await client.generate("x")
            running.llm.error = None
            running.llm.hold.clear()
            events = client.stream_events("x", request_id="closed")
            assert isinstance(await anext(events), Accepted)
            await events.aclose()
            async with asyncio.timeout(10):
                while "closed" not in running.llm.ended:
                    await asyncio.sleep(0.01)

    with_server(body)
