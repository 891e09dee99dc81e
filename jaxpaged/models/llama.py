"""The Llama family: Llama, Mistral, Qwen2, and what the other families build on.

`CausalLM` is the whole model. `layer_sources` and `outer_sources` say which tensors of a Hugging
Face checkpoint, there `[out, in]`, become which parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jaxpaged.models.attention import Attention
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import MLP, Embedding, Residual, RMSNorm
from jaxpaged.models.precision import hidden_dtype
from jaxpaged.models.rope import rope_tables
from kernels_pallas.metadata import AttentionMetadata
from kernels_pallas.norm_rope import RopeTables
from kernels_pallas.pool import KVPool

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


class DecoderLayer(nnx.Module):
    """Attention, then MLP, each on the normed input and added to it by the norm that follows.

    After the MLP that is the next layer's.
    """

    def __init__(
        self, config: ModelConfig, window: int | None, dtype: DTypeLike, *, rngs: nnx.Rngs
    ):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype, rngs=rngs)
        self.attention = Attention(config, window, dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(size, eps, dtype, rngs=rngs)
        self.mlp = MLP(size, config.intermediate_size, dtype, bias=config.mlp_bias, rngs=rngs)

    def __call__(
        self,
        residual: Residual,
        pool: KVPool,
        layer: Int32[Array, ""] | int,
        rope: RopeTables,
        metadata: AttentionMetadata,
        *,
        impl: str | None = None,
        axis_name: str | None = None,
    ) -> tuple[Residual, KVPool]:
        ways: Any = {"out_dtype": residual.x.dtype, "impl": impl, "axis_name": axis_name}
        x, normed = self.attention_norm.of_sum(residual, impl=impl)
        parts, pool = self.attention(normed, pool, layer, rope, metadata, **ways)
        x, normed = self.mlp_norm.of_sum(Residual(x, parts), impl=impl)
        return Residual(x, self.mlp(normed, **ways)), pool

    def residual_of(
        self,
        x: Float[Array, "num_tokens hidden_size"],
        *,
        impl: str | None = None,
        axis_name: str | None = None,
    ) -> Residual:
        """What the first layer gets of x: parts of zeros, as many as layers hand on."""
        ways: Any = {"out_dtype": x.dtype, "impl": impl, "axis_name": axis_name}
        parts = jax.eval_shape(lambda: self.mlp(self.mlp_norm(x), **ways))
        return Residual(x, jnp.zeros(parts.shape, parts.dtype))


class CausalLM(nnx.Module):
    """Token ids in, logits out.

    Args:
      layers: empty where the caller runs the layers itself, between `start` and `logits`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        dtype: DTypeLike,
        *,
        rngs: nnx.Rngs,
    ):
        self.rope, self.head_dim = config.rope, config.head_dim
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype, rngs=rngs)
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, rngs=rngs)
        self.head = (
            None
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, dtype, rngs=rngs)
        )

    def start(
        self,
        token_ids: Int32[Array, " num_tokens"],
        positions: Int32[Array, " num_tokens"],
        *,
        axis_name: str | None = None,
    ) -> tuple[Float[Array, "num_tokens hidden_size"], RopeTables]:
        """What the first layer gets."""
        x = self.embedding(token_ids, axis_name=axis_name)
        x = x.astype(hidden_dtype(x.shape[0], x.dtype))
        return x, rope_tables(self.rope, self.head_dim, positions)

    def logits(
        self, x: Float[Array, "num_logit_rows hidden_size"], *, axis_name: str | None = None
    ) -> Float32[Array, "num_logit_rows vocab_size"]:
        head = self.embedding if self.head is None else self.head
        return head.logits(self.norm(x), axis_name=axis_name)

    def __call__(
        self,
        token_ids: Int32[Array, " num_tokens"],
        positions: Int32[Array, " num_tokens"],
        pool: KVPool,
        metadata: AttentionMetadata,
        logit_positions: Int32[Array, " num_logit_rows"],
        *,
        impl: str | None = None,
        axis_name: str | None = None,
    ) -> tuple[Float32[Array, "num_logit_rows vocab_size"], KVPool]:
        """Logits of the tokens at the indices `logit_positions`, and the pool with the new KV."""
        ways: Any = {"impl": impl, "axis_name": axis_name}
        x, rope = self.start(token_ids, positions, axis_name=axis_name)
        residual = self.layers[0].residual_of(x, **ways)
        for layer, module in enumerate(self.layers):
            residual, pool = module(residual, pool, layer, rope, metadata, **ways)
        return self.logits(residual.total()[logit_positions], axis_name=axis_name), pool


def identity(tensor: np.ndarray) -> np.ndarray:
    return tensor


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from.

    Attributes:
      names: tensors of the checkpoint; `{layer}` stands for the layer's index.
      shapes: theirs.
      build: makes the parameter of them.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    build: Callable[..., np.ndarray] = identity


def outer_sources(config: ModelConfig) -> dict[str, Source]:
    """Parameters outside the layers, by their path in `CausalLM`."""
    table_shape = (config.vocab_size, config.hidden_size)
    sources = {
        "embedding.table": Source((EMBEDDING_NAME,), (table_shape,)),
        "norm.scale": Source(("model.norm.weight",), ((config.hidden_size,),)),
    }
    if not config.tie_word_embeddings:
        sources["head.table"] = Source((HEAD_NAME,), (table_shape,))
    return sources


def layer_sources(config: ModelConfig) -> dict[str, Source]:
    """Parameters of one layer, by their path in `DecoderLayer`."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size = config.num_q_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    sources = {
        "attention_norm.scale": _vector("input_layernorm.weight", hidden),
        "mlp_norm.scale": _vector("post_attention_layernorm.weight", hidden),
    }

    def add_linear(
        path: str,
        names: Sequence[str],
        out_sizes: Sequence[int],
        in_size: int,
        *,
        join: Callable[..., np.ndarray],
        bias: bool,
    ) -> None:
        weights = tuple(_layer_name(f"{name}.weight") for name in names)
        shapes = tuple((size, in_size) for size in out_sizes)
        sources[f"{path}.kernel"] = Source(weights, shapes, lambda *parts: join(*parts).T)
        if bias:
            biases = tuple(_layer_name(f"{name}.bias") for name in names)
            sources[f"{path}.bias"] = Source(biases, tuple((size,) for size in out_sizes), join)

    def join_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return interleave_qkv(q, k, v, num_kv_heads=config.num_kv_heads)

    qkv_names = [f"self_attn.{name}_proj" for name in "qkv"]
    qkv_sizes = [q_size, kv_size, kv_size]
    add_linear("attention.qkv", qkv_names, qkv_sizes, hidden, join=join_qkv, bias=config.qkv_bias)
    add_linear(
        "attention.o", ["self_attn.o_proj"], [hidden], q_size, join=identity, bias=config.o_bias
    )
    gate_up_names = ["mlp.gate_proj", "mlp.up_proj"]
    add_linear(
        "mlp.gate_up", gate_up_names, [mlp, mlp], hidden, join=concatenate, bias=config.mlp_bias
    )
    add_linear("mlp.down", ["mlp.down_proj"], [hidden], mlp, join=identity, bias=config.mlp_bias)
    return sources


def interleave_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, num_kv_heads: int) -> np.ndarray:
    """Joins rows KV head by KV head: its query heads, its key, its value."""
    parts = [x.reshape(num_kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])


def concatenate(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def _vector(name: str, size: int) -> Source:
    return Source((_layer_name(name),), ((size,),))


def _layer_name(name: str) -> str:
    return f"model.layers.{{layer}}.{name}"
