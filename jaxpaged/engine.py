"""The engine: requests of token ids in, tokens out. `Engine.step()` is the main loop.

    schedule -> dispatch -> collect -> commit

In the overlapped loop, step t+1 is scheduled and dispatched before the tokens of step t are
collected, so that the device never waits for the host. Both loops give the same tokens.
"""

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxpaged import frozen_heap
from jaxpaged.checkpoint.locate import home_folder, locate
from jaxpaged.checkpoint.protocol import Checkpoint
from jaxpaged.config import EngineConfig, ResolvedConfig, SchedulerConfig
from jaxpaged.errors import UnsupportedOptionError
from jaxpaged.outputs import BlockState, EngineStats, StepOutputs
from jaxpaged.request import EngineRequest, SequenceStatus
from jaxpaged.runner.start import start_runner
from jaxpaged.scheduler.pool_stats import block_states, used_slots
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.step_plan import StepPlan, StepResult

if TYPE_CHECKING:
    from jaxpaged.grammar import MaskMaker, Vocabulary

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What the engine needs of a runner; only the runner looks into its handles."""

    @property
    def num_compiles_after_warmup(self) -> int: ...

    @property
    def step_sizes(self) -> tuple[int, ...]: ...

    def dispatch(self, plan: StepPlan) -> Any: ...

    def draw(self, handle: Any, masks: Any) -> None: ...

    def collect(self, handle: Any) -> StepResult: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ProcessorRunner(Protocol):
    """A runner that lets users' functions change logits."""

    def prepare(self, processor: Any) -> None: ...


@runtime_checkable
class WeightsRunner(Protocol):
    """A runner whose weights can be replaced while it runs."""

    def load_weights(self, checkpoint: Checkpoint) -> Any: ...

    def replace_weights(self, weights: Any) -> None: ...


