"""Switches of the whole test run, and the engines that tests share."""

import faulthandler
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

# Every engine step is followed by `check_integrity`. Read when an engine is made.
os.environ["JAXPAGED_DEBUG"] = "1"
# Threads of XLA's CPU pool, read when its client is made. As many as cores, its own choice, can be
# too few for the GPU interpreter, which then waits for ever: see helpers/hopper_interpreter.py.
os.environ["PJRT_NPROC"] = "8"

import jax
import pytest
from helpers.engines import load_runner

from jaxpaged.checkpoint.locate import BUNDLED_MODELS, home_folder, models_folder
from jaxpaged.runner.runner import Runner

GOLDENS = Path(__file__).parent / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the slow variants too")


def pytest_configure() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # As engines have it, but from the first test on.
    jax.config.update("jax_compilation_cache_dir", str(home_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_unconfigure(config: pytest.Config) -> None:
    # Threads that a failed test left waiting would keep the process from ending. Not `sys.stderr`:
    # pytest still captures that.
    limit = float(config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(limit, exit=True, file=2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="slow: needs --long")
        for item in items:
            if "long" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_runner() -> Callable[[str], Runner]:
    """name -> the runner of a tiny golden model; compiled once, reset by `fresh_engine`."""

    @cache
    def load(name: str) -> Runner:
        return load_runner(
            str(GOLDENS / name), num_blocks=100, max_num_seqs=8, max_num_tokens=64, block_size=16
        )

    return load


@pytest.fixture(scope="session")
def smollm2_runner() -> Runner:
    file = models_folder() / BUNDLED_MODELS["smollm2"]
    if not file.is_file():
        pytest.fail(f"{file} is missing: run scripts/fetch_model first (scripts/test does)")
    return load_runner(
        "smollm2", num_blocks=400, max_model_len=640, max_num_seqs=8, max_num_tokens=128
    )


@pytest.fixture(scope="session")
def goldens() -> Callable[[str], list[dict[str, list]]]:
    """name -> cases of prompt_token_ids, output_token_ids, margins; see scripts/make_goldens.py."""
    return lambda name: json.loads((GOLDENS / f"{name}.json").read_text())["cases"]
