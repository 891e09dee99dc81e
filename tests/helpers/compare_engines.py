"""Run as a program with 4 fake devices: the same tokens from engines on 1, 2 and 4 of them."""

import json
import sys
import tempfile
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.engines import fresh_engine, load_runner, run_to_end
from helpers.requests import make_request
from helpers.tiny_models import hf_config

OPTIONS = [
    {},
    {"temperature": 1.0, "seed": 3, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2**40},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.05, "seed": -1},
]


def main() -> None:
    assert len(jax.devices()) == 4
    requests = [
        make_request(f"{i}", range(5 + i, 5 + i + 8 * (i + 1)), max_tokens=24, **options)
        for i, options in enumerate(OPTIONS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = hf_config(num_hidden_layers=2, model_type="qwen3")
        Path(folder, "config.json").write_text(json.dumps(config))
        found = []
        for num_devices in (1, 2, 4):
            runner = load_runner(
                folder,
                load_format="random",
                tensor_parallel=num_devices,
                max_num_seqs=2,
                max_num_tokens=16,
                max_model_len=64,
                num_blocks=16,
                seed=5,
            )
            assert len(runner.pool.data.sharding.device_set) == num_devices
            # A pool that is too small for all: preemption and block copies run sharded too.
            engine = fresh_engine(runner, num_blocks=5)
            found.append(run_to_end(engine, requests).tokens)
            stats = engine.stats()
            assert stats.compiles_after_warmup == 0 and stats.preemptions > 0, stats
    assert found[0] == found[1] == found[2], found
    assert len({token for tokens in found[0].values() for token in tokens}) > 10, found[0]
    print("equal")


if __name__ == "__main__":
    main()
