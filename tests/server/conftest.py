"""Fronts that tests of the whole service share: starting an engine's process takes a second."""

import threading
from collections.abc import Callable, Generator
from functools import cache

import pytest
from helpers.served_engines import make_llm

from jaxpaged.async_llm import AsyncLLM

STEP_S = 0.003


@pytest.fixture(scope="session")
def _llms() -> Generator[Callable[[str], AsyncLLM]]:
    made = []

    @cache
    def make(where: str) -> AsyncLLM:
        made.append(make_llm(where, STEP_S, num_blocks=160))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(params=["thread", "process"])
def llm(request: pytest.FixtureRequest, _llms: Callable[[str], AsyncLLM]) -> AsyncLLM:
    """A front before an engine in a thread, and one before an engine in a process."""
    return _llms(request.param)


@pytest.fixture
def process_llm(_llms: Callable[[str], AsyncLLM]) -> AsyncLLM:
    return _llms("process")


@pytest.fixture
def may_go(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Generator[threading.Event]:
    """Long texts are not tokenised before it is set, which the test's end does, too."""
    assert llm.tokenizer is not None
    encode, event = llm.tokenizer.encode, threading.Event()

    def held(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 4096:
            assert event.wait(60)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(llm.tokenizer, "encode", held)
    yield event
    event.set()
