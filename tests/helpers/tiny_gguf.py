"""Writes small GGUF files: a model of one layer, with a vocabulary of either kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


def byte_chars() -> list[str]:
    """The 256 characters of GPT-2's vocabulary, by byte (as in the paper's own code)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(extra)) for byte in range(256)]


# Ids: 0..255 bytes, then merged pieces, then added tokens.
MERGES = ["t h", "th e", "Ġ the", "1 2", "Ġ Ġ", "i n", "Ġ in"]
BYTE_LEVEL_TOKENS = [*byte_chars(), *(merge.replace(" ", "") for merge in MERGES)]
THINK, END, START = (len(BYTE_LEVEL_TOKENS) + i for i in range(3))
BYTE_LEVEL_TOKENS += ["<think>", "<|end|>", "<|start|>"]
BYTE_LEVEL_TYPES = [NORMAL] * THINK + [USER_DEFINED, CONTROL, CONTROL]

# Ids: 0..3 as below, 4..259 bytes, then pieces with their scores.
_PIECES = {"▁": -9.0, "h": -10.0, "e": -11.0, "l": -12.0, "o": -13.0}
_PIECES |= {"he": -1.0, "ll": -2.0, "llo": -3.0, "hello": -4.0, "▁hello": -5.0, "lo": -6.0}
SPM_TOKENS = ["<unk>", "<s>", "</s>", "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
SPM_SCORES = [0.0] * 3 + [-1000.0] + [0.0] * 256 + list(_PIECES.values())
SPM_TYPES = [2, CONTROL, CONTROL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * len(_PIECES)


def byte_level_vocabulary(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": BYTE_LEVEL_TOKENS,
        "token_type": BYTE_LEVEL_TYPES,
        "merges": MERGES,
        "bos_token_id": START,
        "eos_token_id": END,
        **more,
    }


def spm_vocabulary(**more: Any) -> dict[str, Any]:
    return {
        "model": "llama",
        "tokens": SPM_TOKENS,
        "scores": SPM_SCORES,
        "token_type": SPM_TYPES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }


def model_tensors(vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a Llama of one layer, tied head, by GGUF name, in Hugging Face's order."""
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    file: Path,
    *,
    architecture: str = "llama",
    vocabulary: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
    chat_template: str | None = None,
) -> Path:
    """Writes `tensors` as they are, or all matrices in the type `quantised`."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (vocabulary or {}).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, values in (tensors or model_tensors(16)).items():
        if quantised is not None and values.ndim == 2:
            packed = gguf.quantize(values, quantised)
            writer.add_tensor(name, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
