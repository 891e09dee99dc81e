"""The processes that bench_serve.py starts: a server, or an engine without one; a tiny model."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from bench_processes import model_folder
from serve_load import Seen, Workload, run_closed, watch

from jaxpaged.sampling_params import SamplingParams

TINY_VOCAB_SIZE = 512
_TINY_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": TINY_VOCAB_SIZE,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
_LINE = re.compile(r"jaxpaged serving \S+ on (\S+) \(admin on (\S+)\)\n")
_ENGINE = {"load_format": "random", "max_num_tokens": 256}


@dataclass(frozen=True)
class RunningServer:
    address: str
    admin_address: str
    process_id: int


def tiny_model() -> AbstractContextManager[str]:
    """A folder with the config of a tiny model and a tokenizer."""
    return model_folder(_TINY_CONFIG, has_tokenizer=True)


@contextmanager
def running_server(
    model: str | None = None, *, max_num_seqs: int, **options: Any
) -> Generator[RunningServer]:
    """`jaxpaged serve` on free ports; stopped by SIGTERM.

    Args:
      model: a folder, for random weights; None: the tiny model, with small steps and on the CPU.
    """
    flags = {"port": 0, "admin_port": 0, "stop_grace_s": 1, "stall_timeout_s": 10}
    flags |= {"load_format": "random"} if model else _ENGINE
    flags |= {"max_num_seqs": max_num_seqs} | options
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    main = "import sys; from jaxpaged.cli import main; sys.exit(main())"
    served = nullcontext(model) if model else tiny_model()
    with served as folder, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", main, "serve", folder, *arguments],
            env=None if model else _environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            match = _LINE.fullmatch(process.stdout.readline())
            if match is None:
                log.seek(0)
                raise RuntimeError(f"the server did not start:\n{log.read()[-2000:]}")
            yield RunningServer(match[1], match[2], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


class InProcess:
    """`AsyncLLM` with an engine in a thread, in a process that waits between two runs.

    Attributes:
      process_id: of that process.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process_id = process.pid
        self._process = process

    def run(self, work: Workload, num_requests: int, concurrency: int) -> dict[str, float]:
        """What `run_closed` saw there."""
        arguments = {"work": asdict(work), "num_requests": num_requests, "concurrency": concurrency}
        return self.ask(arguments)

    def ask(self, arguments: dict[str, Any]) -> dict[str, float]:
        """Sends a line, and waits for the next that is an answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the process ended with code {self._process.wait()}")


@contextmanager
def running_in_process(*, max_num_seqs: int) -> Generator[InProcess]:
    """The tiny model in a process of its own, without a server; it ends with its input."""
    with tiny_model() as folder:
        process = subprocess.Popen(
            [sys.executable, __file__],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            in_process = InProcess(process)
            in_process.ask({"model": folder, "max_num_seqs": max_num_seqs})
            yield in_process


def _environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}


async def _run_in_process() -> None:
    """The other end of `InProcess`: first the engine's options, then a line a run."""
    from jaxpaged.async_llm import AsyncLLM

    llm = AsyncLLM(**json.loads(sys.stdin.readline()), **_ENGINE)
    print("{}", flush=True)

    async def send(request_id: str, prompt: list[int], max_tokens: int) -> Seen:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return await watch(llm.stream_events(prompt, params, request_id=request_id))

    for line in sys.stdin:
        arguments = json.loads(line)
        run = await run_closed(send, Workload(**arguments.pop("work")), **arguments)
        print(json.dumps(run.figures()), flush=True)
    llm.close()


if __name__ == "__main__":
    asyncio.run(_run_in_process())
