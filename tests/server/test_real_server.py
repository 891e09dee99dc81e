"""The command as it is shipped: a tiny real model, its engine in a process, a client that asks."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from jaxpaged.client import Client
from jaxpaged.sampling_params import SamplingParams

GOLDENS = Path(__file__).parents[1] / "goldens"
SERVE = "import sys; from jaxpaged.cli import main; sys.exit(main())"


def test_the_served_model_answers_as_the_golden_one_and_the_front_never_loads_jax():
    case = json.loads((GOLDENS / "tiny_llama.json").read_text())["cases"][0]
    flags = ["--port=0", "--admin-port=0", "--max-num-seqs=2", "--max-num-tokens=32"]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", str(GOLDENS / "tiny_llama"), *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        match = re.search(r" on (\S+) \(admin on (\S+)\)", process.stdout.readline())
        assert match is not None
        with Client(match[1], match[2]) as client:
            expected = case["output_token_ids"]
            params = SamplingParams(max_tokens=len(expected), temperature=0, ignore_eos=True)
            (output,) = client.generate([case["prompt_token_ids"]], params)
            assert output.completions[0].token_ids == expected
            stats = client.stats()
            assert stats.used_blocks == stats.compiles_after_warmup == 0
        (engine, *_) = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "spawn_main" in " ".join(child.cmdline())
        )
        for owner, has_jax in ((engine, True), (psutil.Process(process.pid), False)):
            assert any("jaxlib" in item.path for item in owner.memory_maps()) == has_jax
        if sys.platform == "linux":
            for thread in engine.threads():
                niceness = os.getpriority(os.PRIO_PROCESS, thread.id)
                assert niceness > psutil.Process(process.pid).nice(), "steps come before answers"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not engine.is_running()
    finally:
        process.kill()
        process.wait()
