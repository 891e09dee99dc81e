"""Models as Flax NNX modules: the Llama family, and a file for each that differs (`family_of`)."""

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from jaxpaged.models.config import ModelConfig

if TYPE_CHECKING:
    from jaxpaged.models.llama import Source

_MODULE_OF_MODEL_TYPE = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "qwen3"}


class Family(Protocol):
    """What a family's file offers: which tensors become which parameter, by path."""

    def outer_sources(self, config: ModelConfig) -> "dict[str, Source]": ...

    def layer_sources(self, config: ModelConfig) -> "dict[str, Source]": ...


def family_of(config: ModelConfig) -> Family:
    # why imported here: this package also holds config.py, which must not load JAX
    module = importlib.import_module(f"jaxpaged.models.{_MODULE_OF_MODEL_TYPE[config.model_type]}")
    return cast(Family, module)


def expected_names(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config has, and its shape."""
    family = family_of(config)
    found: dict[str, tuple[int, ...]] = {}
    for source in family.outer_sources(config).values():
        found.update(zip(source.names, source.shapes, strict=True))
    sources = family.layer_sources(config).values()
    for layer in range(config.num_layers):
        for source in sources:
            names = (name.format(layer=layer) for name in source.names)
            found.update(zip(names, source.shapes, strict=True))
    return found
