"""Starts a small engine with a store of programs, and prints what it took from there (JSON).

    start_from_store.py FOLDER NUM_DEVICES cold|warm|other

`warm`: whatever would trace a program raises. `other`: the pool has another size.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.engines import run_to_end
from helpers.requests import make_request

from jaxpaged import checkpoint
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.models.config import ModelConfig
from jaxpaged.runner import start
from jaxpaged.runner.executable_store import ExecutableStore
from jaxpaged.runner.runner import Runner
from jaxpaged.runner.sharding import tensor_mesh
from jaxpaged.runner.weights import load_weights

MODEL = Path(__file__).parents[1] / "goldens" / "tiny_qwen3"


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing should be traced")


def main(folder: Path, num_devices: int, mode: str) -> dict[str, Any]:
    config = EngineConfig(
        str(MODEL),
        num_blocks=21 if mode == "other" else 20,
        max_num_seqs=1,
        max_num_tokens=16,
        tensor_parallel=num_devices,
    )
    found, mesh = checkpoint.locate(config.model), tensor_mesh(num_devices)
    model = ModelConfig.from_hf(found.config)
    weights = load_weights(model, found, dtype="float32", mesh=mesh)
    runner = Runner(weights, start.resolve_config(config, found.name, weights))
    if mode == "warm":
        jax.jit = refuse
    runner.warm_up(ExecutableStore(folder, mesh.devices.flatten().tolist()))
    request = make_request("a", list(range(5, 30)), max_tokens=12)
    answers = run_to_end(Engine(runner.config, runner), [request])
    num_programs, num_loads = runner.num_programs
    return {
        "num_programs": num_programs,
        "num_loads": num_loads,
        "token_ids": answers.tokens["a", 0],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
