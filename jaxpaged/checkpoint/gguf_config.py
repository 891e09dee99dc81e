"""A GGUF file's metadata, said with the keys of a Hugging Face config.json."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError, UnsupportedOptionError

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# What other models of these architectures scale or clip, by the name in a config.json. It is
# passed on so that a model which needs it is refused by name.
_MATHS_OPTIONS = {
    "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "expert_count": "num_local_experts",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "residual_scale": "residual_multiplier",
}
# general.file_type: 0 is all float32, 1 mostly float16; the rest is quantised or bfloat16.
_DTYPES: dict[int | None, str] = {0: "float32", 1: "float16"}


def to_hf_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
) -> dict[str, Any]:
    """The config.json that the model had before it became a GGUF file.

    Args:
      metadata: of the file.
      shapes: of its tensors, by GGUF name.
      rope_factors: the tensor rope_freqs.weight, f32[head_dim / 2], if there is one.

    Raises:
      CheckpointError: the metadata lacks a key, or a value is none that it can be.
      UnsupportedOptionError: another architecture or kind of RoPE.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        raise UnsupportedOptionError(
            "model",
            f"GGUF architecture {architecture!r} is not supported, only {sorted(MODEL_TYPES)}",
        )

    def size(key: str, default: int | None = None) -> int:
        return _positive(metadata, f"{architecture}.{key}", int, default)

    def number(key: str, default: float | None = None) -> float:
        return _decimal(_positive(metadata, f"{architecture}.{key}", float, default))

    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "partial_rotary_factor": size("rope.dimension_count", head_dim) / head_dim,
        "hidden_act": "gelu_pytorch_tanh" if architecture == "gemma3" else "silu",
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, architecture, rope_factors),
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": size("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
        "torch_dtype": _DTYPES.get(_integer(metadata, "general.file_type", 0), "bfloat16"),
    }
    for key, name in _MATHS_OPTIONS.items():
        if f"{architecture}.{key}" in metadata:
            config[name] = metadata[f"{architecture}.{key}"]
    if architecture == "gemma3":
        config["sliding_window"] = size("attention.sliding_window")
        config["query_pre_attn_scalar"] = config["head_dim"]
    return config


def _positive(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A value above 0 of this type; where it is a float, an integer will do."""
    value = metadata.get(name, default)
    if value is None:
        raise CheckpointError(f"the GGUF file lacks the metadata {name}")
    kinds = (int, float) if kind is float else (int,)
    if type(value) not in kinds or not 0 < value < math.inf:
        wanted = "a positive number" if kind is float else "a positive integer"
        raise CheckpointError(f"{name}={value!r:.80} must be {wanted}")
    return value


def _decimal(value: float) -> float:
    """The shortest decimal that is stored as this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _integer(metadata: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    value = metadata.get(name, default)
    if value is not None and type(value) is not int:
        raise CheckpointError(f"{name}={value!r:.80} must be an integer")
    return value


def _eos_token_ids(metadata: Mapping[str, Any]) -> int | list[int] | None:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [_integer(metadata, f"tokenizer.ggml.{key}") for key in keys]
    ids = list(dict.fromkeys(i for i in ids if i is not None))
    return ids if len(ids) > 1 else ids[0] if ids else None


def _rope_scaling(
    metadata: Mapping[str, Any], architecture: str, rope_factors: np.ndarray | None
) -> dict[str, Any] | None:
    if rope_factors is not None:
        theta = _positive(metadata, f"{architecture}.rope.freq_base", float, 10000.0)
        return _llama3_scaling(np.asarray(rope_factors, np.float64), theta)
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if kind == "none":
        return None
    factor = _decimal(_positive(metadata, prefix + "factor", float, 1.0))
    scaling = {"rope_type": kind, "factor": factor}
    original = metadata.get(prefix + "original_context_length")
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """The options behind `factors`, by which each frequency was divided.

    A GGUF file keeps the factors only. Every Llama 3 model computed them with the same low and
    high bounds and original context, which is checked here by computing them again.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": _decimal(float(factors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    inverse = theta ** -(np.arange(len(factors)) / len(factors))
    turns = 8192 * inverse / (2 * math.pi)  # within the original context
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    computed = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(computed, factors, rtol=1e-3):
        raise UnsupportedOptionError(
            "model", "the GGUF file scales RoPE frequencies in another way than Llama 3"
        )
    return scaling
