"""Device memory that a step takes over from an earlier one of its size."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.executables import Executables

_Key = tuple[Any, ...]  # shape and dtype


class StepMemory:
    """Where packed vectors and results lie, the same place step after step.

    A CUDA graph is updated by the host when an address in it has changed since it last ran, which
    takes longer than launching it: milliseconds for a whole step.

    Attributes:
      arrays: by shape. What a step of that shape gave is there until the next one takes it.
    """

    def __init__(
        self, executables: Executables, buckets: Iterable[Bucket], sharding: NamedSharding
    ):
        self._executables = executables
        self._keys: dict[Bucket, tuple[_Key, tuple[_Key, ...]]] = {}
        self.arrays: dict[_Key, jax.Array] = {}
        for bucket in buckets:
            packed, results = executables.packed(bucket), executables.results(bucket)
            self._keys[bucket] = _key(packed), tuple(map(_key, results))
            for shape in (packed, *results):
                self.arrays[_key(shape)] = jnp.zeros(shape.shape, shape.dtype, device=sharding)

    def take(self, bucket: Bucket, packed: np.ndarray) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The packed vector, in its place, and the results of an earlier step, to be donated."""
        place, results = self._keys[bucket]
        placed = self._executables.place(bucket)(packed, self.arrays.pop(place))
        self.arrays[place] = placed
        return placed, tuple(map(self.arrays.pop, results))

    def give_back(self, bucket: Bucket, results: tuple[jax.Array, ...]) -> None:
        """Keeps what the step gave; until the next `take` it can be read."""
        self.arrays.update(zip(self._keys[bucket][1], results, strict=False))


def _key(array: jax.ShapeDtypeStruct) -> _Key:
    return (*array.shape, str(array.dtype))
