"""The commands as a user runs them, in processes of their own, with the fake front."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.fake_async_llm import ANSWER

TESTS = Path(__file__).parents[1]
# Puts a module with the fake where the command imports AsyncLLM from.
FAKE_SERVE = """
import sys, types
from helpers.fake_async_llm import FakeAsyncLLM
from jaxpaged.errors import CheckpointError
def make(start_engine, **fields):
    if fields["model"] == "broken":
        raise CheckpointError("model.safetensors is truncated")
    return FakeAsyncLLM()
module = types.ModuleType("jaxpaged.async_llm")
module.AsyncLLM = make
sys.modules["jaxpaged.async_llm"] = module
from jaxpaged.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""
CLIENT = """
import sys
from jaxpaged.cli import main
code = main(["client", *sys.argv[1:]])
heavy = {"jax", "jaxlib", "flax", "numpy", "transformers"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def command(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS)}


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(code, *arguments), env=environment(), capture_output=True, text=True, timeout=60
    )


@contextmanager
def serving(*arguments: str) -> Generator[tuple[subprocess.Popen[str], str, str]]:
    process = subprocess.Popen(
        command(FAKE_SERVE, "fake", "--port", "0", "--admin-port", "0", *arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"jaxpaged serving fake on (\S+:\d+) \(admin on (\S+:\d+)\)\n", line)
        assert match, line
        yield process, match[1], match[2]
    finally:
        process.kill()
        process.wait()


def test_client_streams_from_a_server_without_loading_jax():
    with serving() as (_, address, admin_address):
        done = run(CLIENT, address, "hi", "--stats", "--admin-address", admin_address)
        assert done.returncode == 0 and done.stderr == ""
        lines = done.stdout.splitlines()
        assert lines[0] == "".join(ANSWER)
        assert "blocks    4 of 64 in use, 3 free ones cached (16 tokens each)" in lines
        assert "·█▒" in lines
        done = run(CLIENT, address, "--chat", "--n", "2", "hi")
        text = "".join(ANSWER)
        assert done.stdout.splitlines() == [f"[0] seed 99: {text}", f"[1] seed 100: {text}"]
        # As the quickstart asks: a prompt may begin with a dash.
        done = run(CLIENT, address, "--chat", "--n", "1", "--", "-안녕")
        assert (done.returncode, done.stdout) == (0, f"{text}\n")
        done = run(CLIENT, address, "hi", "--stats", "--admin-address", address)
        assert done.returncode == 1 and "UNIMPLEMENTED" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_stops_cleanly_on_a_signal(number: signal.Signals):
    with serving() as (process, _, _):
        process.send_signal(number)
        assert process.wait(timeout=30) == 0


def test_serve_with_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(FAKE_SERVE, "fake", "--port", port, "--admin-port", "0")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"jaxpaged: port={port}: cannot listen on 127.0.0.1:{port}: the port is in use\n"
    )


def test_serve_with_a_broken_model_is_one_line():
    done = run(FAKE_SERVE, "broken", "--port", "0", "--admin-port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "jaxpaged: model.safetensors is truncated\n"


def test_client_without_a_server_is_one_line():
    done = run(CLIENT, "127.0.0.1:1", "hi")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("jaxpaged: 127.0.0.1:1: UNAVAILABLE")
    assert done.stderr.count("\n") == 1
