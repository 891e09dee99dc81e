"""Weights as a step takes them: few arrays on the device, and the structure to read them.

`load_weights` fills them from a checkpoint, one parameter at a time (never two copies of the model
on the host), or with seeded random values.

Layouts (`WeightStructure.layout`); a group is a run of layers with the same structure:

    scan    each parameter of a group stacked, [num_layers, ...]; `forward` scans over it    (CPU)
    flat    a tuple of parameters for each layer; `forward` is unrolled                 (GPU, TPU)

Static slices of stacked parameters would be fewer arguments, but on a GPU XLA then tunes the
products of every layer anew: minutes a program.
"""

import logging
import math
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxpaged.checkpoint.report import match_names
from jaxpaged.models import expected_names, family_of
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import EMBEDDING_NAME, HEAD_NAME, Source
from jaxpaged.runner.sharding import check_divisible, regroup_parts
from jaxpaged.runner.weight_structure import (
    LayerGroup,
    Layout,
    Parameter,
    WeightStructure,
    layout_of,
)

logger = logging.getLogger(__name__)

# A tuple of arrays of a group: stacked parameters, or a tuple of parameters for each layer.
GroupArrays = tuple[Any, ...]


class TensorSource(Protocol):
    """The part of a checkpoint that loading needs."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> np.ndarray: ...


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Arguments of a step. Others of the same structure can take their place without a compile.

    Attributes:
      outer: parameters outside the layers.
      groups: parameters of the layers; see the module's text.
    """

    outer: tuple[jax.Array, ...]
    groups: tuple[GroupArrays, ...]
    structure: WeightStructure = field(metadata={"static": True})

    @property
    def num_bytes(self) -> int:
        """Of all devices together, a parameter that each has whole counted once."""
        return sum(array.nbytes for array in jax.tree.leaves(self))


def load_weights(
    config: ModelConfig,
    checkpoint: TensorSource | None,
    *,
    dtype: str,
    mesh: Mesh,
    seed: int = 0,
    random: bool = False,
    layout: Layout | None = None,
) -> Weights:
    """Makes the weights on the devices of `mesh`.

    Args:
      checkpoint: unused, and may be None, when `random`.
      dtype: of the parameters on the device.
      mesh: its one axis is `AXIS_NAME`.
      seed: of random weights; all 64 bits count.
      layout: None = the one of the mesh's platform.

    Raises:
      CheckpointError: tensors are missing, unexpected or of another shape; all are named.
      ValueError: the devices cannot share the model.
    """
    check_divisible(config, mesh.size)
    layout = layout or layout_of(mesh.devices.flat[0].platform)
    if random:
        return _random_weights(WeightStructure(config, dtype, layout, mesh), seed)
    if checkpoint is None:
        raise ValueError("checkpoint=None needs random=True")
    config = _resolve_head(config, checkpoint)
    loader = _Loader(WeightStructure(config, dtype, layout, mesh), checkpoint)
    return loader.load()


def weight_specs(structure: WeightStructure) -> Weights:
    """Weights whose leaves are the PartitionSpec of each array: what `shard_map` wants."""
    outer: Any = tuple(parameter.spec for parameter in structure.outer.parameters)
    return Weights(
        outer=outer,
        groups=tuple(_group_specs(structure.layout, group) for group in structure.groups),
        structure=structure,
    )


def _group_specs(layout: Layout, group: LayerGroup) -> GroupArrays:
    specs = tuple(parameter.spec for parameter in group.structure.parameters)
    if layout == "flat":
        return (specs,) * group.num_layers
    return tuple(PartitionSpec(None, *spec) for spec in specs)


def _resolve_head(config: ModelConfig, checkpoint: TensorSource) -> ModelConfig:
    """Checks all names and decides whether the head is the embedding, whatever the config claims.

    A head that is there and differs from the embedding is used; one that is absent is tied.
    """
    found = checkpoint.shapes()
    separate = replace(config, tie_word_embeddings=False)
    match_names(expected_names(separate), found, optional={HEAD_NAME}).raise_if_bad()
    if HEAD_NAME not in found:
        if not config.tie_word_embeddings:
            logger.warning("no %s: the embedding is used as the head", HEAD_NAME)
        return replace(config, tie_word_embeddings=True)
    if not config.tie_word_embeddings:
        return separate
    if np.array_equal(checkpoint.tensor(HEAD_NAME), checkpoint.tensor(EMBEDDING_NAME)):
        return config
    logger.warning(
        "the config ties the head to the embedding, but %s differs and is used", HEAD_NAME
    )
    return separate


