"""Fronts that tests of the whole service share: starting an engine's process takes a second."""

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
