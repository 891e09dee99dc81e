"""`jaxpaged serve` in a process of its own, with an engine process on the fake runner."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]
_CODE = """
import sys
import jaxpaged.async_llm as module
from helpers.served_engines import make_llm
def make(start_engine, model, max_queued_requests, **fields):
    # why the partial's keyword: the flag of the command must reach the engine's client
    return make_llm("process", 0.003, max_queued_requests=max_queued_requests,
                    **start_engine.keywords)
module.AsyncLLM = make
exec(sys.argv[1])
from jaxpaged.cli import main
sys.exit(main(["serve", "fake", "--port=0", "--admin-port=0", *sys.argv[2:]]))
"""
# Texts that a thread tokenises, and constraints, are never ready; a line tells when it began.
STUCK_MAKING = """
import time
import jaxpaged.request_maker as maker
from helpers.byte_tokenizer import ByteTokenizer
encode = ByteTokenizer.encode
def be_stuck(*arguments):
    print("stuck", flush=True)
    time.sleep(1000)
def stuck_encode(self, text, add_special_tokens=True):
    if len(text) > 4096:
        be_stuck()
    return encode(self, text, add_special_tokens)
def make_stuck(**options):
    llm = make(**options)
    llm._intake.maker._vocabulary = object()
    return llm
ByteTokenizer.encode, module.AsyncLLM = stuck_encode, make_stuck
maker.grammar_of = be_stuck
"""
_LOADING_CODE = """
import asyncio, time
from functools import partial
from jaxpaged.process_client import ProcessEngineClient
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.lifecycle import serve
load = partial(ProcessEngineClient, partial(time.sleep, 1000), print, print)
asyncio.run(serve(ServerConfig(port=0, admin_port=0), load, print))
"""
_LINE = re.compile(r"jaxpaged serving fake on (\S+:\d+) \(admin on (\S+:\d+)\)\n")


@dataclass(frozen=True)
class Command:
    """A server that is ready.

    Attributes:
      children: every process under it: the engine's, and multiprocessing's helper.
    """

    process: subprocess.Popen[str]
    address: str
    admin_address: str
    children: list[psutil.Process]

    @property
    def engine(self) -> psutil.Process:
        (engine,) = (c for c in self.children if "spawn_main" in " ".join(c.cmdline()))
        return engine

    def wait_for_no_orphan(self) -> None:
        gone, alive = psutil.wait_procs(self.children, timeout=20)
        assert not alive, f"left behind: {alive} (gone: {gone})"


@contextmanager
def loading_command() -> Generator[subprocess.Popen[str]]:
    """A server whose engine loads and never is ready."""
    process = _run(_LOADING_CODE)
    try:
        yield process
    finally:
        _end(process)


@contextmanager
def serve_command(*flags: str, prepare: str = "") -> Generator[Command]:
    """A server that is ready; its process ran the code in `prepare` first."""
    process = _run(_CODE, prepare, *flags)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = _LINE.fullmatch(line)
        assert match, line
        children = psutil.Process(process.pid).children(recursive=True)
        yield Command(process, match[1], match[2], children)
    finally:
        _end(process)


def _run(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    process.stdout.close() if process.stdout else None


def wait_until(condition, timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
