"""A real engine behind a real server, asked by jaxpaged.client over loopback."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.engines import fresh_engine
from helpers.golden_cases import check_continuation
from helpers.model_fronts import KeptRunner

from jaxpaged import checkpoint, errors
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.client import Client
from jaxpaged.config import EngineConfig
from jaxpaged.outputs import Accepted, Delta, Finished
from jaxpaged.request import FinishReason
from jaxpaged.runner.runner import Runner
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.lifecycle import Server
from jaxpaged.text import Tokenizer, load_tokenizer

GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)


def with_client(runner: Runner, tokenizer: Tokenizer | None, use: Callable[[Client], None]) -> None:
    """Runs `use` in a thread beside a server over a fresh engine; no block may stay in use."""

    async def run() -> None:
        engine = fresh_engine(runner, wrapped=KeptRunner(runner))
        llm = AsyncLLM.from_engine(
            EngineConfig(engine.config.model), engine, tokenizer, SamplingDefaults(), frozenset({2})
        )
        server = Server(ServerConfig(port=0, admin_port=0, stop_grace_s=0.1))
        await server.start()
        await server.set_ready(llm)

        def run_client() -> None:
            with Client(f"127.0.0.1:{server.port}", f"127.0.0.1:{server.admin_port}") as client:
                use(client)

        try:
            await asyncio.to_thread(run_client)
            while (await llm.stats()).used_blocks:
                await asyncio.sleep(0.01)
        finally:
            await server.stop()
            llm.close()

    asyncio.run(asyncio.wait_for(run(), timeout=120))


def test_golden_continuations_unary_and_streamed(tiny_runner, goldens):
    cases = goldens("tiny_qwen3")

    def use(client: Client) -> None:
        prompts = [case["prompt_token_ids"] for case in cases]
        for case, output in zip(cases, client.generate(prompts, GREEDY), strict=True):
            check_continuation(case, output.completions[0].token_ids)
            assert output.completions[0].finish_reason is FinishReason.MAX_TOKENS
        with ThreadPoolExecutor(len(cases)) as threads:
            streams = threads.map(lambda p: list(client.stream_events(p, GREEDY)), prompts)
        for case, events in zip(cases, streams, strict=True):
            deltas = [event for event in events if isinstance(event, Delta)]
            check_continuation(case, [i for delta in deltas for i in delta.token_ids])
            assert isinstance(events[0], Accepted) and isinstance(events[-1], Finished)
            assert events[-1].usage.completion_tokens == 32
        stats = client.stats()
        assert stats.compiles_after_warmup == 0
        assert stats.cached_prompt_tokens > 0, "the second round found the first one's blocks"

    with_client(tiny_runner("tiny_qwen3"), None, use)


def test_seeded_sequences_are_the_same_over_the_wire(tiny_runner):
    def use(client: Client) -> None:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=2**63 - 2, n=3)
        (together,) = client.generate([[5, 6, 7]], params)
        seeds = [2**63 - 2, 2**63 - 1, -(2**63)]
        assert [completion.seed for completion in together.completions] == seeds
        alone = client.generate(
            [[5, 6, 7]] * 3,
            [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in seeds],
        )
        for completion, output in zip(together.completions, alone, strict=True):
            assert completion.token_ids == output.completions[0].token_ids
        assert len({tuple(c.token_ids) for c in together.completions}) == 3

    with_client(tiny_runner("tiny_qwen3"), None, use)


def test_text_of_random_bytes_streams_as_it_is_answered(tiny_runner):
    def use(client: Client) -> None:
        params = SamplingParams(max_tokens=60, temperature=1.5, seed=4, ignore_eos=True)
        (output,) = client.generate(["안녕"], params)
        text = output.completions[0].text
        assert text == "".join(delta.text for delta in client.stream("안녕", params))
        assert text == client.tokenizer.decode(output.completions[0].token_ids)
        stop = text[10:13]
        stopped = SamplingParams(max_tokens=60, temperature=1.5, seed=4, ignore_eos=True, stop=stop)
        (output,) = client.generate(["안녕"], stopped)
        assert output.completions[0].text == text[: text.index(stop)]
        assert output.completions[0].matched_stop == stop

    with_client(tiny_runner("tiny_qwen3"), ByteTokenizer(), use)


def test_refusals_leave_the_server_serving(tiny_runner, goldens):
    case = goldens("tiny_qwen3")[1]

    def use(client: Client) -> None:
        for prompt, params, kind, line in [
            ([], {}, errors.InvalidFieldError, "empty"),
            ([300], {}, errors.InvalidFieldError, "ids are 0 to 299"),
            ([1] * 600, {}, errors.ContextTooLongError, "max_model_len=512"),
            ([1], {"max_tokens": 0}, errors.InvalidFieldError, "max_tokens=0"),
            ([1], {"top_p": 0.0}, errors.InvalidFieldError, "top_p=0.0"),
            ([1], {"temperature": float("nan")}, errors.InvalidFieldError, "temperature=nan"),
            ([1], {"logprobs": 21}, errors.InvalidFieldError, "logprobs=21"),
            ([1], {"priority": 1}, errors.UnsupportedOptionError, "priority=1"),
            ("x" * 10_000_000, {}, errors.ContextTooLongError, "at least"),
        ]:
            with pytest.raises(kind, match=line):
                client.generate([prompt], SamplingParams(**params))
            with pytest.raises(kind, match=line):
                list(client.stream(prompt, SamplingParams(**params)))
        (output,) = client.generate([case["prompt_token_ids"]], GREEDY)
        check_continuation(case, output.completions[0].token_ids)

    with_client(tiny_runner("tiny_qwen3"), ByteTokenizer(), use)


def test_a_stream_that_is_left_frees_its_blocks(tiny_runner):
    def use(client: Client) -> None:
        params = SamplingParams(max_tokens=400, temperature=1.0, ignore_eos=True, n=3)
        for num_events in (1, 2, 3):
            events = client.stream_events([5] * 40, params)
            for _ in range(num_events):
                next(events)
            events.close()

    with_client(tiny_runner("tiny_qwen3"), None, use)


def test_smollm2_streams_text(smollm2_runner, goldens):
    case = goldens("smollm2")[0]
    tokenizer = load_tokenizer(checkpoint.locate("smollm2"))

    def use(client: Client) -> None:
        prompt = "The capital of France is"
        assert client.tokenizer.encode(prompt) == case["prompt_token_ids"]
        deltas = list(client.stream(prompt, GREEDY))
        tokens = [i for delta in deltas for i in delta.token_ids]
        check_continuation(case, tokens)
        assert "".join(delta.text for delta in deltas) == client.tokenizer.decode(tokens)
        assert "Paris" in client.tokenizer.decode(tokens)

    with_client(smollm2_runner, tokenizer, use)


@pytest.mark.long
def test_smollm2_streams_every_prompt(smollm2_runner, goldens):
    cases = goldens("smollm2")

    def use(client: Client) -> None:
        for _ in range(2):  # then with a warm cache
            with ThreadPoolExecutor(len(cases)) as threads:
                prompts = [case["prompt_token_ids"] for case in cases]
                streams = threads.map(lambda prompt: list(client.stream(prompt, GREEDY)), prompts)
            for case, deltas in zip(cases, streams, strict=True):
                check_continuation(case, [i for delta in deltas for i in delta.token_ids])
        assert client.stats().cached_prompt_tokens > 1000

    with_client(smollm2_runner, None, use)
