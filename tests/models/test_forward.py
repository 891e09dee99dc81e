"""Models through `forward` against the NumPy oracle, and the promises about rows."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.attention_cases import with_layout
from helpers.numpy_model import numpy_logits
from helpers.tiny_models import (
    MemoryCheckpoint,
    Row,
    hf_config,
    make_pool,
    pack,
    prompt_logits,
    random_checkpoint,
    run_step,
    tiny_config,
)

from jaxpaged.models import layers, precision
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import CausalLM, DecoderLayer
from jaxpaged.runner.forward import forward
from jaxpaged.runner.sharding import tensor_mesh
from jaxpaged.runner.weights import load_weights
from kernels_pallas.ops import pool_layout

PROMPT = [5, 17, 80, 3, 3, 41, 9, 66, 95, 0, 12, 5, 30]
# Shared by the tests of rows, with few shapes, because each shape is compiled.
CONFIG = tiny_config(attention_bias=True)
WINDOWED = {"sliding_window": 4, "use_sliding_window": True}


def load(config, checkpoint=None, dtype="float32", **options):
    checkpoint = checkpoint or random_checkpoint(config)
    return load_weights(config, checkpoint, dtype=dtype, mesh=tensor_mesh(1), **options)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, "scan"),
        ({"tie_word_embeddings": True, "num_key_value_heads": 1}, "scan"),
        ({"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8}, "scan"),
        ({"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32}, "flat"),
        ({"model_type": "mistral", "sliding_window": 5}, "scan"),
        ({"model_type": "qwen2", "max_window_layers": 1} | WINDOWED, "scan"),
        ({"model_type": "qwen2", "max_window_layers": 2} | WINDOWED, "flat"),
        ({"model_type": "qwen3", "head_dim": 10}, "scan"),
    ],
)
def test_logits_are_the_oracles(changes, layout):
    raw = hf_config(**changes)
    config = ModelConfig.from_hf(raw)
    checkpoint = random_checkpoint(config)
    expected = numpy_logits(raw, checkpoint.tensors, PROMPT, config.layer_windows)
    found = prompt_logits(load(config, checkpoint, layout=layout), PROMPT, tensor_mesh(1))
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_oracle_sees_the_window():
    raw = hf_config(model_type="mistral", sliding_window=5)
    checkpoint = random_checkpoint(ModelConfig.from_hf(raw))
    unlimited = numpy_logits(raw, checkpoint.tensors, PROMPT)
    windowed = numpy_logits(raw, checkpoint.tensors, PROMPT, [5, 5, 5])
    np.testing.assert_allclose(unlimited[:5], windowed[:5], atol=1e-12)
    assert np.abs(unlimited[5:] - windowed[5:]).max() > 0.01


def test_the_plain_module_gives_the_same():
    config = tiny_config(model_type="qwen3", num_hidden_layers=2)
    rngs = nnx.Rngs(0)
    modules = [DecoderLayer(config, None, "float32", rngs=rngs) for _ in range(2)]
    model = CausalLM(config, modules, "float32", rngs=rngs)
    weights = load(config, layout="flat")
    structure = weights.structure
    for layer, arrays in enumerate(weights.groups[0]):
        rebuilt = structure.groups[0].structure.rebuild(arrays)
        nnx.update(model.layers[layer], nnx.state(rebuilt))
    outer = structure.outer.rebuild(weights.outer)
    for name in ("embedding", "norm", "head"):
        nnx.update(getattr(model, name), nnx.state(getattr(outer, name)))
    inputs = pack([Row(PROMPT, range(1, 5))], num_tokens=14, num_rows=1)
    pool = make_pool(config, tensor_mesh(1))
    found, _ = nnx.jit(CausalLM.__call__)(
        model, inputs.token_ids, inputs.positions, pool, inputs.metadata, inputs.logit_positions
    )
    expected, _ = run_step(weights, inputs, pool)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("layout", ["scan", "flat"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_products_may_come_in_parts(layout, is_lost, monkeypatch):
    """As they do from a Hopper kernel: the norms that follow add them up, the last layer's too."""
    inputs = pack([Row(PROMPT, range(1, 5))], num_tokens=16, num_rows=4)
    whole = layers.matmul_in_parts

    def logits() -> np.ndarray:
        weights, pool = load(CONFIG, layout=layout), make_pool(CONFIG, tensor_mesh(1))
        step = jax.jit(partial(forward))  # another function is traced anew
        arguments = (weights, inputs.token_ids, inputs.positions, pool)
        return np.asarray(step(*arguments, inputs.metadata, inputs.logit_positions)[0][:1])

    def in_parts(*arguments, **options):
        parts = whole(*arguments, **options) * jnp.array([0.5, 0.25, 0.25])[:, None, None]
        return parts[: 2 if is_lost else 3]

    expected = logits()
    monkeypatch.setattr(layers, "matmul_in_parts", in_parts)
    assert np.allclose(logits(), expected, atol=1e-5) == (not is_lost)


