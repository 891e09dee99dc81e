"""Logits and greedy tokens of tiny models against Hugging Face transformers (tests/goldens)."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_models import MemoryCheckpoint, Row, make_pool, pack, prompt_logits, run_step
from safetensors.numpy import load_file

from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.sharding import tensor_mesh
from jaxpaged.runner.weights import load_weights

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = ["tiny_llama", "tiny_qwen2", "tiny_qwen3"]
# Logits reach 19; a lost bias or norm changes them by more than 0.1.
TOLERANCE = 1e-4


def config_of(name):
    return ModelConfig.from_hf(json.loads((GOLDENS / name / "config.json").read_text()))


def tensors_of(name):
    return load_file(GOLDENS / name / "model.safetensors")


def load(name, *, layout=None, tensors=None):
    checkpoint = MemoryCheckpoint(tensors_of(name) if tensors is None else tensors)
    return load_weights(
        config_of(name), checkpoint, dtype="float32", mesh=tensor_mesh(1), layout=layout
    )


def cases_of(name):
    return json.loads((GOLDENS / f"{name}.json").read_text())["cases"]


def golden_logits(name, case):
    return np.load(GOLDENS / f"{name}_logits.npz")[f"case_{case}"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "scan") for name in MODELS] + [("tiny_llama", "flat"), ("tiny_qwen3", "flat")],
)
def test_prompt_logits(name, layout):
    prompt = cases_of(name)[4]["prompt_token_ids"]
    found = prompt_logits(load(name, layout=layout), prompt, tensor_mesh(1))
    np.testing.assert_allclose(found, golden_logits(name, 4), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("tiny_llama", "model.layers.1.self_attn.q_proj.bias"),
        ("tiny_llama", "model.layers.2.self_attn.o_proj.bias"),
        ("tiny_qwen2", "model.layers.0.self_attn.v_proj.bias"),
        ("tiny_qwen3", "model.layers.1.self_attn.k_norm.weight"),
    ],
)
def test_a_neutralised_tensor_shows(name, tensor):
    tensors = tensors_of(name)
    tensors[tensor] = np.ones_like(tensors[tensor]) * (1.0 if "norm" in tensor else 0.0)
    tensors[tensor] = tensors[tensor].astype(np.float32)
    prompt = cases_of(name)[4]["prompt_token_ids"]
    found = prompt_logits(load(name, tensors=tensors), prompt, tensor_mesh(1))
    assert np.abs(found - golden_logits(name, 4)).max() > 100 * TOLERANCE


def test_llama3_scaling_shows():
    name = "tiny_llama"
    config = config_of(name)
    assert config.rope.type == "llama3"
    plain = replace(config, rope=replace(config.rope, type="default"))
    weights = load_weights(
        plain, MemoryCheckpoint(tensors_of(name)), dtype="float32", mesh=tensor_mesh(1)
    )
    found = prompt_logits(weights, cases_of(name)[4]["prompt_token_ids"], tensor_mesh(1))
    assert np.abs(found - golden_logits(name, 4)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3"])
def test_greedy_tokens_in_one_batch(name):
    """Prompts prefilled one by one, then all decoded together; blocks are dealt in turn."""
    weights = load(name)
    cases = cases_of(name)[:6]
    assert any(len(case["prompt_token_ids"]) > 16 for case in cases)
    num_blocks = 16 * len(cases)
    pool = make_pool(weights.structure.config, tensor_mesh(1), num_blocks)
    tables = [range(1 + idx, 1 + num_blocks, len(cases)) for idx in range(len(cases))]
    outputs = []
    for case, table in zip(cases, tables, strict=True):
        row = Row(case["prompt_token_ids"], table)
        logits, pool = run_step(weights, pack([row], num_tokens=40, num_rows=1), pool)
        outputs.append([int(logits[0].argmax())])
    for _ in range(len(cases[0]["output_token_ids"]) - 1):
        rows = [
            Row([output[-1]], table, len(case["prompt_token_ids"]) + len(output) - 1)
            for case, table, output in zip(cases, tables, outputs, strict=True)
        ]
        logits, pool = run_step(weights, pack(rows, num_tokens=8, num_rows=8), pool)
        for idx, output in enumerate(outputs):
            output.append(int(logits[idx].argmax()))
    for case, output in zip(cases, outputs, strict=True):
        check_greedy(case, output)
    assert len({tuple(output) for output in outputs}) == len(outputs)


def check_greedy(case, output):
    """Equal, or first different where the two best logits are closer than 1e-3."""
    for found, expected, margin in zip(
        output, case["output_token_ids"], case["margins"], strict=True
    ):
        if found != expected:
            assert margin < 1e-3
            return


def test_bfloat16_stays_close():
    prompt = cases_of("tiny_llama")[4]["prompt_token_ids"]
    weights = load_weights(
        config_of("tiny_llama"),
        MemoryCheckpoint(tensors_of("tiny_llama")),
        dtype="bfloat16",
        mesh=tensor_mesh(1),
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    found = prompt_logits(weights, prompt, tensor_mesh(1))
    assert found.dtype == np.float32
    golden = golden_logits("tiny_llama", 4)
    error = np.linalg.norm(found - golden) / np.linalg.norm(golden)
    assert error < 0.05
