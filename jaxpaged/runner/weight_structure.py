"""How a model's parameters lie in the arrays that a step takes, and back to NNX modules."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import CausalLM, DecoderLayer
from jaxpaged.runner.sharding import partition_spec

Layout = Literal["scan", "flat"]


def layout_of(platform: str) -> Layout:
    """The form that the platform reads without copies and compiles quickest."""
    return "scan" if platform == "cpu" else "flat"


@dataclass(frozen=True)
class Parameter:
    """One array of a module.

    Attributes:
      path: dotted path in the module.
      shape: whole, all devices together.
      shard_axis, num_parts, init_mean, init_scale: see `models.layers`.
      spec: where it is cut.
    """

    path: str
    shape: tuple[int, ...]
    shard_axis: int | None
    num_parts: int
    init_mean: float
    init_scale: float
    spec: PartitionSpec


class ModuleStructure[ModuleT: nnx.Module]:
    """A module without its arrays: what it takes to rebuild it from a tuple of them."""

    def __init__(self, make: Callable[[nnx.Rngs], ModuleT], num_devices: int):
        abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        self._graphdef, state = nnx.split(abstract)
        _, self._treedef = jax.tree.flatten(state)
        self.parameters = tuple(
            _parameter(path, variable, num_devices) for path, variable in nnx.to_flat_state(state)
        )

    def rebuild(self, arrays: Sequence[jax.Array]) -> ModuleT:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, arrays))


def _parameter(path: tuple[Any, ...], variable: Any, num_devices: int) -> Parameter:
    metadata = variable.get_metadata()
    shape, shard_axis = variable.shape, metadata["shard_axis"]
    return Parameter(
        path=".".join(str(part) for part in path),
        shape=shape,
        shard_axis=shard_axis,
        num_parts=metadata["num_parts"],
        init_mean=metadata["init_mean"],
        init_scale=metadata["init_scale"],
        spec=partition_spec(shape, shard_axis, num_devices),
    )


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers of one structure: `start` up to, not including, `stop`."""

    start: int
    stop: int
    structure: ModuleStructure[DecoderLayer]

    @property
    def num_layers(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class WeightStructure:
    """The static half of `Weights`; equal where config, dtype, layout and mesh are.

    Attributes:
      outer: `CausalLM` without layers: embedding, final norm, head.
    """

    config: ModelConfig
    dtype: str
    layout: Layout
    mesh: Mesh
    outer: ModuleStructure[CausalLM] = field(init=False, compare=False, repr=False)
    groups: tuple[LayerGroup, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        config, dtype = self.config, self.dtype

        def make_outer(rngs: nnx.Rngs) -> CausalLM:
            return CausalLM(config, (), dtype, rngs=rngs)

        object.__setattr__(self, "outer", ModuleStructure(make_outer, self.mesh.size))
        object.__setattr__(self, "groups", self._make_groups())

    def _make_groups(self) -> tuple[LayerGroup, ...]:
        groups = []
        windows = enumerate(self.config.layer_windows)
        for window, run in itertools.groupby(windows, key=lambda item: item[1]):
            layers = [layer for layer, _ in run]
            make = self._layer_maker(window)
            structure = ModuleStructure(make, self.mesh.size)
            groups.append(LayerGroup(layers[0], layers[-1] + 1, structure))
        return tuple(groups)

    def _layer_maker(self, window: int | None) -> Callable[[nnx.Rngs], DecoderLayer]:
        return lambda rngs: DecoderLayer(self.config, window, self.dtype, rngs=rngs)
