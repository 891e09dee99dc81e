"""Run as a program with 4 fake devices: the same logits on 1, 2 and 4 of them."""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.tiny_models import Row, make_pool, pack, random_checkpoint, run_step, tiny_config

from jaxpaged.runner.sharding import tensor_mesh
from jaxpaged.runner.weights import Weights, load_weights

STARTS = [5, 17, 80]
CASES = [
    ({"attention_bias": True, "mlp_bias": True}, "scan", False),
    ({"model_type": "qwen3", "vocab_size": 90, "tie_word_embeddings": True}, "flat", True),
]


def greedy(weights: Weights, num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logits of a decode loop; it reads the sharded pool as it was written."""
    pool = make_pool(weights.structure.config, tensor_mesh(num_devices))
    tokens, all_logits = [STARTS], []
    for position in range(12):
        rows = [
            Row([token], range(1 + idx, 12, 3), position) for idx, token in enumerate(tokens[-1])
        ]
        logits, pool = run_step(weights, pack(rows, num_tokens=3, num_rows=3), pool)
        all_logits.append(logits)
        tokens.append([int(token) for token in logits.argmax(-1)])
    return np.array(tokens), np.array(all_logits)


def main() -> None:
    assert len(jax.devices()) == 4
    for changes, layout, random in CASES:
        config = tiny_config(num_hidden_layers=2, **changes)
        found = []
        for num_devices in (1, 2, 4):
            weights = load_weights(
                config,
                None if random else random_checkpoint(config),
                dtype="float32",
                mesh=tensor_mesh(num_devices),
                random=random,
                layout=layout,
            )
            found.append(greedy(weights, num_devices))
        for tokens, logits in found[1:]:
            np.testing.assert_array_equal(tokens, found[0][0])
            np.testing.assert_allclose(logits, found[0][1], atol=1e-4)
        assert len(np.unique(found[0][0])) > 10, found[0][0]
    print("equal")


if __name__ == "__main__":
    main()
