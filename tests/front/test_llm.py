"""LLM, the synchronous face: in notebooks, in threads, interrupted, closed."""

import asyncio
import signal
import threading
from collections.abc import Generator

import numpy as np
import pytest
from helpers.fronts import ScriptedLLM, scripted_llm

from jaxpaged.errors import EngineClosedError, EngineFailedError
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import ChatPrompt, SamplingParams

ANSWERS: dict[str, str | list[int]] = {
    "p": "x" * 200,
    "q": "fine",
    "r": "안녕하세요",
    "<|turn|>user\nhi<|end|><|turn|>assistant\n": "hello",
    "<|turn|>user\nhi<|end|>": " there",
}
LONG = SamplingParams(max_tokens=150)


def check_clean(scripted: ScriptedLLM) -> None:
    (output,) = scripted.llm.generate("q", use_tqdm=False)
    assert output.completions[0].text == "fine"
    stats = scripted.llm.stats()
    assert (stats.running_requests, stats.queued_requests, stats.used_blocks) == (0, 0, 0)


def test_answers_come_in_the_order_of_the_prompts(capsys):
    with scripted_llm(ANSWERS, max_queued_requests=4) as scripted:
        prompts = ["p", "q", list(b"r"), ChatPrompt([{"role": "user", "content": "hi"}])] * 5
        params = [SamplingParams(max_tokens=20 - i) for i in range(20)]
        outputs = scripted.llm.generate(prompts, params)
        for i, output in enumerate(outputs):
            text = ["x" * 200, "fine", "안녕하세요", "hello"][i % 4]
            assert output.completions[0].text == text.encode()[: 20 - i].decode(errors="replace")
        assert "tokens/s" in capsys.readouterr().err
        scripted.llm.generate("q", use_tqdm=False)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompts", "num_answers"),
    [
        ("q", 1),
        (["q"], 1),
        (list(b"q"), 1),
        (np.array([ord("q")]), 1),
        ([list(b"q"), "q"], 2),
        ([np.array([ord("q")]), np.array([ord("q")])], 2),
        (ChatPrompt([{"role": "user", "content": "hi"}]), 1),
    ],
)
def test_forms_of_prompts(prompts, num_answers):
    with scripted_llm(ANSWERS) as scripted:
        outputs = scripted.llm.generate(prompts, use_tqdm=False)
        assert len(outputs) == num_answers
        assert {o.completions[0].text for o in outputs} <= {"fine", "hello"}


def test_chat_and_its_options():
    with scripted_llm(ANSWERS) as scripted:
        messages = [{"role": "user", "content": "hi"}]
        assert scripted.llm.chat(messages).completions[0].text == "hello"
        output = scripted.llm.chat(messages, add_generation_prompt=False)
        assert output.completions[0].text == " there"


def test_stream_and_what_happens_when_it_is_left():
    with scripted_llm(ANSWERS) as scripted:
        assert "".join(delta.text for delta in scripted.llm.stream("r")) == "안녕하세요"
        for delta in scripted.llm.stream("p", LONG):
            assert delta.text.startswith("x")
            break
        stream = scripted.llm.stream("p", LONG)
        next(stream)
        stream.close()
        check_clean(scripted)


def test_it_works_inside_a_running_event_loop():
    async def cell(scripted: ScriptedLLM) -> list[str]:
        (output,) = scripted.llm.generate("q", use_tqdm=False)
        return [output.completions[0].text, *(d.text for d in scripted.llm.stream("q"))]

    with scripted_llm(ANSWERS) as scripted:
        texts = asyncio.run(cell(scripted))
        assert texts[0] == "fine" == "".join(texts[1:])


def test_two_models_in_one_process():
    with scripted_llm(ANSWERS) as first, scripted_llm({"q": "other"}) as second:
        for _ in range(2):
            (a,), (b,) = (s.llm.generate("q", use_tqdm=False) for s in (first, second))
            assert (a.completions[0].text, b.completions[0].text) == ("fine", "other")
        second.llm.close()
        check_clean(first)


def interrupt_once_running(scripted: ScriptedLLM) -> threading.Thread:
    """What Ctrl-C does to the main thread, once the engine has begun."""

    def wait_and_interrupt() -> None:
        while not scripted.runner.num_steps:
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    return thread


@pytest.fixture
def interruptible() -> Generator[None]:
    """Ctrl-C as in a terminal: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("call", ["generate", "stream", "stats"])
def test_an_interrupt_cancels_cleanly(call):
    with scripted_llm(ANSWERS) as scripted:
        if call != "stats":
            scripted.runner.open.clear()
        interrupter = interrupt_once_running(scripted)
        with pytest.raises(KeyboardInterrupt):
            if call == "generate":
                scripted.llm.generate(["p"] * 9, LONG, use_tqdm=False)
            else:
                while True:
                    for _ in scripted.llm.stream("p", LONG):
                        scripted.llm.stats()
        interrupter.join()
        scripted.runner.open.set()
        check_clean(scripted)


def test_close_frees_and_is_idempotent():
    with scripted_llm(ANSWERS) as scripted:
        with scripted.llm as llm:
            stream = llm.stream("p", LONG)
            next(stream)
        assert scripted.runner.is_closed
        llm.close()
        for call in (llm.stats, llm.reset_prefix_cache, lambda: llm.generate("q", use_tqdm=False)):
            with pytest.raises(EngineClosedError, match="closed"):
                call()
        with pytest.raises(EngineClosedError, match="closed"):
            list(stream)
        stream.close()


def test_close_fails_what_other_threads_wait_for():
    with scripted_llm(ANSWERS) as scripted:
        scripted.runner.open.clear()
        errors: list[BaseException] = []

        def ask(call) -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        calls = [
            lambda: scripted.llm.generate(["p"] * 9, LONG, use_tqdm=False),
            lambda: list(scripted.llm.stream("p", LONG)),
        ]
        threads = [threading.Thread(target=ask, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        while not scripted.runner.num_steps:
            pass
        closing = threading.Thread(target=scripted.llm.close)
        closing.start()
        scripted.runner.open.set()
        for thread in [*threads, closing]:
            thread.join(timeout=20)
            assert not thread.is_alive(), "somebody waits for ever"
        assert len(errors) == 2
        assert all(isinstance(error, EngineFailedError | EngineClosedError) for error in errors)


def test_reset_prefix_cache_counts_what_it_forgets():
    with scripted_llm(ANSWERS) as scripted:
        prompt = SamplingParams(max_tokens=30)
        scripted.llm.generate("p", prompt, use_tqdm=False)
        cached = scripted.llm.stats().cached_free_blocks
        assert cached > 0 and scripted.llm.reset_prefix_cache() == cached
        assert scripted.llm.stats().cached_free_blocks == 0
        assert scripted.llm.reset_prefix_cache() == 0


def test_info_tells_what_is_loaded():
    with scripted_llm(ANSWERS) as scripted:
        info = scripted.llm.info
        assert (info.model, info.vocab_size, info.max_model_len) == ("scripted", 300, 256)
        assert info.eos_token_ids == [257] and info.has_chat_template
        (output,) = scripted.llm.generate("q", use_tqdm=False)
        assert output.completions[0].finish_reason is FinishReason.EOS
