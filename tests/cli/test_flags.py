"""Flags become the fields they are named after, and nothing else."""

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxpaged.cli import main
from jaxpaged.cli.flags import (
    add_engine_flags,
    add_prompt_flags,
    add_sampling_flags,
    engine_fields,
    prompt_of,
    sampling_params_of,
)
from jaxpaged.config import EngineConfig
from jaxpaged.errors import CheckpointError
from jaxpaged.outputs import Accepted, Delta
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import ChatPrompt, Constraint, SamplingParams
from jaxpaged.server.config import ServerConfig


def parse_engine(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return EngineConfig(**engine_fields(parser.parse_args(arguments)))


def parse_sampling(*arguments: str) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return sampling_params_of(parser.parse_args(arguments))


def test_engine_flags_default_to_the_config():
    assert parse_engine("m") == EngineConfig("m")


def test_engine_flags_set_every_field():
    config = parse_engine(
        *("m", "--dtype", "float32", "--max-model-len", "9", "--block-size", "8"),
        *("--num-blocks", "5", "--memory-fraction", "0.5", "--max-num-seqs", "2"),
        *("--max-num-tokens", "32", "--no-enable-prefix-caching", "--load-format", "random"),
        *("--generation-config", "none", "--attention-impl", "xla", "--tensor-parallel", "2"),
        *("--scheduling", "priority", "--no-overlap", "--seed", "3"),
        *("--max-queued-requests", "7"),
    )
    assert config == EngineConfig(
        "m", "float32", 9, 8, 5, 0.5, 2, 32, False, "random", "none", "xla", 2, "priority", False,
        3, 7,
    )  # fmt: skip


def test_sampling_flags_keep_presence():
    assert parse_sampling() == SamplingParams()
    assert parse_sampling("--temperature", "0", "--seed", "0") == SamplingParams(
        temperature=0.0, seed=0
    )


def test_sampling_flags_of_every_shape():
    params = parse_sampling(
        *("--stop", "a", "--stop", "b", "--stop-token-ids", "1", "--stop-token-ids", "2"),
        *("--logit-bias", "5:-1.5", "--logit-bias", "6:2", "--allowed-token-ids", "4"),
        *("--no-skip-special-tokens", "--ignore-eos", "--cache-salt", "s", "--top-p", "0.5"),
    )
    assert params == SamplingParams(
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        logit_bias={5: -1.5, 6: 2.0},
        allowed_token_ids=[4],
        skip_special_tokens=False,
        ignore_eos=True,
        cache_salt="s",
        top_p=0.5,
    )


def test_constraints_may_come_from_files(tmp_path: Path):
    path = tmp_path / "schema.json"
    path.write_text('{"const": "안녕"}', encoding="utf-8")
    for flag, name in (("--json-schema", "json_schema"), ("--grammar", "grammar")):
        params = parse_sampling(flag, f"@{path}")
        assert params.constraint == Constraint(**{name: '{"const": "안녕"}'})
    params = parse_sampling("--regex", f"@{path}")
    assert params.constraint == Constraint(regex=f"@{path}"), "an address may begin with @"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--logit-bias", "7042=-100"], "--logit-bias: '7042=-100' must be ID:VALUE"),
        (["--logit-bias", "a:1"], "'a:1' must be ID:VALUE"),
        (["--json-schema", "@missing.json"], "--json-schema: cannot read 'missing.json': "),
    ],
)
def test_what_cannot_be_read_is_told(arguments, line, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_sampling(*arguments)
    assert line in capsys.readouterr().err


def test_an_unknown_flag_shows_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["generate", "m", "hi", "--top-j", "3"])
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert "usage: jaxpaged generate" in error and "unrecognized arguments: --top-j 3" in error


def test_prompt_flags():
    parser = argparse.ArgumentParser()
    add_prompt_flags(parser)
    assert prompt_of(parser.parse_args(["x"])) == "x"
    chat = prompt_of(parser.parse_args(["x", "--chat", "--system", "s"]))
    assert chat == ChatPrompt(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    )
    with pytest.raises(ValueError, match="--system needs --chat"):
        prompt_of(parser.parse_args(["x", "--system", "s"]))


class FakeLLM:
    """LLM as `jaxpaged generate` uses it."""

    def __init__(self, **fields: object) -> None:
        if fields["model"] == "broken":
            raise CheckpointError("no config.json")
        self.fields = fields

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def stream_events(self, prompt: str, params: SamplingParams):
        seeds = f"{self.fields['seed']}/{params.seed}"
        yield Accepted("r", [1], params.seed or 0)
        yield Delta(0, f"{prompt} ", [1])
        yield Delta(0, seeds, [2], FinishReason.EOS)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("jaxpaged.llm")
    vars(module)["LLM"] = FakeLLM
    monkeypatch.setitem(sys.modules, "jaxpaged.llm", module)
    # Set for the duration of the test; the command only fills it in when it is absent.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")


def test_generate_streams_and_keeps_the_two_seeds_apart(
    fake_llm: None, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", "m", "hi", "--seed", "3", "--engine-seed", "4"]) == 0
    assert capsys.readouterr().out == "hi 4/3\n"


def test_generate_with_a_broken_model_is_one_line(
    fake_llm: None, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", "broken", "hi"]) == 1
    assert capsys.readouterr().err == "jaxpaged: no config.json\n"


def test_client_stats_need_the_admin_address(capsys: pytest.CaptureFixture[str]):
    assert main(["client", "a:1", "hi", "--stats"]) == 1
    assert "--stats needs --admin-address" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["unknown"], ["serve"], ["generate", "m", "x", "--top-k", "a"]]
)
def test_wrong_usage_exits_with_2(arguments, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: jaxpaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["port", "admin_port", "metrics_port"])
def test_a_port_that_does_not_exist_is_refused(name):
    def config(port: int) -> ServerConfig:
        settings: dict[str, Any] = {name: port}
        return ServerConfig(**settings)

    for port in (-1, 65536):
        with pytest.raises(ValueError, match=f"{name}={port} must be between 0 and 65535"):
            config(port)
    assert getattr(config(65535), name) == 65535
