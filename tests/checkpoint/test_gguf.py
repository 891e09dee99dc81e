"""GGUF files: names, order of rows, dequantising, config, and broken files."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.tiny_gguf import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, model_tensors, write_gguf

from jaxpaged.checkpoint import locate
from jaxpaged.checkpoint.gguf import GgufCheckpoint
from jaxpaged.checkpoint.gguf_config import to_hf_config
from jaxpaged.errors import CheckpointError, UnsupportedOptionError
from jaxpaged.models.config import ModelConfig


def converted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What Llama's converter does to Q and K: rows i and i + half of a head become neighbours."""
    result = np.empty_like(weight)
    head_dim = weight.shape[0] // num_heads
    for row in range(weight.shape[0]):
        head, i = divmod(row, head_dim)
        half = head_dim // 2
        place = 2 * i if i < half else 2 * (i - half) + 1
        result[head * head_dim + place] = weight[row]
    return result


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return model_tensors(vocab_size=16)


def test_llama_tensors_come_back_in_hugging_face_form(tmp_path: Path, tensors):
    bias = np.arange(NUM_HEADS * HEAD_DIM, dtype=np.float32)
    stored = tensors | {
        "blk.0.attn_q.weight": converted(tensors["blk.0.attn_q.weight"], NUM_HEADS),
        "blk.0.attn_k.weight": converted(tensors["blk.0.attn_k.weight"], NUM_KV_HEADS),
        "blk.0.attn_q.bias": converted(bias, NUM_HEADS),
    }
    checkpoint = locate(str(write_gguf(tmp_path / "m.gguf", tensors=stored)))
    layer = "model.layers.0."
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        layer + "input_layernorm.weight": "blk.0.attn_norm.weight",
        layer + "self_attn.q_proj.weight": "blk.0.attn_q.weight",
        layer + "self_attn.k_proj.weight": "blk.0.attn_k.weight",
        layer + "self_attn.v_proj.weight": "blk.0.attn_v.weight",
        layer + "self_attn.o_proj.weight": "blk.0.attn_output.weight",
        layer + "post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        layer + "mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        layer + "mlp.up_proj.weight": "blk.0.ffn_up.weight",
        layer + "mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    assert checkpoint.shapes().keys() == names.keys() | {layer + "self_attn.q_proj.bias"}
    for name, source in names.items():
        assert checkpoint.shapes()[name] == tensors[source].shape
        np.testing.assert_array_equal(checkpoint.tensor(name), tensors[source], err_msg=name)
    np.testing.assert_array_equal(checkpoint.tensor(layer + "self_attn.q_proj.bias"), bias)
    assert checkpoint.config["attention_bias"] is True


def test_qwen3_rows_are_stored_in_order(tmp_path: Path, tensors):
    stored = tensors | {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    checkpoint = locate(str(write_gguf(tmp_path / "m.gguf", architecture="qwen3", tensors=stored)))
    assert checkpoint.config["model_type"] == "qwen3"
    query = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(query, tensors["blk.0.attn_q.weight"])
    assert checkpoint.shapes()["model.layers.0.self_attn.q_norm.weight"] == (HEAD_DIM,)


def test_quantised_tensors_come_as_float32(tmp_path: Path, tensors):
    kind = gguf.GGMLQuantizationType.Q8_0
    checkpoint = locate(str(write_gguf(tmp_path / "m.gguf", tensors=tensors, quantised=kind)))
    values = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert values.dtype == np.float32
    assert checkpoint.shapes()["model.layers.0.mlp.up_proj.weight"] == values.shape
    np.testing.assert_allclose(values, tensors["blk.0.ffn_up.weight"], atol=0.03)
    assert np.abs(values - tensors["blk.0.ffn_up.weight"]).max() > 1e-4  # it was quantised


def test_config_has_the_keys_of_hugging_face(tmp_path: Path):
    config = locate(str(write_gguf(tmp_path / "m.gguf"))).config
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,  # not 9.999999747378752e-06
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "vocab_size": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    assert config | expected == config


def test_a_separate_head_is_seen(tmp_path: Path, tensors):
    head = np.ones((16, 64), np.float32)
    file = write_gguf(tmp_path / "m.gguf", tensors=tensors | {"output.weight": head})
    checkpoint = locate(str(file))
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight"), head)


def test_unknown_tensors_keep_their_names(tmp_path: Path, tensors):
    odd = {"blk.0.strange.weight": np.ones(3, np.float32)}
    checkpoint = locate(str(write_gguf(tmp_path / "m.gguf", tensors=tensors | odd)))
    assert "blk.0.strange.weight" in checkpoint.shapes()


def llama3_factors(factor: float, head_dim: int = 16, theta: float = 10000.0) -> np.ndarray:
    """As Llama 3's converter writes them, one frequency at a time."""
    result = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


def test_llama3_rope_factors_become_options(tmp_path: Path, tensors):
    stored = tensors | {"rope_freqs.weight": llama3_factors(32.0)}
    checkpoint = locate(str(write_gguf(tmp_path / "m.gguf", tensors=stored)))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.shapes())


