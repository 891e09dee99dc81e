"""Every program a runner calls, compiled ahead of time and counted."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.inputs import StepLayout
from jaxpaged.runner.sampling import Variant
from jaxpaged.runner.step import BatchState, forward_step, sample_step, update_tables
from jaxpaged.runner.weights import Weights
from kernels_pallas.ops import copy_blocks
from kernels_pallas.pool import KVPool

logger = logging.getLogger(__name__)

# Pairs that one call copies, and table entries that one call writes; more take several calls.
COPY_SIZES = (1, 8, 64)
MAX_UPDATES = 1024


class Executables:
    """Programs by what they do and their size. A new one is compiled when asked for, and counted.

    Each knows its arguments' shapes from the arrays given here; pool and state are donated.
    """

    def __init__(
        self, weights: Weights, pool: KVPool, state: BatchState, block_size: int, impl: str | None
    ):
        self.num_compiles = 0
        self._lock = threading.Lock()  # warm-up compiles in threads
        self._weights, self._pool, self._state = jax.tree.map(_shape_of, (weights, pool, state))
        self._pool_sharding = pool.data.sharding
        self._replicated = NamedSharding(weights.structure.mesh, PartitionSpec())
        self._block_size = block_size
        self._impl = impl
        self._compiled: dict[tuple[object, ...], Any] = {}

    def forward(self, bucket: Bucket) -> Any:
        """(weights, pool, state, packed) -> (logits, pool, state, sample inputs)."""
        step, packed = self._forward_step(bucket)
        whole = self._replicated
        return self._get(
            ("forward", bucket.num_tokens, bucket.num_rows),
            step,
            (self._weights, self._pool, self._state, packed),
            donate=(1, 2),
            out=(whole, self._pool_sharding, whole, whole),
        )

    def sample(self, bucket: Bucket, variant: Variant) -> Any:
        """(logits, state, sample inputs) -> (token ids and flags, state)."""
        key = ("sample", bucket.num_rows, variant.value)
        if key in self._compiled:
            return self._compiled[key]
        step, packed = self._forward_step(bucket)
        logits, _, _, inputs = jax.eval_shape(step, self._weights, self._pool, self._state, packed)
        logits, inputs = jax.tree.map(self._replicate, (logits, inputs))
        return self._get(
            key,
            partial(sample_step, variant=variant),
            (logits, self._state, inputs),
            donate=(1,),
            out=self._replicated,
        )

    def copy_blocks(self, num_pairs: int) -> Any:
        """(pool, sources, destinations) -> pool."""
        pairs = jax.ShapeDtypeStruct((num_pairs,), np.int32)
        arguments = (self._pool, pairs, pairs)
        return self._get(
            ("copy_blocks", num_pairs), copy_blocks, arguments, donate=(0,), out=self._pool_sharding
        )

    def update_tables(self) -> Any:
        """(state, updates[MAX_UPDATES, 3]) -> state."""
        updates = jax.ShapeDtypeStruct((MAX_UPDATES, 3), np.int32)
        arguments = (self._state, updates)
        return self._get(
            ("update_tables",), update_tables, arguments, donate=(0,), out=self._replicated
        )

    def _forward_step(self, bucket: Bucket) -> tuple[Callable[..., Any], jax.ShapeDtypeStruct]:
        layout = StepLayout.of(bucket, self._block_size)
        packed = jax.ShapeDtypeStruct((layout.size,), np.int32)
        return partial(forward_step, layout=layout, impl=self._impl), packed

    def _replicate(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self._replicated)

    def _get(
        self,
        key: tuple[object, ...],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        donate: tuple[int, ...],
        out: Any,
    ) -> Any:
        if key not in self._compiled:
            start = time.monotonic()
            jitted = jax.jit(function, donate_argnums=donate, out_shardings=out)
            self._compiled[key] = jitted.lower(*arguments).compile()
            with self._lock:
                self.num_compiles += 1
            logger.info("compiled %s in %.1f s", " ".join(map(str, key)), time.monotonic() - start)
        return self._compiled[key]


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
