"""One interface, two places for the engine: both behave alike."""

import os
import tempfile
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.engines import Answers
from helpers.requests import make_request
from helpers.served_command import wait_until
from helpers.served_engines import EXIT, RAISE, make_engine, solo_tokens

from jaxpaged import errors, process_client
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_client import EngineClient, EngineState, ThreadEngineClient
from jaxpaged.engine_messages import Failure, Stepped, decode_engine_message, encode
from jaxpaged.outputs import RequestEnded, RequestStarted, SequenceOutput, StepOutputs
from jaxpaged.process_client import ProcessEngineClient, start_in_process
from jaxpaged.request import FinishReason

TIMEOUT_S = 30


class Events:
    """Collects what a client tells; `wait_for` looks at it after each event."""

    def __init__(self) -> None:
        self.answers = Answers()
        self.deaths: list[errors.JaxpagedError] = []
        self._changed = threading.Condition()

    def on_outputs(self, outputs: StepOutputs) -> None:
        with self._changed:
            self.answers.take(outputs)
            self._changed.notify_all()

    def on_died(self, error: errors.JaxpagedError) -> None:
        with self._changed:
            self.deaths.append(error)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), "it did not happen"


Connect = Callable[[Events], Any]


@pytest.fixture(params=["thread", "process"])
def connect(request: pytest.FixtureRequest) -> Generator[Connect]:
    made: list[EngineClient] = []

    def start(events: Events) -> EngineClient:
        make = partial(make_engine, 0.002)
        if request.param == "thread":
            made.append(ThreadEngineClient(make(), events.on_outputs, events.on_died))
        else:
            made.append(ProcessEngineClient(make, events.on_outputs, events.on_died))
        return made[-1]

    yield start
    for client in made:
        client.close()


def test_requests_run_and_calls_are_answered(connect: Connect):
    events = Events()
    client = connect(events)
    assert client.config.model == "fake" and client.state is EngineState.READY
    for name in "ab":
        client.submit(make_request(name, [1, ord(name)], max_tokens=20))
    client.submit(make_request("c", [2], max_tokens=600))
    assert client.abort("c").result(TIMEOUT_S) is True
    assert client.abort("never").result(TIMEOUT_S) is False
    events.wait_for(lambda: len(events.answers.errors) == 3)
    for name in "ab":
        assert events.answers.tokens[name, 0] == solo_tokens([1, ord(name)], 20)
    assert events.answers.reasons["c", 0] is FinishReason.CANCELLED
    stats = client.stats().result(TIMEOUT_S)
    assert stats.used_blocks == 0 and stats.completion_tokens >= 40 and stats.step_s > 0
    assert len(client.block_states().result(TIMEOUT_S)) == 65
    assert client.reset_prefix_cache().result(TIMEOUT_S) > 0


def test_a_stop_found_by_the_front_ends_the_sequence(connect: Connect):
    events = Events()
    client = connect(events)
    client.submit(make_request("a", [1], max_tokens=600, n=2, temperature=1.0))
    events.wait_for(lambda: ("a", 1) in events.answers.tokens)
    for index in range(2):
        client.finish_sequence("a", index)
    events.wait_for(lambda: "a" in events.answers.errors)
    assert client.stats().result(TIMEOUT_S).used_blocks == 0


def test_a_failed_step_takes_what_runs(connect: Connect):
    events = Events()
    client = connect(events)
    client.submit(make_request("bad", [RAISE], max_tokens=5))
    events.wait_for(lambda: "bad" in events.answers.errors)
    assert "RuntimeError" in (events.answers.errors["bad"] or "")
    client.submit(make_request("good", [3], max_tokens=5))
    events.wait_for(lambda: "good" in events.answers.errors)
    assert events.answers.tokens["good", 0] == solo_tokens([3], 5) and not events.deaths


def test_weights_are_replaced_or_everything_stays(connect: Connect, tmp_path):
    events = Events()
    client = connect(events)
    client.submit(make_request("a", [1], max_tokens=600))
    events.wait_for(lambda: ("a", 0) in events.answers.tokens)
    with pytest.raises(errors.ModelNotFoundError, match="no model"):
        client.update_weights("/no/such/model").result(TIMEOUT_S)
    (tmp_path / "config.json").write_text('{"refused": 1}')
    with pytest.raises(errors.CheckpointError, match="truncated"):
        client.update_weights(str(tmp_path)).result(TIMEOUT_S)
    assert "a" not in events.answers.errors, "a failed update ended a request"
    (tmp_path / "config.json").write_text("{}")
    assert client.update_weights(str(tmp_path)).result(TIMEOUT_S) is None
    events.wait_for(lambda: "a" in events.answers.errors)
    stats = client.stats().result(TIMEOUT_S)
    assert stats.used_blocks == stats.cached_free_blocks == 0


