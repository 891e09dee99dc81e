"""Parts of scripts/test_gpu: engines beside and after each other, and what compiles meanwhile."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from gpu_parts_models import load_random, run_mixed, tiny_qwen3_config, write_config
from helpers.compiles import counted_compiles
from helpers.engines import fresh_engine, run_to_end
from helpers.requests import make_beam_request, make_request

from jaxpaged.checkpoint.locate import home_folder
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine, load_engine
from jaxpaged.request import EngineRequest

MAX_GROWTH = 0.01  # of the device's memory in use, after engines were closed
# 2 MiB a block of 16 tokens, so that pools fill a GPU and weights do not.
WIDE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "layer_types": ["full_attention"] * 8,
    "max_position_embeddings": 65536,
}
BLOCKS_OF_2_GB = 1000

# What requests ask for: one of each, put together.
DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8},
    {"temperature": 1.0, "n": 3},
]
CHANGES: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"logit_bias": ((5, 3.0), (9, -100.0))},
    {"allowed_token_ids": frozenset(range(10, 200))},
    {"min_tokens": 6, "stop_token_ids": range(0, 300, 7)},
    {"use_prefix_cache": False},
]
TOLD: list[dict[str, Any]] = [{}, {}, {"logprobs": 0}, {"logprobs": 5}, {"prompt_logprobs": 2}]


# --- engines -----------------------------------------------------------------------------------


def check_engines() -> str:
    """Two at once share the device's memory; none leaves anything behind."""
    folder = home_folder() / "test_gpu_wide"
    write_config(folder, tiny_qwen3_config(**WIDE))
    config = EngineConfig(
        str(folder),
        dtype="bfloat16",
        load_format="random",
        max_num_seqs=8,
        max_num_tokens=64,
        max_model_len=65536 if memory_limit() > 2**35 else 8192,
        memory_fraction=0.4,
    )
    begin = bytes_in_use()
    together = check_two(config)
    after_two = bytes_in_use() - begin
    small = replace(config, max_model_len=1024, num_blocks=BLOCKS_OF_2_GB)
    sizes, tokens = [], []
    begin_of_five = bytes_in_use()
    for _ in range(5):
        engine = load_engine(small)
        tokens.append(answers_of(engine))
        sizes.append(bytes_in_use() - begin_of_five)
        engine.close()
    after_five = bytes_in_use() - begin_of_five
    assert all(found == tokens[0] for found in tokens), "engines after each other differ"
    assert min(sizes) > 1.9e9, f"an engine of {min(sizes) / 1e9:.2f} GB is too small to tell"
    assert max(sizes) <= (1 + MAX_GROWTH) * sizes[0], f"engines grow: {sizes}"
    assert after_two <= MAX_GROWTH * together, f"two leave {after_two / 1e6:.1f} MB behind"
    assert after_five <= MAX_GROWTH * sizes[0], f"five leave {after_five / 1e6:.1f} MB behind"
    return (
        f"two at once hold {together / 1e9:.1f} GB and leave {after_two / 1e6:.2f} MB; five of "
        f"{sizes[0] / 1e9:.2f} GB leave {after_five / 1e6:.2f} MB"
    )


def check_two(config: EngineConfig) -> int:
    """Two engines answer in turn; returns the bytes that they hold together."""
    begin = bytes_in_use()
    engines: list[Engine] = []
    try:
        for _ in range(2):
            engines.append(load_engine(config))
        held = bytes_in_use() - begin
        wanted = 2 * config.memory_fraction * memory_limit()
        assert held > 0.9 * wanted, f"{held / 1e9:.1f} GB, of {wanted / 1e9:.1f} GB to be had"
        tokens = [answers_of(engine) for _ in range(3) for engine in engines]
        assert all(found == tokens[0] for found in tokens), "engines beside each other differ"
    finally:
        for engine in engines:
            engine.close()
    return held


def answers_of(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Greedy answers to the same requests, of an engine without cached blocks."""
    engine.reset_prefix_cache()  # why: chunks of other sizes round otherwise in bf16
    requests = [
        make_request(str(i), range(i, i + 40 * i + 5), max_tokens=24, ignore_eos=True)
        for i in range(6)
    ]
    return run_to_end(engine, requests).tokens


def bytes_in_use() -> int:
    stats = jax.devices()[0].memory_stats()
    if stats is None:  # the CPU's are not counted
        return sum(array.nbytes for array in jax.live_arrays())
    return stats["bytes_in_use"]


def memory_limit() -> int:
    """What `memory_fraction` is a fraction of."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else 4 * 2**30


# --- compiles ----------------------------------------------------------------------------------


def check_compiles() -> str:
    """Random lengths, batch sizes and options compile nothing once an engine is warm."""
    runner = load_random(
        home_folder() / "test_gpu_compiles",
        tiny_qwen3_config(head_dim=128, num_attention_heads=8),
        max_num_seqs=16,
        max_num_tokens=128,
        num_blocks=120,
    )
    engine = fresh_engine(runner)
    rng = np.random.default_rng(0)
    num_requests = 0
    with counted_compiles() as compiles:
        for batch in range(20):
            requests = [any_request(str(i), rng) for i in range(rng.integers(1, 24))]
            run_mixed(engine, requests, seed=batch)
            num_requests += len(requests)
    stats = engine.stats()
    engine.close()
    assert stats.compiles_after_warmup == 0, f"{stats.compiles_after_warmup} programs were compiled"
    assert not compiles, f"JAX compiled {len(compiles)} programs"
    assert stats.preemptions > 0, "the pool was to be too small for some batches"
    counts = f"{num_requests} requests, {stats.steps} steps, {stats.preemptions} preemptions"
    return f"{counts}: nothing compiled"


def any_request(request_id: str, rng: np.random.Generator) -> EngineRequest:
    first = int(rng.integers(0, 100))
    prompt = range(first, first + int(rng.integers(1, 200)))
    max_tokens = int(rng.integers(6, 40))
    if rng.random() < 0.1:
        return make_beam_request(request_id, prompt, beam_width=3, max_tokens=max_tokens)
    options: dict[str, Any] = {"seed": int(rng.integers(0, 100))}
    for choices in (DRAWS, CHANGES, TOLD):
        options |= choices[rng.integers(len(choices))]
    return make_request(request_id, prompt, max_tokens=max_tokens, **options)
