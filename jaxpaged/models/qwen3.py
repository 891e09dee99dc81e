"""Qwen3: the Llama family with an RMSNorm over each query and key head, before RoPE."""

from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Source, outer_sources

__all__ = ["layer_sources", "outer_sources"]


def layer_sources(config: ModelConfig) -> dict[str, Source]:
    """Parameters of one layer, by their path in `DecoderLayer`."""
    sources = llama.layer_sources(config)
    for kind in "qk":
        sources[f"attention.{kind}_norm.scale"] = Source(
            (f"model.layers.{{layer}}.self_attn.{kind}_norm.weight",), ((config.head_dim,),)
        )
    return sources
