"""Run as a program with 4 fake devices: the same logits on 1, 2 and 4 of them."""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.tiny_models import Row, make_pool, pack, prompt_logits, random_checkpoint, run_step
from helpers.tiny_models import tiny_config

from jaxpaged.runner.sharding import tensor_mesh
from jaxpaged.runner.weights import Weights, load_weights

PROMPT = [5, 17, 80, 3, 41, 9, 66]
CASES = [
    ({"attention_bias": True, "mlp_bias": True}, "scan", False),
    ({"model_type": "qwen3", "vocab_size": 90, "tie_word_embeddings": True}, "sliced", False),
    ({"model_type": "qwen2"}, "flat", True),
]


def greedy_tokens(weights: Weights, num_devices: int) -> list[int]:
    """Tokens of a decode loop, so that the sharded pool is read as it was written."""
    pool = make_pool(weights.structure.config, tensor_mesh(num_devices))
    tokens = [PROMPT[0]]
    for position in range(12):
        row = Row([tokens[-1]], [3, 1, 2], position)
        logits, pool = run_step(weights, pack([row], num_tokens=1, num_rows=1), pool)
        tokens.append(int(logits[0].argmax()))
    return tokens


def main() -> None:
    assert len(jax.devices()) == 4
    for changes, layout, random in CASES:
        config = tiny_config(num_hidden_layers=2, **changes)
        logits, tokens = [], []
        for num_devices in (1, 2, 4):
            mesh = tensor_mesh(num_devices)
            weights = load_weights(
                config,
                None if random else random_checkpoint(config),
                dtype="float32",
                mesh=mesh,
                random=random,
                layout=layout,
            )
            logits.append(prompt_logits(weights, PROMPT, mesh))
            tokens.append(greedy_tokens(weights, num_devices))
        for found in logits[1:]:
            np.testing.assert_allclose(found, logits[0], atol=2e-5)
        assert tokens[0] == tokens[1] == tokens[2], tokens
        assert len(set(tokens[0])) > 4, tokens[0]
    print("equal")


if __name__ == "__main__":
    main()