class _Loader:
    """Reads parameters from a checkpoint and puts them where they belong."""

    def __init__(self, structure: WeightStructure, checkpoint: TensorSource):
        self.structure = structure
        self.checkpoint = checkpoint
        self.dtype = jnp.dtype(structure.dtype)

    def load(self) -> Weights:
        config = self.structure.config
        family = family_of(config)
        outer_sources, layer_sources = family.outer_sources(config), family.layer_sources(config)
        num_arrays = len(outer_sources) + len(layer_sources) * config.num_layers
        with _progress(num_arrays) as bar:
            outer = tuple(
                self._put(self._read(outer_sources[parameter.path], parameter, 0, bar), parameter)
                for parameter in self.structure.outer.parameters
            )
            groups = tuple(
                self._load_group(group, layer_sources, bar) for group in self.structure.groups
            )
        return Weights(outer, groups, self.structure)

    def _load_group(self, group: LayerGroup, sources: dict[str, Source], bar: tqdm) -> GroupArrays:
        parameters = group.structure.parameters
        layers = range(group.start, group.stop)
        if self.structure.layout == "flat":
            return tuple(
                tuple(
                    self._put(self._read(sources[parameter.path], parameter, layer, bar), parameter)
                    for parameter in parameters
                )
                for layer in layers
            )
        arrays = []
        for parameter in parameters:
            stacked = np.empty((group.num_layers, *parameter.shape), self.dtype)
            for layer in layers:
                source = sources[parameter.path]
                stacked[layer - group.start] = self._read(source, parameter, layer, bar)
            arrays.append(self._put(stacked, parameter, stacked=True))
        return tuple(arrays)

    def _read(self, source: Source, parameter: Parameter, layer: int, bar: tqdm) -> np.ndarray:
        tensors = [self.checkpoint.tensor(name.format(layer=layer)) for name in source.names]
        array = source.build(*tensors).astype(self.dtype)
        assert array.shape == parameter.shape, (parameter, array.shape)
        bar.update()
        return _regroup(array, parameter, self.structure.mesh.size)

    def _put(self, array: np.ndarray, parameter: Parameter, *, stacked: bool = False) -> jax.Array:
        spec = PartitionSpec(None, *parameter.spec) if stacked else parameter.spec
        sharding = NamedSharding(self.structure.mesh, spec)
        return jax.device_put(np.ascontiguousarray(array), sharding)


def _random_weights(structure: WeightStructure, seed: int) -> Weights:
    """Normal values as the parameters ask for: the same in every layout and on any devices."""
    words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")

    def draw(parameters: tuple[Parameter, ...], number: jax.Array) -> tuple[jax.Array, ...]:
        # why one draw: the generator compiles slowly, so it should not stand there per parameter
        sizes = [math.prod(parameter.shape) for parameter in parameters]
        noise = jax.random.normal(jax.random.fold_in(key, number), (sum(sizes),), jnp.float32)
        pieces = jnp.split(noise, np.cumsum(sizes)[:-1])
        arrays = zip(pieces, parameters, strict=True)
        return tuple(_shape_noise(piece, parameter, structure) for piece, parameter in arrays)

    def draw_group(group: LayerGroup, specs: GroupArrays) -> GroupArrays:
        numbers = jnp.arange(group.start + 1, group.stop + 1)
        draw_layer = partial(draw, group.structure.parameters)
        if structure.layout == "flat":
            jitted = jax.jit(draw_layer, out_shardings=_shardings(structure.mesh, specs[0]))
            return tuple(jitted(number) for number in numbers)
        draw_stacked = partial(jax.lax.map, draw_layer)
        return jax.jit(draw_stacked, out_shardings=_shardings(structure.mesh, specs))(numbers)

    specs = weight_specs(structure)
    draw_outer = jax.jit(
        partial(draw, structure.outer.parameters),
        out_shardings=_shardings(structure.mesh, specs.outer),
    )
    pairs = zip(structure.groups, specs.groups, strict=True)
    groups = tuple(draw_group(group, group_specs) for group, group_specs in pairs)
    return Weights(draw_outer(jnp.int32(0)), groups, structure)


def _shape_noise(noise: jax.Array, parameter: Parameter, structure: WeightStructure) -> jax.Array:
    values = parameter.init_mean + parameter.init_scale * noise.reshape(parameter.shape)
    return _regroup(values.astype(structure.dtype), parameter, structure.mesh.size)


def _shardings(mesh: Mesh, specs: GroupArrays) -> GroupArrays:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _regroup(array: Any, parameter: Parameter, num_devices: int) -> Any:
    if parameter.num_parts == 1 or num_devices == 1:
        return array
    assert parameter.shard_axis is not None
    return regroup_parts(array, parameter.shard_axis, parameter.num_parts, num_devices)


@contextmanager
def _progress(num_arrays: int) -> Iterator[tqdm]:
    """A bar on terminals, for loads that take long enough to wonder."""
    with tqdm(total=num_arrays, desc="loading weights", delay=1.0, disable=None) as bar:
        yield bar
