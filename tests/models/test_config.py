import dataclasses
import subprocess
import sys

import pytest
from helpers.tiny_models import hf_config, tiny_config

from jaxpaged.errors import CheckpointError, UnsupportedOptionError
from jaxpaged.models.config import ModelConfig, RopeConfig

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_reads_every_size():
    config = tiny_config(rms_norm_eps=1e-5, torch_dtype="bfloat16", bos_token_id=1)
    assert config == ModelConfig(
        model_type="llama",
        num_layers=3,
        hidden_size=32,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=48,
        vocab_size=96,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_model_len=256,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=(None, None, None),
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype="bfloat16",
    )
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        ({"head_dim": 80}, 80),
        ({"head_dim": None}, 4),
        ({"head_dim": None, "model_type": "qwen3"}, 128),
        ({"head_dim": 6, "model_type": "qwen3"}, 6),
    ],
)
def test_head_dim_comes_from_the_config_first(changes, head_dim):
    assert tiny_config(**changes).head_dim == head_dim


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "llama"}, (False, False, False, False)),
        ({"model_type": "llama", "attention_bias": True}, (True, True, False, False)),
        ({"model_type": "llama", "mlp_bias": True}, (False, False, True, False)),
        ({"model_type": "mistral"}, (False, False, False, False)),
        ({"model_type": "qwen2"}, (True, False, False, False)),
        ({"model_type": "qwen3"}, (False, False, False, True)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_qk_norm(changes, expected):
    config = tiny_config(**changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_rope_settings_under_old_and_new_keys(key, type_key):
    config = tiny_config(rope_theta=500000.0, **{key: {type_key: "llama3"} | LLAMA3})
    assert config.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_the_older_key_of_rope_settings_wins():
    both = hf_config(
        rope_scaling={"rope_type": "llama3"} | LLAMA3,
        rope_parameters={"rope_type": "default", "rope_theta": 5.0},
    )
    assert ModelConfig.from_hf(both).rope.type == "llama3"
    with pytest.raises(CheckpointError, match="rope settings 'yarn' are not an object"):
        ModelConfig.from_hf(hf_config(rope_scaling="yarn"))


def test_theta_inside_rope_parameters():
    config = tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert config.rope == RopeConfig(7.0)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (5, (5,)), ([5, 7], (5, 7)), (0, (0,))]
)
def test_eos_ids(value, expected):
    assert tiny_config(eos_token_id=value).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": 256}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None, None)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (None, None, 8),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_sliding_windows(changes, windows):
    assert tiny_config(**changes).layer_windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"'gpt2'.*llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"sliding_window": 8}, "llama with sliding_window=8"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'.*default, llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'.*default, llama3"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'.*default, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*default, llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedOptionError, match=message):
        tiny_config(**changes)


def test_all_reasons_are_listed():
    with pytest.raises(UnsupportedOptionError, match=r"clip_qkv=8.*hidden_act='relu'"):
        tiny_config(hidden_act="relu", clip_qkv=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_key_value_heads": 3}, r"num_q_heads=8.*num_kv_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"rope_scaling": {"type": "llama3"}}, "'factor'"),
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"factor": "x"}},
            "factor='x' must be a positive",
        ),
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"factor": 0}},
            "factor=0 must be a positive",
        ),
        ({"rope_theta": "x"}, "rope_theta='x' must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be a positive number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a positive number"),
        ({"rms_norm_eps": [1e-6]}, r"rms_norm_eps=\[1e-06\] must be a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ],
)
def test_nonsense_gets_one_clear_line(changes, message):
    with pytest.raises(CheckpointError, match=message):
        tiny_config(**changes)


def test_reads_without_changing_the_dict():
    config = hf_config(rope_scaling={"type": "llama3"} | LLAMA3)
    before = repr(config)
    ModelConfig.from_hf(config)
    assert repr(config) == before


def test_config_never_loads_jax():
    code = "import sys, jaxpaged.models.config as c; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