def test_chunks_and_decodes_equal_one_prefill():
    """A row decodes while another's prompt comes in chunks of 5, 1 and 7 tokens."""
    weights = load(CONFIG)
    whole = prompt_logits(weights, PROMPT, tensor_mesh(1))
    pool = make_pool(CONFIG, tensor_mesh(1))
    other = PROMPT[::-1]
    other_whole = prompt_logits(weights, other, tensor_mesh(1))
    start = pack([Row(other[:9], [9, 2, 7, 4])], num_tokens=16, num_rows=4)
    _, pool = run_step(weights, start, pool)
    done = 0
    for step, count in enumerate([5, 1, 7]):
        decode = Row([other[9 + step]], [9, 2, 7, 4], 9 + step)
        chunk = Row(PROMPT[done : done + count], [1, 8, 3, 5], done)
        done += count
        inputs = pack([decode, chunk], num_tokens=16, num_rows=4)
        logits, pool = run_step(weights, inputs, pool)
        np.testing.assert_allclose(logits[0], other_whole[9 + step], atol=1e-5)
        np.testing.assert_allclose(logits[1], whole[done - 1], atol=1e-5)


def test_padding_and_neighbours_change_nothing():
    weights = load(CONFIG)
    pool = make_pool(CONFIG, tensor_mesh(1))
    _, pool = run_step(weights, pack([Row(PROMPT, [3, 1, 4, 6])], num_tokens=16, num_rows=4), pool)
    row = Row([7], [3, 1, 4, 6], len(PROMPT))
    neighbours = [Row([token], [8 + token], 0) for token in (1, 2)]
    found = []
    for rows, size in [([row], 4), ([row], 8), ([*neighbours, row], 4), ([row, *neighbours], 8)]:
        inputs = pack(rows, num_tokens=size, num_rows=size)
        logits, _ = run_step(weights, inputs, pool)
        found.append(logits[rows.index(row)])
    for logits in found[1:]:
        np.testing.assert_allclose(logits, found[0], atol=1e-5)


def test_only_the_positions_asked_for():
    weights = load(CONFIG)
    inputs = pack([Row(PROMPT, range(1, 5))], num_tokens=16, num_rows=4)
    logits, _ = run_step(weights, inputs, make_pool(CONFIG, tensor_mesh(1)))
    assert logits.shape == (4, CONFIG.vocab_size)
    assert logits.dtype == jnp.float32
    whole = prompt_logits(weights, PROMPT, tensor_mesh(1))
    np.testing.assert_allclose(logits[0], whole[-1], atol=1e-5)
    assert np.abs(whole[-1] - whole[-2]).max() > 0.1


