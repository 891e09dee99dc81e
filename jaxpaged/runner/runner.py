"""The runner: owns the device's state and obeys step plans.

`dispatch` enqueues a step and returns at once, `collect` waits for its tokens; between the two the
host may plan the next step.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxpaged.checkpoint.protocol import Checkpoint
from jaxpaged.config import ResolvedConfig
from jaxpaged.errors import InvalidFieldError
from jaxpaged.logprobs import num_words
from jaxpaged.models.config import ModelConfig
from jaxpaged.runner.buckets import Bucket, make_buckets, pick_bucket
from jaxpaged.runner.executable_store import ExecutableStore
from jaxpaged.runner.executables import COPY_SIZES, MAX_UPDATES, Executables
from jaxpaged.runner.inputs import max_table_updates
from jaxpaged.runner.pack import Packer
from jaxpaged.runner.processors import LogitsProcessor
from jaxpaged.runner.sampler import Sampler, new_adjustments
from jaxpaged.runner.sharding import AXIS_NAME
from jaxpaged.runner.step import BatchState
from jaxpaged.runner.step_memory import StepMemory
from jaxpaged.runner.weights import Weights, load_weights
from jaxpaged.step_plan import StepPlan, StepResult
from kernels_pallas.ops import pool_layout
from kernels_pallas.pool import KVPool, pool_partition_spec

logger = logging.getLogger(__name__)


@dataclass
class StepHandle:
    """A dispatched step: what it gave so far, all of it still on the device.

    Attributes:
      logits, words: what the draw needs.
      prompt_logprobs: packed records of each prompt chunk, in slices.
      drawn: token ids and flags, once `draw` was called.
      logprobs: packed records of the drawn tokens, when a row asked for them.
      num_best: how many best tokens each of these rows wants told; -1 = nothing.
    """

    plan: StepPlan
    bucket: Bucket
    logits: jax.Array
    words: jax.Array
    prompt_logprobs: list[list[jax.Array]]
    drawn: jax.Array | None = None
    logprobs: jax.Array | None = None
    num_best: np.ndarray | None = None


class Runner:
    """One model on one mesh. Not thread-safe; steps run in the order of their dispatch."""

    def __init__(self, weights: Weights, config: ResolvedConfig):
        self.config = config
        self.weights = weights
        platform = weights.structure.mesh.devices.flat[0].platform
        self._buckets = make_buckets(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_tokens,
            on_cpu=platform == "cpu",
        )
        self._packer = Packer(
            self._buckets, max_num_seqs=config.max_num_seqs, block_size=config.block_size
        )
        self.pool = self._new_pool()
        self._state = self._new_state()
        adjustments = new_adjustments(config, self._replicated)
        self._executables = Executables(
            weights, self.pool, self._state, config.block_size, config.attention_impl
        )
        self._sampler = Sampler(self._executables, self._packer, adjustments, config.max_num_seqs)
        self._memory = StepMemory(self._executables, self._buckets, self._replicated)
        self._num_warm_compiles = 0
        self._prepare_lock = threading.Lock()  # one compile a function, and each counted once

    @property
    def num_programs(self) -> tuple[int, int]:
        """Programs made so far, and how many of them were found in a store."""
        return self._executables.programs.num_compiles, self._executables.programs.num_loads

    @property
    def num_compiles_after_warmup(self) -> int:
        return self._executables.programs.num_compiles - self._num_warm_compiles

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens to which steps with prompts are padded, ascending."""
        return tuple(bucket.num_tokens for bucket in self._buckets if not bucket.is_decode)

    def warm_up(self, store: ExecutableStore | None = None) -> None:
        """Makes every program that a step can need, then runs a first step on the null row.

        Args:
          store: where programs are kept between starts.
        """
        executables = self._executables
        jobs: list[Callable[[], Any]] = [executables.update_tables]
        jobs += [partial(executables.copy_blocks, size) for size in COPY_SIZES]
        jobs += [partial(executables.place, bucket) for bucket in self._buckets]
        jobs += self._sampler.programs(self._buckets)
        # The slowest first: they end last otherwise.
        jobs += [partial(executables.forward, bucket) for bucket in self._buckets]
        with (
            executables.programs.kept_in(store),
            tqdm(total=len(jobs), desc="compiling", delay=1.0, disable=None, leave=False) as bar,
            ThreadPoolExecutor(os.cpu_count(), "jaxpaged-compile") as pool,
        ):
            for job in as_completed([pool.submit(job) for job in reversed(jobs)]):
                job.result()
                bar.update()
        self.collect(self.dispatch(StepPlan.empty(self.config.max_num_seqs)))
        self._num_warm_compiles = executables.programs.num_compiles

    def prepare(self, processor: LogitsProcessor) -> None:
        """Compiles a user's function, so that no step has to; in any thread.

        Raises:
          InvalidFieldError: it fails, or does not give logits.
        """
        with self._prepare_lock:
            before = self._executables.programs.num_compiles
            try:
                self._sampler.prepare(processor, self._buckets)
            finally:
                self._num_warm_compiles += self._executables.programs.num_compiles - before

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Enqueues a step: block copies, forward, and the draw unless it waits for masks."""
        self._packer.start_rows(plan.starts)
        self._sampler.start_rows(plan.starts)
        self._copy_blocks(plan.copies)
        bucket = pick_bucket(self._buckets, plan)
        updates = self._write_surplus_updates(plan.table_updates, bucket)
        packed = self._packer.pack(plan, bucket, updates)
        forward = self._executables.forward(bucket)
        logits, self.pool, self._state, words, hidden = forward(
            self.weights, self.pool, self._state, *self._memory.take(bucket, packed)
        )
        self._memory.give_back(bucket, (logits, words, hidden))
        prompt_logprobs = self._sampler.score_chunks(plan, bucket, self.weights, hidden)
        handle = StepHandle(plan, bucket, logits, words, prompt_logprobs)
        if not plan.has_masks:
            self.draw(handle, None)
        return handle

    def draw(self, handle: StepHandle, masks: np.ndarray | None) -> None:
        """Enqueues the draw of a dispatched step; before the next one is dispatched.

        Args:
          masks: of the plan's draws, when it `has_masks`; see `adjust_step`.
        """
        plan, bucket = handle.plan, handle.bucket
        drawn, self._state = self._sampler.draw(
            plan, bucket, handle.logits, self._state, handle.words, masks
        )
        drawn.copy_to_host_async()
        handle.drawn, handle.num_best = drawn, self._packer.num_best(plan)
        if handle.num_best is not None:
            logprobs = self._executables.logprobs(bucket)(handle.logits, drawn)
            logprobs.copy_to_host_async()
            handle.logprobs = logprobs

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for a step's tokens."""
        drawn = np.asarray(handle.drawn)[:, : len(handle.plan.sample_rows)]
        token_ids, is_finite = drawn.tolist()
        result = StepResult(token_ids, list(map(bool, is_finite)))
        if handle.num_best is not None:
            packed = np.asarray(handle.logprobs)
            result.logprobs = [
                row[: num_words(num_best)].tobytes() if num_best >= 0 else b""
                for row, num_best in zip(packed, handle.num_best.tolist(), strict=False)
            ]
        for chunk, slices in zip(handle.plan.prompt_chunks, handle.prompt_logprobs, strict=True):
            packed = np.concatenate([np.asarray(part) for part in slices])
            records = packed[: len(chunk.token_ids), : num_words(chunk.num_best)]
            result.prompt_logprobs.append(records.tobytes())
        return result

    def reset(self) -> None:
        """Makes an empty pool after a failed step, which may have consumed the old one."""
        # The device may not hold two.
        _free(self._step_arrays)
        self.pool = self._new_pool()
        self._state = self._new_state()
        self._sampler.adjustments = new_adjustments(self.config, self._replicated)
        self._memory = StepMemory(self._executables, self._buckets, self._replicated)

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
        _free((self.weights, self._step_arrays))

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for pairs in batched(copies, COPY_SIZES[-1]):
            size = next(size for size in COPY_SIZES if size >= len(pairs))
            padded = np.zeros((2, size), np.int32)
            padded[:, : len(pairs)] = np.array(pairs, np.int32).T
            self.pool = self._executables.copy_blocks(size)(self.pool, *padded)

    def _write_surplus_updates(
        self, updates: list[tuple[int, int, int]], bucket: Bucket
    ) -> list[tuple[int, int, int]]:
        """Writes the table entries that the packed vector has no room for; returns the others."""
        room = max_table_updates(bucket, self.config.block_size)
        for entries in batched(updates[room:], MAX_UPDATES):
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
        num_rows, whole = config.max_num_seqs + 1, self._replicated
        return BatchState(
            token_ids=jnp.zeros(num_rows, jnp.int32, device=whole),
            block_tables=jnp.zeros((num_rows, max_blocks_per_row), jnp.int32, device=whole),
        )

    @property
    def _step_arrays(self) -> tuple[Any, ...]:
        """What steps read and write, the weights apart."""
        return self.pool, self._state, self._sampler.adjustments, self._memory.arrays

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.weights.structure.mesh, PartitionSpec())


def _free(arrays: Any) -> None:
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()
