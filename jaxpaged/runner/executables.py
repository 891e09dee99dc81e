"""Every program a runner calls, compiled ahead of time and counted."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.models.precision import hidden_dtype
from jaxpaged.runner.adjust import Adjustments, adjust_step, num_mask_words, write_row
from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.inputs import NUM_SAMPLE_WORDS, StepLayout
from jaxpaged.runner.logprobs import score_step, top_logprobs
from jaxpaged.runner.processors import (
    LogitsProcessor,
    check_pure,
    put_rows,
    take_rows,
    vectorised,
)
from jaxpaged.runner.programs import Programs
from jaxpaged.runner.sampling import Variant
from jaxpaged.runner.step import BatchState, forward_step, sample_step, update_tables
from jaxpaged.runner.weights import Weights
from kernels_pallas.ops import copy_blocks
from kernels_pallas.pool import KVPool

# Pairs that one call copies, and table entries that one call writes; more take several calls.
COPY_SIZES = (1, 8, 64)
MAX_UPDATES = 1024
# Prompt tokens whose log-probabilities one call computes.
MAX_SCORED = 64
# From this many tokens on cuBLASLt's products beat Triton's on an H200 (docs/performance.md).
MIN_CUBLAS_TOKENS = 64
# A loop is part of its program's CUDA graph, so that the host does not drive it: XLA's own list,
# and WHILE.
LOOPS_IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,WHILE",
}


class Executables:
    """Programs by what they do and their size. A new one is made when asked for.

    Each knows its arguments' shapes from the arrays given here; pool and state are donated.

    Attributes:
      programs: those there are, counted.
    """

    def __init__(
        self,
        weights: Weights,
        pool: KVPool,
        state: BatchState,
        block_size: int,
        impl: str | None,
    ):
        self._weights, self._pool, self._state = jax.tree.map(_shape_of, (weights, pool, state))
        self._pool_sharding = pool.data.sharding
        self._replicated = NamedSharding(weights.structure.mesh, PartitionSpec())
        shape = (state.token_ids.shape[0], weights.structure.config.vocab_size)
        adjustments = jax.eval_shape(
            lambda: Adjustments(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        )
        self._adjustments = jax.tree.map(self._replicate, adjustments)
        self._platform = weights.structure.mesh.devices.flat[0].platform
        self._block_size = block_size
        self._impl = impl
        self.programs = Programs((block_size, impl), self._replicated)
        self._output_shapes: dict[Bucket, tuple[Any, Any, Any]] = {}

    def place(self, bucket: Bucket) -> Any:
        """(packed, an earlier step's) -> packed, in the memory of the earlier one."""
        key = ("place", bucket.num_tokens, bucket.num_rows)
        if key in self.programs:  # why: every step comes here, and below shapes are made
            return self.programs[key]
        packed = self.packed(bucket)
        return self.programs.get(key, _place, (packed, packed), donate=(1,))

    def forward(self, bucket: Bucket) -> Any:
        """(weights, pool, state, packed, results) -> (logits, pool, state, words, hidden)."""
        key = ("forward", bucket.num_tokens, bucket.num_rows)
        if key in self.programs:
            return self.programs[key]
        layout = StepLayout.of(bucket, self._block_size)
        step = partial(forward_step, layout=layout, impl=self._impl)
        whole = self._replicated
        return self.programs.get(
            key,
            step,
            (self._weights, self._pool, self._state, self.packed(bucket), self.results(bucket)),
            donate=(1, 2, 4),
            keep_unused=True,
            out=(whole, self._pool_sharding, whole, whole, whole),
            options=self._forward_options(bucket),
        )

    def sample(self, bucket: Bucket, variant: Variant) -> Any:
        """(logits, state, sample words) -> (token ids and flags, state)."""
        logits, words, _ = self._outputs(bucket)
        return self.programs.get(
            ("sample", bucket.num_rows, variant.value),
            partial(sample_step, variant=variant),
            (logits, self._state, words),
            donate=(1,),
            options=LOOPS_IN_GRAPHS if self._platform == "gpu" and variant.has_loops else {},
        )

    def adjust(self, bucket: Bucket) -> Any:
        """(logits, adjustments, sample words, masks) -> (logits, adjustments)."""
        logits, words, _ = self._outputs(bucket)
        masks = self._int32(bucket.num_rows, num_mask_words(logits.shape[1]))
        arguments = (logits, self._adjustments, words, masks)
        return self.programs.get(("adjust", bucket.num_rows), adjust_step, arguments, donate=(1,))

    def write_row(self) -> Any:
        """(adjustments, row, tokens, bias) -> adjustments."""
        row, tokens = self._int32(), self._int32(self._adjustments.tokens.shape[1])
        bias = jax.ShapeDtypeStruct(tokens.shape, np.float32)
        arguments = (self._adjustments, row, tokens, bias)
        return self.programs.get(("write_row",), write_row, arguments, donate=(0,))

    def logprobs(self, bucket: Bucket) -> Any:
        """(logits, token ids and flags) -> packed[num_rows, packed]."""

        def of_drawn(logits: jax.Array, drawn: jax.Array) -> jax.Array:
            return top_logprobs(logits, drawn[0])

        logits, _, _ = self._outputs(bucket)
        drawn = self._replicate(self._int32(2, bucket.num_rows))
        return self.programs.get(("logprobs", bucket.num_rows), of_drawn, (logits, drawn))

    def take_hidden(self, bucket: Bucket) -> Any:
        """(hidden, idxs[MAX_SCORED]) -> hidden[MAX_SCORED, hidden_size]."""
        _, _, hidden = self._outputs(bucket)
        arguments = (hidden, self._int32(MAX_SCORED))
        return self.programs.get(("take_hidden", bucket.num_tokens), _take, arguments)

    def score(self, bucket: Bucket) -> Any:
        """(weights, hidden[MAX_SCORED, hidden_size], token ids) -> packed[MAX_SCORED, packed]."""
        _, _, hidden = self._outputs(bucket)
        hidden = self._replicate(jax.ShapeDtypeStruct((MAX_SCORED, hidden.shape[1]), np.float32))
        arguments = (self._weights, hidden, self._int32(MAX_SCORED))
        return self.programs.get(("score",), score_step, arguments)

    def take_rows(self, bucket: Bucket, num_rows: int) -> Any:
        """(logits, adjustments, sample words, idxs) -> (logits, states) of `num_rows` rows."""
        logits, words, _ = self._outputs(bucket)
        arguments = (logits, self._adjustments, words, self._int32(num_rows))
        return self.programs.get(("take_rows", bucket.num_rows), take_rows, arguments)

    def put_rows(self, bucket: Bucket, num_rows: int) -> Any:
        """(logits, processed rows, idxs) -> logits."""
        logits, _, _ = self._outputs(bucket)
        rows = self._replicate(jax.ShapeDtypeStruct((num_rows, logits.shape[1]), logits.dtype))
        arguments = (logits, rows, self._int32(num_rows))
        return self.programs.get(("put_rows", bucket.num_rows), put_rows, arguments)

    def process(self, processor: LogitsProcessor, bucket: Bucket, num_rows: int) -> Any:
        """(logits, states) of rows -> their logits; one program a function, whatever the bucket.

        Raises:
          InvalidFieldError: the function fails, or does not give logits.
        """
        key = ("process", processor)
        if key in self.programs:  # why: what follows is traced, too slow for every step
            return self.programs[key]
        logits, words, _ = self._outputs(bucket)
        arguments = (logits, self._adjustments, words, self._int32(num_rows))
        rows = jax.tree.map(self._replicate, jax.eval_shape(take_rows, *arguments))
        return self.programs.get(key, vectorised(processor), rows, check=check_pure)

    def copy_blocks(self, num_pairs: int) -> Any:
        """(pool, sources, destinations) -> pool."""
        pairs = self._int32(num_pairs)
        arguments = (self._pool, pairs, pairs)
        return self.programs.get(
            ("copy_blocks", num_pairs), copy_blocks, arguments, donate=(0,), out=self._pool_sharding
        )

    def update_tables(self) -> Any:
        """(state, updates[MAX_UPDATES, 3]) -> state."""
        arguments = (self._state, self._int32(MAX_UPDATES, 3))
        return self.programs.get(("update_tables",), update_tables, arguments, donate=(0,))

    def _forward_options(self, bucket: Bucket) -> dict[str, Any]:
        """XLA's options for a `forward`."""
        if self._platform != "gpu":
            return {}
        # It takes a donated pool for two, finds no memory left, and computes products twice.
        options: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
        if bucket.num_tokens >= MIN_CUBLAS_TOKENS:
            options["xla_gpu_enable_triton_gemm"] = False
        return options

    def packed(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        """Shape of what the host sends."""
        size = StepLayout.of(bucket, self._block_size).size
        return self._replicate(self._int32(size))

    def results(self, bucket: Bucket) -> tuple[Any, ...]:
        """Shapes of the arrays that a `forward` writes its results into."""
        results = self._outputs(bucket)
        return results[:2] if bucket.is_decode else results

    def _outputs(self, bucket: Bucket) -> tuple[Any, Any, Any]:
        """Shapes of the logits, sample words and hidden states that `forward` gives."""
        if bucket not in self._output_shapes:
            self._output_shapes[bucket] = self._make_outputs(bucket)
        return self._output_shapes[bucket]

    def _make_outputs(self, bucket: Bucket) -> tuple[Any, Any, Any]:
        structure, rows = self._weights.structure, bucket.num_rows
        config = structure.config
        logits = jax.ShapeDtypeStruct((rows, config.vocab_size), np.float32)
        num_hidden = 0 if bucket.is_decode else bucket.num_tokens
        dtype = hidden_dtype(bucket.num_tokens, structure.dtype)
        hidden = jax.ShapeDtypeStruct((num_hidden, config.hidden_size), dtype)
        words = self._int32(NUM_SAMPLE_WORDS, rows)
        return jax.tree.map(self._replicate, (logits, words, hidden))

    @staticmethod
    def _int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    def _replicate(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self._replicated)


def _place(packed: jax.Array, earlier: jax.Array) -> jax.Array:
    return earlier.at[:].set(packed)


def _take(hidden: jax.Array, idxs: jax.Array) -> jax.Array:
    return hidden[idxs].astype(jnp.float32)  # of steps of any size, for one program that scores


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
