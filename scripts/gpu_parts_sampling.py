"""Part of scripts/test_gpu: draws of the engine's own programs on the GPU are those of the CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cuda_programs import make_executables
from gpu_parts_models import tiny_qwen3_config
from helpers.sampler import draw, make_inputs, words_of

from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.inputs import SampleInputs
from jaxpaged.runner.sampling import Variant
from jaxpaged.runner.sharding import tensor_mesh
from jaxpaged.runner.step import BatchState

# Rows and vocabulary: of tiny models, and of a real one.
SIZES = [(8, 300), (16, 300), (64, 5000), (8, 151_936)]
# Of a program; XLA makes a CUDA graph of what it has run before.
NUM_RUNS = 12
# Gumbel noise differs in its last bit, and so may a draw between equals.
MAX_DIFFERENT = 1
MODEL_LEN = 256
CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.3, 0.7, 1.0, 1.0, 2.0],
    "min_p": [0.0, 0.0, 0.05, 0.3],
    "top_k": [0, 1, 5, 20, 50],
    "top_p": [1.0, 0.3, 0.8, 0.95],
}


def check_sample() -> str:
    """Random rows with random options, the same programs again and again."""
    num_draws = num_different = 0
    for num_rows, vocab in SIZES:
        for variant in Variant:
            program = sample_program(num_rows, vocab, variant)
            rng = np.random.default_rng(vocab)
            for _ in range(NUM_RUNS):
                rows = random_rows(rng, num_rows, vocab)
                options = random_options(rng, num_rows, variant)
                found = program(rows, make_inputs(num_rows, **options))
                num_draws += num_rows
                num_different += int((found != drawn_on_cpu(rows, options, variant)).sum())
    assert num_different <= MAX_DIFFERENT, f"{num_different} of {num_draws} draws differ"
    check_control()
    return f"{num_draws} draws, {num_different} of them not the CPU's"


def sample_program(
    num_rows: int, vocab: int, variant: Variant
) -> Callable[[np.ndarray, SampleInputs], np.ndarray]:
    """The engine's own program: logits and options in, token ids out."""
    bucket = Bucket(num_rows, num_rows)
    model = ModelConfig.from_hf(tiny_qwen3_config(vocab_size=vocab))
    executables, _ = make_executables(tensor_mesh(1), model, bucket, MODEL_LEN)
    program = executables.sample(bucket, variant)

    def run(rows: np.ndarray, inputs: SampleInputs) -> np.ndarray:
        tables = jnp.zeros((num_rows + 1, MODEL_LEN // 16), jnp.int32)
        state = BatchState(token_ids=jnp.zeros(num_rows + 1, jnp.int32), block_tables=tables)
        drawn, _ = program(jnp.asarray(rows), state, words_of(inputs))
        return np.asarray(drawn)[0]

    return run


def random_rows(rng: np.random.Generator, num_rows: int, vocab: int) -> np.ndarray:
    rows = rng.standard_normal((num_rows, vocab), np.float32) * rng.choice([1.0, 3.0, 6.0])
    rows[::3, rng.permutation(vocab)[: vocab // 3]] = -np.inf
    return rows


def random_options(rng: np.random.Generator, num_rows: int, variant: Variant) -> dict[str, Any]:
    """A value of each option for each row, of those that the variant does for."""
    options = {name: rng.choice(np.asarray(choices), num_rows) for name, choices in CHOICES.items()}
    if variant is Variant.GREEDY:
        options["temperature"] = np.zeros(num_rows)
    if variant is Variant.RANDOM:
        options |= {"top_k": 0, "top_p": 1.0}
    if variant is Variant.LIMITED:
        options["top_p"] = np.where(options["top_k"] > 0, 1.0, options["top_p"])
    return options


def drawn_on_cpu(rows: np.ndarray, options: dict[str, Any], variant: Variant) -> np.ndarray:
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = make_inputs(len(rows), **options)
        return np.asarray(draw(jnp.asarray(rows), inputs, variant)[0])


def check_control() -> None:
    """Limits that are passed over must show."""
    rng = np.random.default_rng(0)
    rows, options = random_rows(rng, 64, 300), {"top_k": 5}
    found, limited = (drawn_on_cpu(rows, options, v) for v in (Variant.RANDOM, Variant.LIMITED))
    assert (found != limited).sum() > MAX_DIFFERENT, "draws without limits went unnoticed"
