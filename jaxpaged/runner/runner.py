"""The runner: owns the device's state and obeys step plans.

`dispatch` enqueues a step and returns at once, `collect` waits for its tokens; between the two the
host may plan the next step.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxpaged.checkpoint.protocol import Checkpoint
from jaxpaged.config import ResolvedConfig
from jaxpaged.errors import InvalidFieldError
from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.buckets import Bucket, make_buckets, pick_bucket
from jaxpaged.runner.executables import COPY_SIZES, MAX_UPDATES, Executables
from jaxpaged.runner.inputs import max_table_updates
from jaxpaged.runner.pack import Packer
from jaxpaged.runner.sampling import Variant
from jaxpaged.runner.sharding import AXIS_NAME
from jaxpaged.runner.step import BatchState
from jaxpaged.runner.weights import Weights, load_weights
from jaxpaged.step_plan import StepPlan, StepResult
from kernels_pallas.ops import pool_layout
from kernels_pallas.pool import KVPool, pool_partition_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepHandle:
    """A dispatched step: where its tokens will be, and how many they are."""

    drawn: jax.Array
    num_samples: int


class Runner:
    """One model on one mesh. Not thread-safe; steps run in the order of their dispatch."""

    def __init__(self, weights: Weights, config: ResolvedConfig):
        self.config = config
        self.weights = weights
        self._buckets = make_buckets(
            max_num_seqs=config.max_num_seqs, max_num_tokens=config.max_num_tokens
        )
        self._packer = Packer(
            self._buckets, max_num_seqs=config.max_num_seqs, block_size=config.block_size
        )
        self.pool = self._new_pool()
        self._state = self._new_state()
        self._executables = Executables(
            weights, self.pool, self._state, config.block_size, config.attention_impl
        )
        self._num_warm_compiles = 0

    @property
    def num_compiles_after_warmup(self) -> int:
        return self._executables.num_compiles - self._num_warm_compiles

    def warm_up(self) -> None:
        """Compiles every program that a step can need, then runs a first step on the null row."""
        executables = self._executables
        with tqdm(
            total=2 * len(self._buckets), desc="compiling", delay=1.0, disable=None, leave=False
        ) as bar:
            for bucket in self._buckets:
                executables.forward(bucket)
                bar.update()
                for variant in Variant:
                    executables.sample(bucket, variant)
                bar.update()
        executables.update_tables()
        for size in COPY_SIZES:
            executables.copy_blocks(size)
        self.collect(self.dispatch(_empty_plan(self.config.max_num_seqs)))
        self._num_warm_compiles = executables.num_compiles

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Enqueues a step: block copies, forward, sample."""
        self._packer.start_rows(plan.starts)
        self._copy_blocks(plan.copies)
        bucket = pick_bucket(self._buckets, plan)
        updates = self._write_surplus_updates(plan.table_updates, bucket)
        packed = self._packer.pack(plan, bucket, updates)
        variant = Variant.GREEDY if self._packer.is_greedy(plan) else Variant.RANDOM
        forward = self._executables.forward(bucket)
        logits, self.pool, self._state, inputs = forward(
            self.weights, self.pool, self._state, packed
        )
        sample = self._executables.sample(bucket, variant)
        drawn, self._state = sample(logits, self._state, inputs)
        drawn.copy_to_host_async()
        return StepHandle(drawn, len(plan.sample_rows))

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for a step's tokens."""
        token_ids, is_finite = np.asarray(handle.drawn)[:, : handle.num_samples].tolist()
        return StepResult(token_ids, list(map(bool, is_finite)))

    def reset(self) -> None:
        """Makes an empty pool after a failed step, which may have consumed the old one."""
        _free((self.pool, self._state))  # first: the device may not hold two
        self.pool = self._new_pool()
        self._state = self._new_state()

    def load_weights(self, checkpoint: Checkpoint) -> Weights:
        """Weights that can take the place of the present ones without a compile.

        Raises:
          InvalidFieldError: they are of another structure.
          CheckpointError: they cannot be read.
        """
        structure = self.weights.structure
        weights = load_weights(
            ModelConfig.from_hf(checkpoint.config),
            checkpoint,
            dtype=structure.dtype,
            mesh=structure.mesh,
        )
        if weights.structure != structure:
            _free(weights)
            raise InvalidFieldError(
                "checkpoint_path",
                f"the model in {checkpoint.path} is not of the loaded one's structure: it has "
                f"{weights.structure.config}, loaded is {structure.config}",
            )
        return weights

    def replace_weights(self, weights: Weights) -> None:
        """Puts what `load_weights` gave in place of the present weights, and frees those."""
        _free(self.weights)
        self.weights = weights

    def close(self) -> None:
        """Frees the device's memory; the runner is of no use any more."""
        _free((self.weights, self.pool, self._state))

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for pairs in _slices(copies, COPY_SIZES[-1]):
            size = next(size for size in COPY_SIZES if size >= len(pairs))
            padded = np.zeros((2, size), np.int32)
            padded[:, : len(pairs)] = np.array(pairs, np.int32).T
            self.pool = self._executables.copy_blocks(size)(self.pool, *padded)

    def _write_surplus_updates(
        self, updates: list[tuple[int, int, int]], bucket: Bucket
    ) -> list[tuple[int, int, int]]:
        """Writes the table entries that the packed vector has no room for; returns the others."""
        room = max_table_updates(bucket, self.config.block_size)
        for entries in _slices(updates[room:], MAX_UPDATES):
            padded = np.zeros((MAX_UPDATES, 3), np.int32)
            padded[:, 0] = self.config.max_num_seqs
            padded[: len(entries)] = entries
            self._state = self._executables.update_tables()(self._state, padded)
        return updates[:room]

    def _new_pool(self) -> KVPool:
        structure = self.weights.structure
        return KVPool.create(
            num_layers=structure.config.num_layers,
            num_blocks=self.config.num_blocks,
            num_kv_heads=structure.config.num_kv_heads,
            block_size=self.config.block_size,
            head_dim=structure.config.head_dim,
            dtype=self.config.kv_dtype,
            sharding=NamedSharding(structure.mesh, pool_partition_spec(AXIS_NAME)),
            layout=pool_layout(self.config.attention_impl),
        )

    def _new_state(self) -> BatchState:
        config = self.config
        max_blocks_per_row = -(-config.max_model_len // config.block_size)
        num_rows = config.max_num_seqs + 1
        sharding = NamedSharding(self.weights.structure.mesh, PartitionSpec())
        return BatchState(
            token_ids=jnp.zeros(num_rows, jnp.int32, device=sharding),
            block_tables=jnp.zeros((num_rows, max_blocks_per_row), jnp.int32, device=sharding),
        )


def _free(arrays: Any) -> None:
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()


def _slices[T](items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _empty_plan(null_row: int) -> StepPlan:
    """One decode row, the null row: computes nothing that anybody reads."""
    return StepPlan(
        step_id=0,
        num_decode_rows=1,
        rows=[null_row],
        q_lens=[1],
        kv_lens=[1],
        sample_sources=[0],
        sample_rows=[null_row],
    )
