import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_models import (
    MemoryCheckpoint,
    Row,
    make_pool,
    pack,
    random_checkpoint,
    run_step,
    tiny_config,
)

from jaxpaged.errors import CheckpointError
from jaxpaged.models.llama import EMBEDDING_NAME, HEAD_NAME
from jaxpaged.runner.sharding import check_divisible, regroup_parts, tensor_mesh
from jaxpaged.runner.weights import load_weights

PROMPT = [5, 17, 80, 3, 41, 9]
WINDOWED = {"sliding_window": 4, "use_sliding_window": True}


def load(config, checkpoint, **options):
    options = {"dtype": "float32", "mesh": tensor_mesh(1)} | options
    return load_weights(config, checkpoint, **options)


def tied_config(tied):
    return tiny_config(num_hidden_layers=1, tie_word_embeddings=tied)


def checkpoint_with_head(*, head):
    tensors = dict(random_checkpoint(tied_config(False)).tensors)
    if head == "absent":
        del tensors[HEAD_NAME]
    elif head == "equal":
        tensors[HEAD_NAME] = tensors[EMBEDDING_NAME].copy()
    return MemoryCheckpoint(tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["different", "equal", "absent"])
def test_head_present_or_absent_whatever_the_config_claims(tied, head, caplog):
    with caplog.at_level(logging.WARNING):
        weights = load(tied_config(tied), checkpoint_with_head(head=head))
    table = 1 if head == "different" else 0
    expected = checkpoint_with_head(head="different").tensors[[EMBEDDING_NAME, HEAD_NAME][table]]
    model = weights.structure.outer.rebuild(weights.outer)
    used = model.embedding if model.head is None else model.head
    np.testing.assert_array_equal(used.table[...], expected)
    warned = {(True, "different"), (False, "absent")}
    assert bool(caplog.records) == ((tied, head) in warned)


def test_no_embedding_is_an_error_even_with_a_head():
    tensors = dict(checkpoint_with_head(head="different").tensors)
    del tensors[EMBEDDING_NAME]
    with pytest.raises(CheckpointError, match=f"missing: {EMBEDDING_NAME}"):
        load(tied_config(True), MemoryCheckpoint(tensors))


def test_every_wrong_tensor_is_named():
    config = tiny_config(model_type="qwen3")
    tensors = dict(random_checkpoint(config).tensors)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, np.float32)
    tensors["model.layers.2.mlp.down_proj.weight"] = np.zeros((32, 47), np.float32)
    with pytest.raises(CheckpointError) as error:
        load(config, MemoryCheckpoint(tensors))
    for name in ("1.self_attn.q_norm.weight", "0.self_attn.q_proj.bias", "2.mlp.down_proj.weight"):
        assert name in str(error.value)


def test_new_weights_of_the_same_structure_do_not_compile(caplog):
    config = tiny_config()
    first, second = (load(config, random_checkpoint(config, seed)) for seed in (0, 1))
    assert first.structure == second.structure
    inputs = pack([Row(PROMPT, [1, 2])], num_tokens=8, num_rows=1)
    pool = make_pool(config, tensor_mesh(1))
    before, _ = run_step(first, inputs, pool)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        after, _ = run_step(second, inputs, pool)
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]
    assert np.abs(before - after).max() > 0.1
    swapped = dataclasses.replace(first, outer=second.outer, groups=second.groups)
    np.testing.assert_array_equal(run_step(swapped, inputs, pool)[0], after)


def test_random_weights_are_the_same_in_every_layout():
    config = tiny_config(model_type="qwen2", max_window_layers=1, **WINDOWED)
    scan, flat = (
        load(config, None, random=True, seed=3, layout=layout) for layout in ("scan", "flat")
    )
    assert len(jax.tree.leaves(scan)) == 3 + 2 * 7
    assert len(jax.tree.leaves(flat)) == 3 + 3 * 7
    assert scan.num_bytes == flat.num_bytes
    for stacked, layers in zip(scan.groups, flat.groups, strict=True):
        restacked = tuple(jnp.stack(arrays) for arrays in zip(*layers, strict=True))
        jax.tree.map(np.testing.assert_array_equal, stacked, restacked)


def test_every_bit_of_the_seed_counts():
    config = tiny_config(num_hidden_layers=1)
    seeds = [0, 1, 2**32, -1, 0]
    tables = [load(config, None, random=True, seed=seed).outer[0] for seed in seeds]
    assert jnp.array_equal(tables[0], tables[-1])
    for other in tables[1:-1]:
        assert not jnp.array_equal(tables[0], other)


def test_random_layers_differ():
    weights = load(tiny_config(), None, random=True)
    for array in weights.groups[0]:
        assert not jnp.array_equal(array[0], array[1])


def test_greedy_output_of_random_weights_varies():
    config = tiny_config(tie_word_embeddings=True)
    weights = load(config, None, random=True)
    pool = make_pool(config, tensor_mesh(1))
    token, tokens = 5, []
    for position in range(24):
        row = Row([token], range(1, 9), position)
        logits, pool = run_step(weights, pack([row], num_tokens=1, num_rows=1), pool)
        token = int(logits[0].argmax())
        tokens.append(token)
    assert len(set(tokens)) >= 8


def test_no_checkpoint_needs_random():
    with pytest.raises(ValueError, match="checkpoint=None"):
        load(tiny_config(), None)


def test_regroup_parts_by_hand():
    columns = np.arange(8)[None, :]  # A = 0..3, B = 4..7
    found = regroup_parts(columns, 1, 2, 2)
    np.testing.assert_array_equal(found[0], [0, 1, 4, 5, 2, 3, 6, 7])


def test_sizes_that_do_not_divide_are_all_named():
    config = tiny_config(intermediate_size=50)
    check_divisible(config, 2)
    with pytest.raises(ValueError, match=r"tensor_parallel=4 must divide intermediate_size=50"):
        check_divisible(config, 4)
    with pytest.raises(ValueError, match=r"=3 must divide num_kv_heads=4, intermediate_size=50"):
        check_divisible(config, 3)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="tensor_parallel=4096 must be between 1 and"):
        tensor_mesh(4096)