def test_other_rope_factors_are_refused(tmp_path: Path, tensors):
    stored = tensors | {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(UnsupportedOptionError, match="RoPE"):
        locate(str(write_gguf(tmp_path / "m.gguf", tensors=stored)))


def with_metadata(file: Path, **metadata: object) -> GgufCheckpoint:
    """The checkpoint of `file`, its config read again with other metadata of its architecture."""
    checkpoint = GgufCheckpoint(file, "m")
    changes = {f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()}
    shapes = {name: (16, 64) for name in checkpoint._stored}
    checkpoint.config = to_hf_config(checkpoint.metadata | changes, shapes, None)
    return checkpoint


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ({"rope__dimension_count": 8}, "partial_rotary_factor=0.5"),
        ({"expert_count": 8}, "num_local_experts=8"),
        ({"attention__scale": 0.015625}, "attention_multiplier=0.015625"),
        ({"attention__clamp_kqv": 8.0}, "clip_qkv=8.0"),
        ({"embedding_scale": 12.0}, "embedding_multiplier=12.0"),
        ({"residual_scale": 0.22}, "residual_multiplier=0.22"),
        ({"logit_scale": 0.1}, "logit_scale=0.1"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(tmp_path: Path, metadata, line: str):
    file = write_gguf(tmp_path / "m.gguf")
    ModelConfig.from_hf(with_metadata(file, rope__dimension_count=16, expert_count=0).config)
    with pytest.raises(UnsupportedOptionError, match=f"llama with {line} is not supported"):
        ModelConfig.from_hf(with_metadata(file, **metadata).config)


SIZES = [
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "context_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
]
NUMBERS = ["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"]


@pytest.mark.parametrize(
    "value", [0, -4, "four", [4, 4], True, float("nan"), float("inf")], ids=str
)
@pytest.mark.parametrize("key", SIZES + NUMBERS)
def test_a_size_that_is_none_is_named(tmp_path: Path, key: str, value):
    metadata = {"rope__scaling__type": "linear", key.replace(".", "__"): value}
    kind = "integer" if key in SIZES else "number"
    line = rf"llama\.{re.escape(key)}=.* must be a positive {kind}"
    with pytest.raises(CheckpointError, match=line):
        with_metadata(write_gguf(tmp_path / "m.gguf"), **metadata)


@pytest.mark.parametrize("value", ["four", [4, 4], 1.5, {}], ids=str)
@pytest.mark.parametrize(
    "name", ["general.file_type", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id"]
)
def test_a_number_that_is_none_is_named(tmp_path: Path, name: str, value):
    metadata = GgufCheckpoint(write_gguf(tmp_path / "m.gguf"), "m").metadata
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}=.* must be an integer"):
        to_hf_config(metadata | {name: value}, {"token_embd.weight": (16, 64)}, None)


def test_metadata_that_is_no_text_is_one_clear_line(tmp_path: Path):
    file = write_gguf(tmp_path / "m.gguf", chat_template="a template")
    file.write_bytes(file.read_bytes().replace(b"a template", b"a \xffemplate"))
    with pytest.raises(
        CheckpointError, match=r"m\.gguf is not a whole GGUF file: 'utf-8'"
    ) as error:
        locate(str(file))
    assert "\n" not in str(error.value)


def test_other_architectures_are_refused(tmp_path: Path):
    with pytest.raises(UnsupportedOptionError, match=r"'mamba' is not supported, only .*llama"):
        locate(str(write_gguf(tmp_path / "m.gguf", architecture="mamba")))


@pytest.mark.parametrize("share", [0.0002, 0.002, 0.01, 0.03, 0.2, 0.5, 0.999])
def test_a_truncated_file_is_one_clear_line(tmp_path: Path, share: float):
    file = write_gguf(tmp_path / "m.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: max(5, int(len(content) * share))])
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a whole GGUF file") as error:
        locate(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 something else"])
def test_another_file_is_not_gguf(tmp_path: Path, content: bytes):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        locate(str(file))
