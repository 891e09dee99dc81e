"""A dense decoder in plain NumPy, float64, written from the papers: the models' oracle.

It reads Hugging Face names and a config.json, and shares no code with `jaxpaged.models`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def numpy_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    token_ids: Sequence[int],
    windows: Sequence[int | None] | None = None,
) -> np.ndarray:
    """Logits of every position; `windows` has one entry a layer. RoPE type "default" only."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    num_layers = config["num_hidden_layers"]
    layer_windows = [None] * num_layers if windows is None else windows
    x = w["model.embed_tokens.weight"][list(token_ids)]
    for layer in range(num_layers):
        p = f"model.layers.{layer}."
        normed = _norm(x, w[p + "input_layernorm.weight"])
        x = x + _attention(config, w, p + "self_attn.", normed, layer_windows[layer])
        normed = _norm(x, w[p + "post_attention_layernorm.weight"])
        gate = _linear(w, p + "mlp.gate_proj", normed)
        hidden = gate / (1 + np.exp(-gate)) * _linear(w, p + "mlp.up_proj", normed)
        x = x + _linear(w, p + "mlp.down_proj", hidden)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _norm(x, w["model.norm.weight"]) @ head.T


def _norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _linear(w: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _attention(
    config: Mapping[str, Any],
    w: Mapping[str, np.ndarray],
    prefix: str,
    x: np.ndarray,
    window: int | None,
) -> np.ndarray:
    num_heads, size = config["num_attention_heads"], config["head_dim"]
    group = num_heads // config["num_key_value_heads"]
    q, k, v = (_linear(w, f"{prefix}{kind}_proj", x) for kind in "qkv")
    out = np.zeros((len(x), num_heads * size))
    for head in range(num_heads):
        mine = slice(head * size, (head + 1) * size)
        shared = slice(head // group * size, (head // group + 1) * size)
        q_head, k_head, v_head = q[:, mine], k[:, shared], v[:, shared]
        if f"{prefix}q_norm.weight" in w:
            q_head = _norm(q_head, w[f"{prefix}q_norm.weight"])
            k_head = _norm(k_head, w[f"{prefix}k_norm.weight"])
        q_head, k_head = _turn(q_head), _turn(k_head)
        for position in range(len(x)):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            scores = k_head[seen] @ q_head[position] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[position, mine] = weights @ v_head[seen] / weights.sum()
    return _linear(w, f"{prefix}o_proj", out)


def _turn(x: np.ndarray) -> np.ndarray:
    """Rotates by complex multiplication, base 10000."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)