def test_small_steps_are_the_more_precise(monkeypatch):
    """Against a float32 model with the same weights; keys and values are rounded in both."""
    config = tiny_config()
    tensors = random_checkpoint(config, seed=1).tensors
    checkpoint = MemoryCheckpoint(
        {
            name: np.asarray(jnp.asarray(tensor, jnp.bfloat16), np.float32)
            for name, tensor in tensors.items()
        }
    )

    def found(dtype: str) -> np.ndarray:
        jax.clear_caches()
        weights = load(config, checkpoint, dtype=dtype)
        return prompt_logits(weights, PROMPT, tensor_mesh(1))

    expected = found("float32")
    error = np.linalg.norm(found("bfloat16") - expected)
    monkeypatch.setattr(precision, "MAX_TWO_TERM_ROWS", 0)
    assert error < 0.5 * np.linalg.norm(found("bfloat16") - expected)


def test_a_tpu_which_gives_one_term_agrees():
    """Its attention rounds queries and results; the products beside it read two terms."""
    weights = load(CONFIG, dtype="bfloat16")
    inputs = pack([Row(PROMPT, range(1, 5))], num_tokens=16, num_rows=4)
    arguments = (weights, inputs.token_ids, inputs.positions)

    def found(impl: str) -> np.ndarray:
        pool = make_pool(CONFIG, tensor_mesh(1), dtype="bfloat16")
        pool = with_layout(pool, pool_layout(impl))
        step = jax.jit(partial(forward, impl=impl))
        return np.asarray(step(*arguments, pool, inputs.metadata, inputs.logit_positions)[0][:1])

    expected = found("xla")
    error = np.linalg.norm(found("tpu_interpret") - expected)
    assert error < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("num_tokens", [4, 16], ids=["decode", "prefill"])
def test_float32_products_are_full_ones(num_tokens):
    """Accelerators round by default, to TensorFloat-32 or bfloat16."""
    assert products(num_tokens, "float32")["DEFAULT"] == 0
    # qkv, o, gate and up, down, head. Those of attention are in float32 always.
    assert products(num_tokens, "bfloat16")["DEFAULT"] == 5


def products(num_tokens: int, dtype: str) -> dict[str, int]:
    """Products of a step by the precision that they ask for."""
    text = lowered_step(num_tokens, dtype, tiny_config(num_hidden_layers=1))
    asked = re.findall(r"dot_general .*precision = \[(\w+), \1\]", text)
    assert len(asked) == text.count("dot_general ")
    return {name: asked.count(name) for name in ("DEFAULT", "HIGHEST")}


@pytest.mark.parametrize(
    "num_tokens, rounded",
    [(4, []), (16, []), (48, []), (precision.MAX_WIDE_TOKENS + 16, ["add"] * 3)],
    ids=["decode", "prefill", "one term", "long prefill"],
)
def test_nothing_but_products_is_in_bfloat16(num_tokens, rounded):
    """Elsewhere a GPU would round after each operation; long steps round what layers add to.

    The first of these sums is of x and zeros, and rounds nothing.
    """
    config = tiny_config(model_type="qwen3", num_hidden_layers=1)
    assert arithmetic(lowered_step(num_tokens, "bfloat16", config), "bf16") == rounded
    assert "add" in arithmetic(lowered_step(num_tokens, "float32", config), "f32")


def arithmetic(text: str, dtype: str) -> list[str]:
    """The operations of a lowered program that round every element to `dtype`."""
    names = "add|subtract|multiply|divide|negate|exponential|logistic|rsqrt"
    return re.findall(rf"stablehlo\.({names}) .*tensor<(?:\d+x)*{dtype}>\n", text)


def lowered_step(num_tokens: int, dtype: str, config: ModelConfig) -> str:
    weights = load_weights(
        config, random_checkpoint(config), dtype=dtype, mesh=tensor_mesh(1), layout="flat"
    )
    inputs = pack([Row([5], [1])], num_tokens=num_tokens, num_rows=4)
    pool = make_pool(config, tensor_mesh(1), dtype=dtype)
    arguments = (inputs.token_ids, inputs.positions, pool, inputs.metadata, inputs.logit_positions)
    return jax.jit(forward).lower(weights, *arguments).as_text()
