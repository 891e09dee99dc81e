"""Device memory that a step takes over from an earlier one of its size."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.executables import Executables


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
        shapes = {
            _key(shape): shape
            for bucket in buckets
            for shape in (executables.packed(bucket), *executables.results(bucket))
        }
        self.arrays: dict[tuple[Any, ...], jax.Array] = {
            key: jnp.zeros(shape.shape, shape.dtype, device=sharding)
            for key, shape in shapes.items()
        }

    def take(self, bucket: Bucket, packed: np.ndarray) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The packed vector, in its place, and the results of an earlier step, to be donated."""
        key = _key(packed)
        placed = self._executables.place(bucket)(packed, self.arrays.pop(key))
        self.arrays[key] = placed
        results = self._executables.results(bucket)
        return placed, tuple(self.arrays.pop(_key(shape)) for shape in results)

    def give_back(self, bucket: Bucket, results: tuple[jax.Array, ...]) -> None:
        """Keeps what the step gave; until the next `take` it can be read."""
        kept = self._executables.results(bucket)
        self.arrays.update(
            (_key(shape), array) for shape, array in zip(kept, results, strict=False)
        )


def _key(array: jax.ShapeDtypeStruct | np.ndarray) -> tuple[Any, ...]:
    return (*array.shape, str(array.dtype))