def test_after_close_everything_is_refused(connect: Connect):
    events = Events()
    client = connect(events)
    client.close()
    client.close()
    assert client.state is EngineState.CLOSED
    for call in (client.stats, lambda: client.submit(make_request("a", [1]))):
        with pytest.raises(errors.EngineClosedError, match="closed"):
            call()


def test_an_engine_that_dies_comes_back_with_the_weights_it_had(tmp_path):
    events = Events()
    client = ProcessEngineClient(
        make_engine, events.on_outputs, events.on_died, max_restarts=1, backoff_s=0.01
    )
    (tmp_path / "config.json").write_text("{}")
    client.update_weights(str(tmp_path)).result(TIMEOUT_S)
    open_call = client.update_weights(str(tmp_path))
    client.submit(make_request("bad", [EXIT], max_tokens=5))
    pending = client.stats()
    events.wait_for(lambda: events.deaths)
    assert isinstance(events.deaths[0], errors.EngineRestartingError)
    assert open_call.done()
    with pytest.raises(errors.EngineRestartingError):
        pending.result(TIMEOUT_S)
    wait_until(lambda: client.state is EngineState.READY)
    client.submit(make_request("good", [3], max_tokens=5))
    events.wait_for(lambda: "good" in events.answers.errors)
    # Weights that cannot be loaded any more: it cannot come back, and says so.
    (tmp_path / "config.json").write_text('{"refused": 1}')
    client.submit(make_request("bad again", [EXIT], max_tokens=5))
    events.wait_for(lambda: len(events.deaths) == 2)
    assert isinstance(events.deaths[1], errors.EngineClosedError)
    client.close()


def _make_once(started: Path) -> Engine:
    """The first engine loads; those after it die in their load."""
    if started.exists():
        os._exit(9)
    started.touch()
    return make_engine()


@pytest.mark.parametrize("loads", [True, False], ids=["sound", "dies in its load"])
def test_only_an_engine_that_was_ready_starts_the_count_of_restarts_anew(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """However long it loads: here every time is long enough to be sound."""
    monkeypatch.setattr(process_client, "_SOUND_AFTER_S", 0.0)
    make = make_engine if loads else partial(_make_once, tmp_path / "started")
    events = Events()
    client = ProcessEngineClient(
        make, events.on_outputs, events.on_died, max_restarts=1, backoff_s=0.01
    )
    for number in range(3 if loads else 1):
        client.submit(make_request(f"bad {number}", [EXIT], max_tokens=5))
        events.wait_for(lambda n=number: len(events.deaths) > n)
        wait_until(lambda: client.state is not EngineState.RESTARTING)
    if loads:
        assert client.state is EngineState.READY
    else:
        assert client.state is EngineState.CLOSED and len(events.deaths) == 2
    client.close()


def test_a_long_name_of_the_temporary_folder_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    client = ProcessEngineClient(make_engine, print, print)
    assert client.state is EngineState.READY
    client.close()


def test_an_engine_that_cannot_start_says_why():
    with pytest.raises(errors.ModelNotFoundError, match="no model"):
        start_in_process(EngineConfig("/no/such/model"), None, print, print)


def test_messages_keep_every_field():
    outputs = StepOutputs(
        started=[RequestStarted("a", 5, 2)],
        sequences=[SequenceOutput("a", 1, (7, 8), FinishReason.STOP_TOKEN, 8)],
        ended=[RequestEnded("b", 3, "why")],
    )
    message = decode_engine_message(encode(Stepped(outputs, [])))
    assert isinstance(message, Stepped) and message.outputs == outputs
    for error in (errors.InvalidFieldError("top_k", "bad"), errors.CheckpointError("gone")):
        back = msgspec.msgpack.decode(encode(Failure.of(error)), type=Failure).error()
        assert type(back) is type(error) and str(back) == str(error)
    assert type(Failure.of(KeyError("x")).error()) is errors.JaxpagedError
