"""A model's architecture, read from a Hugging Face config. Standard library only.

Two rules: a field that would change the maths and is not supported is refused by name, and nothing
is derived where the config says it (`head_dim` is not always hidden_size / num_attention_heads).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxpaged.errors import CheckpointError, UnsupportedOptionError

RopeType = Literal["default", "llama3"]
Config = Mapping[str, Any]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")

# Fields of related architectures, with the values under which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "hidden_act": (None, "silu", "swish"),
    "is_encoder_decoder": (None, False),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; the fields from `factor` on count only for type "llama3"."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the maths of one model depends on; hashable.

    Attributes:
      model_type: one of MODEL_TYPES; picks the names of the tensors.
      layer_windows: per layer, how many of the newest positions it attends to; None is all.
      dtype: of the checkpoint.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str

    @classmethod
    def from_hf(cls, config: Config) -> "ModelConfig":
        """Reads the content of a config.json; defaults are those of Hugging Face.

        Raises:
          UnsupportedOptionError: another model type, or fields that this build cannot honour.
          CheckpointError: a field is missing or makes no sense.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise UnsupportedOptionError(
                "model_type", f"{model_type=} is not supported; known: {', '.join(MODEL_TYPES)}"
            )
        _refuse_unsupported(config)
        num_layers = _positive_int(config, "num_hidden_layers")
        hidden_size = _positive_int(config, "hidden_size")
        num_q_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = _positive_int(config, "num_key_value_heads", num_q_heads)
        if num_q_heads % num_kv_heads:
            raise CheckpointError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
        max_model_len = _positive_int(config, "max_position_embeddings")
        attention_bias = bool(config.get("attention_bias"))
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, hidden_size, num_q_heads),
            intermediate_size=_positive_int(config, "intermediate_size"),
            vocab_size=_positive_int(config, "vocab_size"),
            rms_norm_eps=_positive_float(config, "rms_norm_eps", 1e-6),
            rope=_rope(config),
            max_model_len=max_model_len,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=model_type == "qwen3",
            layer_windows=_layer_windows(config, num_layers, max_model_len),
            eos_token_ids=_token_ids(config, "eos_token_id"),
            bos_token_id=next(iter(_token_ids(config, "bos_token_id")), None),
            dtype=_dtype(config),
        )


def _refuse_unsupported(config: Config) -> None:
    model_type = config["model_type"]
    neutral = dict(_NEUTRAL_VALUES)
    if model_type in ("mistral", "qwen2"):
        neutral["attention_bias"] = (None, False)
    if model_type != "llama":
        neutral["mlp_bias"] = (None, False)
    else:
        neutral["sliding_window"] = (None,)
    bad = {name: config[name] for name in neutral if config.get(name) not in neutral[name]}
    if bad:
        shown = ", ".join(f"{name}={value!r}" for name, value in bad.items())
        raise UnsupportedOptionError(next(iter(bad)), f"{model_type} with {shown} is not supported")


def _positive_int(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config: {name}={value!r} must be a positive integer")
    return value


def _positive_float(config: Config, name: str, default: float | None = None) -> float:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config: {name}={value!r} must be a positive number")
    return float(value)


def _head_dim(config: Config, hidden_size: int, num_q_heads: int) -> int:
    if config.get("head_dim") is None and config["model_type"] == "qwen3":
        return 128
    head_dim = _positive_int(config, "head_dim", hidden_size // num_q_heads)
    if head_dim % 2:
        raise CheckpointError(f"config: {head_dim=} must be even")
    return head_dim


def _rope(config: Config) -> RopeConfig:
    """Settings stand under `rope_scaling` or `rope_parameters` (newer), the type under two keys.

    The older key wins where both stand, as in Hugging Face's own reading.
    """
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"config: rope settings {settings!r} are not an object")
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise UnsupportedOptionError(
            "rope_scaling", f"rope type {rope_type!r} is not supported; known: default, llama3"
        )
    nested = sorted(key for key, value in settings.items() if isinstance(value, Mapping))
    if nested:
        raise UnsupportedOptionError(
            "rope_parameters", f"rope settings per kind of layer ({', '.join(nested)})"
        )
    if settings.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedOptionError(
            "partial_rotary_factor",
            f"partial_rotary_factor={settings['partial_rotary_factor']} is not supported",
        )
    theta = settings.get("rope_theta", config.get("rope_theta"))
    theta = _positive_float({"rope_theta": theta}, "rope_theta", 10000.0)
    if rope_type == "default":
        return RopeConfig(theta)
    wanted = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for name in wanted:
        if name not in settings:
            raise CheckpointError(f"config: llama3 rope settings lack {name!r}")
    factor, low, high, original = (_positive_float(settings, name) for name in wanted)
    return RopeConfig(theta, "llama3", factor, low, high, original_max_len=int(original))


def _layer_windows(config: Config, num_layers: int, max_model_len: int) -> tuple[int | None, ...]:
    window = _window(config)
    if window is None or window >= max_model_len:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        is_mistral = config["model_type"] == "mistral"
        first = 0 if is_mistral else config.get("max_window_layers", 28)
        kinds = ["full_attention"] * first + ["sliding_attention"] * num_layers
        kinds = kinds[:num_layers]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedOptionError("layer_types", f"layer types {unknown} are not supported")
    if len(kinds) != num_layers:
        raise CheckpointError(f"config: layer_types has {len(kinds)} entries, {num_layers=}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: Config) -> int | None:
    """The window of the layers that have one; a config can carry a window that is switched off."""
    if config["model_type"] == "llama":
        return None
    if config["model_type"] != "mistral" and not config.get("use_sliding_window", False):
        return None
    window = config.get("sliding_window", 4096)
    return None if window is None else _positive_int({"sliding_window": window}, "sliding_window")


def _token_ids(config: Config, name: str) -> tuple[int, ...]:
    value = config.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if any(not isinstance(token_id, int) or isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"config: {name}={value!r} must be a token id or a list of them")
    return tuple(ids)


def _dtype(config: Config) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UnsupportedOptionError("dtype", f"{dtype=} is not supported; known: {DTYPES}")
    return dtype