class Engine:
    """Scheduler and runner, driven one step at a time by one thread."""

    def __init__(
        self, config: ResolvedConfig, runner: StepRunner, vocabulary: "Vocabulary | None" = None
    ):
        """Without a vocabulary no request may have a grammar."""
        self.config = config
        self.vocabulary = vocabulary and vocabulary.resized(config.vocab_size)
        self._mask_maker = self.vocabulary and _mask_maker(self.vocabulary)
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_tokens=config.max_num_tokens,
                max_model_len=config.max_model_len,
                enable_prefix_caching=config.enable_prefix_caching,
                step_sizes=runner.step_sizes,
            )
        )
        self._in_flight: tuple[StepPlan, Any] | None = None
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0
        self._num_looked_up_tokens = 0
        self._num_completion_tokens = 0
        self._step_s = 0.0
        self._is_frozen = False
        self._checks_integrity = os.environ.get("JAXPAGED_DEBUG") == "1"

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        checkpoint: Checkpoint,
        cache_home: Path,
        vocabulary: "Vocabulary | None" = None,
    ) -> "Engine":
        """Loads the model and compiles; see `runner.start.start_runner`."""
        runner = start_runner(config, checkpoint, cache_home)
        engine = cls(runner.config, runner, vocabulary)
        frozen_heap.freeze()
        engine._is_frozen = True
        return engine

    # --- the main loop -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def step(self) -> StepOutputs:
        """Runs one step; returns what the step committed in it has to tell.

        A step that fails takes the requests that run with it; the engine goes on.
        """
        start = time.monotonic()
        try:
            outputs = self._step_overlapped() if self.config.overlap else self._step_plain()
        except Exception as error:
            logger.exception("a step failed; the requests that ran are lost, the pool is rebuilt")
            outputs = self._recover(error)
        if self._checks_integrity:
            self.scheduler.check_integrity()
        self._count(outputs)
        self._step_s += time.monotonic() - start
        return outputs

    def _step_plain(self) -> StepOutputs:
        plan = self.scheduler.schedule()
        if plan is None:
            return self.scheduler.take_outputs()
        handle = self.runner.dispatch(plan)
        self._draw_masked(plan, handle)
        return self.scheduler.commit(plan, self.runner.collect(handle))

    def _step_overlapped(self) -> StepOutputs:
        plan = self.scheduler.schedule()
        dispatched = None if plan is None else (plan, self.runner.dispatch(plan))
        earlier, self._in_flight = self._in_flight, dispatched
        if earlier is None:
            outputs = self.scheduler.take_outputs()
        else:
            earlier_plan, handle = earlier
            outputs = self.scheduler.commit(earlier_plan, self.runner.collect(handle))
        if dispatched is not None:
            self._draw_masked(*dispatched)
        return outputs

    def _draw_masked(self, plan: StepPlan, handle: Any) -> None:
        """Draws what waits for masks, which depend on the tokens committed until now.

        They are computed while the device runs the step.
        """
        if plan.has_masks:
            assert self._mask_maker is not None
            masks = self._mask_maker.masks(self.scheduler.sequences_drawing(plan))
            self.runner.draw(handle, masks)

    def _recover(self, error: Exception) -> StepOutputs:
        # A failed step may have consumed the pool: nothing in it can be trusted.
        self._in_flight = None
        self.runner.reset()
        return self.scheduler.fail_all(f"a step of the engine failed: {type(error).__name__}")

    def _count(self, outputs: StepOutputs) -> None:
        for started in outputs.started:
            self._num_cached_prompt_tokens += started.num_cached_tokens
            self._num_prompt_tokens += started.num_prompt_tokens
            self._num_looked_up_tokens += started.num_looked_up_tokens
        self._num_completion_tokens += sum(len(s.token_ids) for s in outputs.sequences)

    # --- between steps -------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        queued = self.scheduler.add(request)
        if self._mask_maker is not None:
            self._mask_maker.start(queued)

    def prepare(self, processor: Any) -> None:
        """Compiles a user's function before a request comes that uses it; in any thread.

        Raises:
          InvalidFieldError: it fails, or does not give logits.
        """
        if not isinstance(self.runner, ProcessorRunner):
            raise UnsupportedOptionError("logits_processor", "this runner takes no functions")
        self.runner.prepare(processor)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state and frees its blocks; False if it is unknown."""
        return self.scheduler.abort(request_id)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Ends one sequence whose stop string the front found."""
        self.scheduler.finish_sequence(request_id, index)

    def reset_prefix_cache(self) -> int:
        """Forgets every unused cached block; returns how many."""
        return self.scheduler.kv.reset_cache()

    def update_weights(self, checkpoint_path: str) -> None:
        """Takes other weights of the same structure; what runs is aborted, the cache is emptied.

        Both sets are on the device for a moment. When loading fails, nothing has changed.

        Raises:
          JaxpagedError: the checkpoint cannot be loaded, or is of another structure.
        """
        runner = self.runner
        if not isinstance(runner, WeightsRunner):
            raise UnsupportedOptionError("checkpoint_path", "this runner's weights are fixed")
        weights = runner.load_weights(locate(checkpoint_path))
        for request_id in list(self.scheduler.roster.requests):
            self.scheduler.abort(request_id)
        if self._in_flight is not None:  # it still reads the weights that are about to go
            plan, handle = self._in_flight
            self._in_flight = None
            self.scheduler.roster.outputs = self.scheduler.commit(plan, self.runner.collect(handle))
        runner.replace_weights(weights)
        self.scheduler.kv.reset_cache()

    def stats(self) -> EngineStats:
        roster, pool = self.scheduler.roster, self.scheduler.kv.pool
        num_running = sum(
            any(s.status is SequenceStatus.RUNNING for s in request.sequences)
            for request in roster.requests.values()
        )
        return EngineStats(
            running_requests=num_running,
            queued_requests=len(roster.requests) - num_running,
            total_blocks=pool.num_blocks,
            used_blocks=pool.num_used,
            cached_free_blocks=pool.num_cached_free,
            used_slots=sum(used_slots(roster, self.config.block_size).values()),
            block_size=self.config.block_size,
            steps=self.scheduler.num_steps,
            preemptions=roster.num_preemptions,
            compiles_after_warmup=self.runner.num_compiles_after_warmup,
            prompt_tokens=self._num_prompt_tokens,
            cached_prompt_tokens=self._num_cached_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            step_s=self._step_s,
            looked_up_tokens=self._num_looked_up_tokens,
        )

    def block_states(self) -> list[BlockState]:
        """Every block of the pool, by id."""
        return block_states(self.scheduler.roster, self.config.block_size)

    def close(self) -> None:
        """Frees the device's memory."""
        self._in_flight = None
        self.runner.close()
        if self._is_frozen:
            frozen_heap.unfreeze()
            self._is_frozen = False


def _mask_maker(vocabulary: "Vocabulary") -> "MaskMaker":
    # why here: without grammars an engine does not need llguidance
    from jaxpaged.grammar import MaskMaker

    return MaskMaker(vocabulary)


def load_engine(config: EngineConfig, vocabulary: "Vocabulary | None" = None) -> Engine:
    """An engine for the model that `config` names, ready to run.

    Raises:
      JaxpagedError: the model cannot be loaded, or does not fit as configured.
    """
    checkpoint = locate(config.model, config.load_format)
    return Engine.start(config, checkpoint, home_folder(), vocabulary)
