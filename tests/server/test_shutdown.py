"""The end of a server, in every way: drained, told twice, killed, or without its engine."""

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.served_command import (
    STUCK_MAKING,
    Command,
    loading_command,
    serve_command,
    wait_until,
)
from helpers.served_engines import EXIT, solo_tokens

from jaxpaged import errors
from jaxpaged.client import Client
from jaxpaged.outputs import Delta, Started
from jaxpaged.sampling_params import Constraint, SamplingParams
from jaxpaged.server.lifecycle import EXIT_ENGINE_LOST
from jaxpaged.v1 import admin_pb2, admin_pb2_grpc

GREEDY = {"temperature": 0.0}


class Reader(threading.Thread):
    """Reads one stream; `ids` grow while it does."""

    def __init__(self, client: Client, prompt: list[int], max_tokens: int):
        super().__init__(daemon=True)
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        self.events = client.stream_events(prompt, params)
        self.ids: list[int] = []
        self.started = threading.Event()
        self.error: BaseException | None = None
        self.start()
        assert self.started.wait(20)

    def run(self) -> None:
        try:
            for event in self.events:
                if isinstance(event, Started):
                    self.started.set()
                if isinstance(event, Delta):
                    self.ids += event.token_ids
        except Exception as error:
            self.error = error
            self.started.set()


def is_serving(command: Command) -> bool:
    with grpc.insecure_channel(command.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest()).status == 1


def test_sigterm_finishes_what_runs_refuses_the_rest_and_exits_0():
    with serve_command("--stop-grace-s=20") as command, Client(command.address) as client:
        reader = Reader(client, [1, 2], 300)
        command.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_serving(command))
        with (
            Client(command.address, retries=False) as late,
            pytest.raises(errors.ServerDrainingError),
        ):
            late.generate([[3]])
        reader.join(20)
        assert reader.ids == solo_tokens([1, 2], 300) and reader.error is None
        assert command.process.wait(20) == 0
        command.wait_for_no_orphan()


def test_sigterm_ends_what_outlives_the_grace_time():
    with serve_command("--stop-grace-s=0.1") as command, Client(command.address) as client:
        reader = Reader(client, [1, 2], 600)
        command.process.send_signal(signal.SIGTERM)
        reader.join(20)
        assert isinstance(reader.error, errors.ServerDrainingError)
        assert command.process.wait(20) == 0
        command.wait_for_no_orphan()


@pytest.mark.parametrize("what", ["text", "constraint"])
def test_the_end_does_not_wait_for_what_is_still_made(what: str):
    flags = ("--stop-grace-s=0.1",)
    with (
        serve_command(*flags, prepare=STUCK_MAKING) as command,
        Client(command.address, retries=False) as client,
        ThreadPoolExecutor(1) as caller,
    ):
        prompt = "x" * 5000 if what == "text" else "x"
        constraint = Constraint(regex="a") if what == "constraint" else None
        params = SamplingParams(constraint=constraint, max_tokens=2)
        call = caller.submit(client.generate, [prompt], params)
        assert command.process.stdout is not None
        assert command.process.stdout.readline() == "stuck\n"
        command.process.send_signal(signal.SIGTERM)
        assert isinstance(call.exception(20), errors.ServerDrainingError)
        assert command.process.wait(20) == 0
        command.wait_for_no_orphan()


def test_a_second_signal_ends_it_at_once():
    with serve_command("--stop-grace-s=1000") as command, Client(command.address) as client:
        Reader(client, [1, 2], 600)
        command.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_serving(command))
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(20) == -signal.SIGTERM
        command.wait_for_no_orphan()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_no_engine_outlives_a_killed_server(
    is_stuck: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stuck: not one of its threads runs, as while a library holds the interpreter."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serve_command() as command:
        if is_stuck:
            command.engine.suspend()
        command.process.kill()
        try:
            command.wait_for_no_orphan()
            assert not list(tmp_path.iterdir()), "it left files behind"
        finally:
            for child in command.children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_while_it_loads_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with loading_command() as process:
        # The engine has connected: it has removed the socket's folder again. Not any file: Python
        # tries the directory out with one.
        wait_until(lambda: any(path.is_dir() for path in tmp_path.iterdir()))
        wait_until(lambda: not any(tmp_path.iterdir()))
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        assert process.wait(20) == -number
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive and not any(tmp_path.iterdir())


def test_a_stuck_engine_does_not_hold_up_the_end():
    with serve_command("--stop-grace-s=0.1") as command, Client(command.address) as client:
        reader = Reader(client, [1, 2], 600)
        command.engine.suspend()
        command.process.send_signal(signal.SIGTERM)
        reader.join(20)
        assert isinstance(reader.error, errors.ServerDrainingError)
        assert command.process.wait(20) == 0
        command.wait_for_no_orphan()


def test_an_engine_that_dies_ends_a_server_that_may_not_restart_it():
    with serve_command("--max-engine-restarts=0") as command, Client(command.address) as client:
        with pytest.raises(errors.EngineClosedError, match="ended with code 9"):
            client.generate([[EXIT]])
        assert command.process.wait(20) == EXIT_ENGINE_LOST
        command.wait_for_no_orphan()


def test_drain_returns_when_what_runs_has_ended_or_the_time_is_over():
    with serve_command() as command, Client(command.address) as client:
        readers = [Reader(client, [1, 2], 30), Reader(client, [3, 4], 600)]
        with grpc.insecure_channel(command.admin_address) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            response = admin.Drain(admin_pb2.DrainRequest(timeout={"nanos": 600_000_000}))
            assert (response.finished_requests, response.aborted_requests) == (1, 1)
            assert not is_serving(command)
            again = admin.Drain(admin_pb2.DrainRequest())
            assert (again.finished_requests, again.aborted_requests) == (0, 0)
        for reader in readers:
            reader.join(20)
        assert readers[0].ids == solo_tokens([1, 2], 30)
        assert isinstance(readers[1].error, errors.ServerDrainingError)
        assert command.process.poll() is None, "drained, it waits for its signal"


@pytest.mark.parametrize("timeout_s", [1, 1000])
def test_a_drain_goes_on_to_its_timeout_when_its_caller_leaves(timeout_s: int):
    with serve_command("--stall-timeout-s=1000") as command, Client(command.address) as client:
        reader = Reader(client, [1, 2], 600)
        command.engine.suspend()  # only the drain can end the request now
        with grpc.insecure_channel(command.admin_address) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            drain = admin.Drain.future(admin_pb2.DrainRequest(timeout={"seconds": timeout_s}))
            wait_until(lambda: not is_serving(command))
            drain.cancel()
        if timeout_s == 1000:
            command.engine.resume()
        reader.join(20)
        if timeout_s == 1000:
            assert reader.error is None and reader.ids == solo_tokens([1, 2], 600)
        else:
            assert isinstance(reader.error, errors.ServerDrainingError)
