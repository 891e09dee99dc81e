"""A GGUF file: quantised tensors, and in its metadata the config and the tokenizer."""

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxpaged.checkpoint.gguf_config import to_hf_config
from jaxpaged.errors import CheckpointError, ModelNotFoundError, UnsupportedOptionError

_ROPE_FACTORS = "rope_freqs.weight"  # part of the config there, not a weight
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GgufCheckpoint:
    """A `Checkpoint` in one GGUF file. Tensors are dequantised to float32.

    Attributes:
      metadata: the file's key-value pairs, the tokenizer among them.
    """

    def __init__(self, file: Path, name: str):
        """Reads the metadata and maps the file; weights are read by `tensor`.

        Raises:
          CheckpointError: not a whole GGUF file, or one that lacks metadata.
          UnsupportedOptionError: an architecture that is not supported.
        """
        reader, self.metadata = _open(file)
        self.name = name
        self.path = file
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        if "token_embd.weight" not in self._stored:
            raise CheckpointError(f"{file} has no tensor 'token_embd.weight'")
        factors = self._dequantise(_ROPE_FACTORS) if _ROPE_FACTORS in self._stored else None
        shapes = {tensor: self._stored_shape(tensor) for tensor in self._stored}
        self.config = to_hf_config(self.metadata, shapes, factors)
        self.generation_config: dict[str, Any] = {}

    @cached_property
    def _stored_names(self) -> dict[str, str]:
        """GGUF name by Hugging Face name. A tensor unknown here keeps its name, to be reported."""
        return {self._hf_name(stored): stored for stored in self._stored if stored != _ROPE_FACTORS}

    def _hf_name(self, stored: str) -> str:
        is_gemma3 = self.metadata["general.architecture"] == "gemma3"
        layer_names = _GEMMA3_LAYER_NAMES if is_gemma3 else _LAYER_NAMES
        match stored.split("."):
            case [part, kind] if part in _TOP_NAMES:
                return f"{_TOP_NAMES[part]}.{kind}"
            case ["blk", layer, part, kind] if part in layer_names:
                return f"model.layers.{layer}.{layer_names[part]}.{kind}"
            case _:
                return stored

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._stored_shape(stored) for name, stored in self._stored_names.items()}

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._stored_names:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        values = self._dequantise(self._stored_names[name])
        architecture = self.metadata["general.architecture"]
        if architecture == "llama" and ".self_attn.q_proj." in name:
            return _unpermute(values, self.config["num_attention_heads"])
        if architecture == "llama" and ".self_attn.k_proj." in name:
            return _unpermute(values, self.config["num_key_value_heads"])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            return values - 1  # a GGUF file holds Gemma's norms as the factor 1 + weight
        return values

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._stored[stored].shape))

    def _dequantise(self, stored: str) -> np.ndarray:
        tensor = self._stored[stored]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UnsupportedOptionError(
                "model", f"{self.path}: tensor {stored!r} has the type {kind}, which is unsupported"
            ) from error
        # why: float32 tensors come as views of the read-only file
        return np.array(values, np.float32) if values.base is not None else values


class _ArrayReader(gguf.GGUFReader):
    """Slices a plain ndarray instead of np.memmap, whose every slice costs three times as much."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = mapped.view(np.ndarray)


def _open(file: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    if not file.is_file():
        raise ModelNotFoundError(f"there is no file {file}")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file} is not a GGUF file: it does not begin with 'GGUF'")
    try:
        reader = _ArrayReader(file)
        return reader, {field.name: field.contents() for field in reader.fields.values()}
    # why: what the reader meets first when bytes are missing depends on where the file ends
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{file} is not a whole GGUF file: {error}") from error


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows back to the order of Hugging Face: RoPE turns row i of a head with row i + head_dim / 2.

    Llama's converter interleaved the two halves of each head, as [0, half, 1, half + 1, ...].
    """
    heads = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return heads.swapaxes(1, 2).reshape(values.shape)
