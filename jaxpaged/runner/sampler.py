"""Draws a step's tokens: the chain of programs between its logits and its answer.

    logits -> adjust -> a user's functions -> sample -> log-probabilities

Only `sample` always runs; the others join when a row of the step asks for them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpaged.config import ResolvedConfig
from jaxpaged.runner.adjust import Adjustments, adjustments_row, num_mask_words
from jaxpaged.runner.buckets import Bucket
from jaxpaged.runner.executables import MAX_SCORED, Executables
from jaxpaged.runner.pack import Packer
from jaxpaged.runner.processors import LogitsProcessor
from jaxpaged.runner.sampling import Variant
from jaxpaged.runner.step import BatchState
from jaxpaged.step_plan import RowStart, StepPlan


def new_adjustments(config: ResolvedConfig, sharding: NamedSharding) -> Adjustments:
    shape = (config.max_num_seqs + 1, config.vocab_size)
    return Adjustments(
        tokens=jnp.zeros(shape, jnp.int32, device=sharding),
        bias=jnp.zeros(shape, jnp.float32, device=sharding),
    )


class Sampler:
    """Owns what sampling options keep on the device.

    Attributes:
      adjustments: replaced by every step that adjusts logits.
    """

    def __init__(
        self, executables: Executables, packer: Packer, adjustments: Adjustments, num_rows: int
    ):
        self.adjustments = adjustments
        self._executables = executables
        self._packer = packer
        self._num_rows = num_rows
        self._processors: dict[int, LogitsProcessor] = {}  # by row
        self._no_masks: dict[int, jax.Array] = {}  # by number of rows

    def programs(self, buckets: list[Bucket]) -> list[Callable[[], Any]]:
        """What must be compiled before the first step: a call each."""
        executables = self._executables
        by_rows = {bucket.num_rows: bucket for bucket in buckets}.values()
        prompts = [bucket for bucket in buckets if not bucket.is_decode]
        programs: list[Callable[[], Any]] = [
            executables.write_row,
            partial(executables.score, prompts[0]),
        ]
        for bucket in by_rows:
            programs += [partial(executables.sample, bucket, variant) for variant in Variant]
            programs += [partial(get, bucket) for get in (executables.adjust, executables.logprobs)]
        return programs + [partial(executables.take_hidden, bucket) for bucket in prompts]

    def prepare(self, processor: LogitsProcessor, buckets: list[Bucket]) -> None:
        """Compiles a user's function.

        Raises:
          InvalidFieldError: it fails, or does not give logits.
        """
        for bucket in {bucket.num_rows: bucket for bucket in buckets}.values():
            self._executables.process(processor, bucket, self._num_rows)
            self._executables.take_rows(bucket, self._num_rows)
            self._executables.put_rows(bucket, self._num_rows)

    def start_rows(self, starts: list[RowStart]) -> None:
        """Takes over what sequences that were given a row ask for."""
        for start in starts:
            self._processors.pop(start.row, None)
            params = start.params
            if not params.adjusts_logits:
                continue
            if params.logits_processor is not None:
                self._processors[start.row] = params.logits_processor
            tokens, bias = adjustments_row(
                self.adjustments.tokens.shape[1],
                prompt_token_ids=start.token_ids[: start.num_prompt_tokens],
                output_token_ids=start.token_ids[start.num_prompt_tokens :],
                end_token_ids=start.end_token_ids,
                logit_bias=dict(params.logit_bias),
                allowed_token_ids=params.allowed_token_ids,
            )
            self.adjustments = self._executables.write_row()(
                self.adjustments, np.int32(start.row), tokens, bias
            )

    def draw(
        self,
        plan: StepPlan,
        bucket: Bucket,
        logits: jax.Array,
        state: BatchState,
        words: jax.Array,
        masks: np.ndarray | None,
    ) -> tuple[jax.Array, BatchState]:
        """Draws the plan's tokens.

        Args:
          masks: a row for each token to draw, see `adjust_step`; None when no grammar is at work.

        Returns:
          What `sample_step` gives.
        """
        executables, adjusted = self._executables, logits
        if masks is not None or self._packer.is_adjusted(plan):
            adjusted, self.adjustments = executables.adjust(bucket)(
                logits, self.adjustments, words, self._padded_masks(bucket, masks)
            )
        for processor, idxs in self._rows_of_processors(plan):
            rows, states = executables.take_rows(bucket, self._num_rows)(
                adjusted, self.adjustments, words, idxs
            )
            rows = executables.process(processor, bucket, self._num_rows)(rows, states)
            adjusted = executables.put_rows(bucket, self._num_rows)(adjusted, rows, idxs)
        return executables.sample(bucket, self._packer.variant(plan))(adjusted, state, words)

    def score_chunks(
        self, plan: StepPlan, bucket: Bucket, weights: Any, hidden: jax.Array
    ) -> list[list[jax.Array]]:
        """Packed log-probabilities of the plan's prompt chunks, in slices of a fixed size."""
        return [
            [
                self._score_slice(
                    bucket, weights, hidden, chunk.first_idx + i * MAX_SCORED, token_ids
                )
                for i, token_ids in enumerate(batched(chunk.token_ids, MAX_SCORED))
            ]
            for chunk in plan.prompt_chunks
        ]

    def _score_slice(
        self, bucket: Bucket, weights: Any, hidden: jax.Array, first_idx: int, token_ids: Any
    ) -> jax.Array:
        idxs, padded = np.zeros((2, MAX_SCORED), np.int32)
        idxs[: len(token_ids)] = np.arange(first_idx, first_idx + len(token_ids))
        padded[: len(token_ids)] = token_ids
        taken = self._executables.take_hidden(bucket)(hidden, idxs)
        packed = self._executables.score(bucket)(weights, taken, padded)
        packed.copy_to_host_async()
        return packed

    def _rows_of_processors(self, plan: StepPlan) -> Iterator[tuple[LogitsProcessor, np.ndarray]]:
        """The functions at work in this step, and which of its draws each is for."""
        by_processor: dict[LogitsProcessor, list[int]] = {}
        if self._processors:
            for idx, row in enumerate(plan.sample_rows):
                if row in self._processors:
                    by_processor.setdefault(self._processors[row], []).append(idx)
        for processor, idxs in by_processor.items():
            padding = [idxs[0]] * (self._num_rows - len(idxs))
            yield processor, np.array(idxs + padding, np.int32)

    def _padded_masks(self, bucket: Bucket, masks: np.ndarray | None) -> Any:
        num_words = num_mask_words(self.adjustments.tokens.shape[1])
        if masks is None:
            if bucket.num_rows not in self._no_masks:
                ones = np.full((bucket.num_rows, num_words), -1, np.int32)
                sharding = self.adjustments.tokens.sharding
                self._no_masks[bucket.num_rows] = jax.device_put(ones, sharding)
            return self._no_masks[bucket.num_rows]
        padded = np.full((bucket.num_rows, num_words), -1, np.int32)
        padded[: len(masks)] = masks
        return padded
