"""The scheduler: which sequences compute how many tokens in the next step.

There is one idea and no phases. Every sequence has known tokens, and tokens whose KV is computed;
each step lets `num_computed_tokens` chase `num_total_tokens`. A prompt is far behind and catches up
in chunks; a decoding sequence is one token behind. Prefix hits, preemption (everything must be
computed again) and forks are only different places to start the chase from.

A step is decided in `schedule()` and booked in `commit()`. `schedule()` for step t+1 may run before
`commit()` of step t: the tokens of step t are then pending, known to the device alone.

Policy: decodes first, then prompts under way, then waiting ones in strict order (first come first
served, or by priority): a request too big for the free blocks is not overtaken. Where
they can, the tokens of a step fill a size that steps are compiled for (step_size.py). When no block
is free, the last running sequence in scheduling order is preempted.
"""

from collections import deque
from dataclasses import replace

from jaxpaged.config import SchedulerConfig
from jaxpaged.outputs import PromptScored, SequenceOutput, StepOutputs
from jaxpaged.request import EngineRequest, FinishReason, Request, Sequence, SequenceStatus
from jaxpaged.scheduler.admission import add_chunk, admit_waiting
from jaxpaged.scheduler.beam_group import BeamGroups
from jaxpaged.scheduler.kv_manager import KVManager
from jaxpaged.scheduler.roster import Roster
from jaxpaged.scheduler.scheduled_step import ScheduledStep
from jaxpaged.scheduler.step_size import choose_size
from jaxpaged.step_plan import StepPlan, StepResult


class Scheduler:
    """Decides steps and books their results. Not thread-safe; plain Python."""

    def __init__(self, config: SchedulerConfig):
        if config.num_blocks * config.block_size < config.max_model_len:
            raise ValueError(
                f"num_blocks={config.num_blocks} of block_size={config.block_size} cannot hold one "
                f"sequence of max_model_len={config.max_model_len}"
            )
        if config.max_num_tokens < config.max_num_seqs:
            raise ValueError(
                f"max_num_tokens={config.max_num_tokens} must be at least "
                f"max_num_seqs={config.max_num_seqs}"
            )
        self.config = config
        self.roster = Roster(config)
        self.num_steps = 0
        self._in_flight: deque[ScheduledStep] = deque()
        self._beam_groups = BeamGroups(config, self.roster)

    @property
    def kv(self) -> KVManager:
        return self.roster.kv

    @property
    def has_work(self) -> bool:
        return bool(self.roster.requests)

    # --- requests come and go ------------------------------------------------------------------

    def add(self, source: EngineRequest) -> Request:
        """Queues a request. Its id must be new among those that have not ended."""
        return self.roster.add(source)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends all sequences of a request, in any state; False if it is unknown or has ended."""
        request = self.roster.requests.get(request_id)
        if request is None:
            return False
        self.roster.finish_all(request, reason)
        return True

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Ends one sequence, its stop string found by the front; what it draws later is dropped."""
        request = self.roster.requests.get(request_id)
        for sequence in request.sequences if request else ():
            if sequence.index == index and sequence.status is not SequenceStatus.FINISHED:
                self.roster.finish(sequence, FinishReason.STOP_STRING)
                self.roster.forget_finished()

    def fail_all(self, error: str) -> StepOutputs:
        """After a failed step: every request ends with `error`, pool and cache are empty."""
        num_ended = len(self.roster.outputs.ended)  # aborted before, not failed
        self._in_flight.clear()
        for request in list(self.roster.requests.values()):
            self.roster.finish_all(request, FinishReason.ERROR)
        self.roster.replace_kv()
        outputs = self.roster.take_outputs()
        failed = outputs.ended[num_ended:]
        outputs.ended[num_ended:] = [replace(ended, error=error) for ended in failed]
        return outputs

    # --- schedule ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Decides the next step; None when nothing can be computed before the next commit."""
        roster, config = self.roster, self.config
        step = ScheduledStep(StepPlan(self.num_steps + 1), config.max_num_tokens)
        self._beam_groups.select(step)
        num_preemptions = roster.num_preemptions
        prefilling = self._schedule_decodes(step)
        calm = roster.num_preemptions == num_preemptions
        step.max_num_tokens = choose_size(config, roster, step, prefilling, admits=calm)
        budget = step.max_num_tokens - len(step.scheduled)
        for sequence in prefilling:
            if budget and sequence.status is SequenceStatus.RUNNING:
                budget -= self._schedule_prefill(step, sequence, budget)
        # Blocks that a preemption freed are for those that run: admitting now would thrash.
        calm = roster.num_preemptions == num_preemptions
        if calm and roster.waiting:
            if budget and roster.num_free_rows:
                admit_waiting(config, roster, step)
            self._beam_groups.replace_idle(step)
        if not step.scheduled and not self._in_flight:
            self._beam_groups.make_way(step)
        if not step.scheduled:
            return None
        if step.plan.known_tokens:
            step.settle_updates()
        if roster.num_masked:
            step.plan.has_masks = any(s.request.source.params.grammar for s in step.sampled)
        self.num_steps += 1
        self._in_flight.append(step)
        return step.plan

    def _schedule_decodes(self, step: ScheduledStep) -> list[Sequence]:
        """Gives every sequence that is one token behind, and every beam likewise, that to compute.

        Returns:
          The running sequences that are further behind.
        """
        size, references = self.config.block_size, self.kv.pool.references
        rows, kv_lens, scheduled = step.plan.rows, step.plan.kv_lens, step.scheduled
        prefilling = []
        for sequence in list(self.roster.running):  # a copy: preemption shortens the list
            row = sequence.row
            if row is None:
                continue  # preempted just now
            if not sequence.has_device_token:
                num_missing = len(sequence.token_ids) - sequence.num_scheduled_total
                if num_missing != 1 or not sequence.request.is_beam_search:
                    if num_missing:
                        prefilling.append(sequence)
                    continue
            position = sequence.num_computed_tokens + sequence.num_inflight_tokens
            if position + 1 >= sequence.max_total_tokens:
                continue  # the pending token is its last
            table, block_idx = sequence.block_table, position // size
            if (
                block_idx == len(table) or references[table[block_idx]] > 1
            ) and not self._make_writable(step, sequence, block_idx):
                continue
            if not sequence.has_device_token:  # a beam's token is chosen here
                step.plan.known_tokens[len(rows)] = sequence.token_ids[-1]
            sequence.num_inflight_tokens += 1
            sequence.num_pending_tokens += 1
            scheduled.append(sequence)
            rows.append(row)
            kv_lens.append(position + 1)
        step.close_decodes()
        return prefilling

    def _make_writable(self, step: ScheduledStep, sequence: Sequence, block_idx: int) -> bool:
        """Sees to it that a block is in the sequence's table, and in no other table."""
        kv, table = self.kv, sequence.block_table
        while True:
            if block_idx == len(table):
                if kv.grow(sequence, (block_idx + 1) * self.config.block_size):
                    break
            elif not kv.is_shared(table[block_idx]):
                return True
            elif (copy := kv.copy_on_write(sequence, block_idx)) is not None:
                step.plan.copies.append(copy)
                break
            # The end may be found when its pending token arrives: never preempt for that one.
            if sequence.num_pending_tokens or not self._preempt_last(step, sequence):
                return False
        step.update_table(sequence, (block_idx,))
        return True

    def _schedule_prefill(self, step: ScheduledStep, sequence: Sequence, budget: int) -> int:
        """Schedules the next chunk of a running sequence; returns its number of tokens."""
        done, num_blocks = sequence.num_scheduled_total, len(sequence.block_table)
        chunk = min(len(sequence.token_ids) - done, budget)
        while not self.kv.grow(sequence, done + chunk):
            if sequence is self.roster.running[-1] or not self._preempt_last(step, sequence):
                room = (num_blocks + self.kv.pool.num_free) * self.config.block_size
                chunk = min(chunk, room - done)
                if chunk <= 0:
                    return 0
        step.update_table(sequence, range(num_blocks, len(sequence.block_table)))
        add_chunk(self.config, self.roster, step, sequence, chunk)
        return chunk

    def _preempt_last(self, step: ScheduledStep, sequence: Sequence) -> bool:
        """Preempts the last running sequence; False if that gives `sequence` nothing."""
        victim = self.roster.running[-1]
        if any(victim is other for other in step.scheduled):
            return False
        for earlier in self._in_flight:
            earlier.preempted.add(id(victim))
        self.roster.preempt(victim)
        return victim is not sequence

    # --- commit --------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Books the oldest scheduled step: tokens, ends, full blocks.

        Returns:
          What is to be told, aborts and starts since the last commit included.
        """
        step = self._in_flight.popleft()
        assert step.plan is plan, "steps are committed in the order in which they were scheduled"
        kv, size, preempted = self.kv, self.config.block_size, step.preempted
        kv.finish_copies(plan.copies)
        for sequence, q_len in zip(step.scheduled, step.q_lens, strict=True):
            if sequence.row is None or (preempted and id(sequence) in preempted):
                continue  # its blocks are gone
            sequence.num_inflight_tokens -= q_len
            sequence.num_computed_tokens += q_len
            if q_len > 1 or sequence.num_computed_tokens % size == 0:
                kv.publish(sequence)
        self._tell_scores(step, result)
        ended = self._end_complete(step)
        for i, sequence in enumerate(step.sampled):
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.num_pending_tokens -= 1
                ended |= self._book_token(sequence, result, i)
        if ended:
            self.roster.forget_finished()
        return self.roster.take_outputs()

    def sequences_drawing(self, plan: StepPlan) -> list[Sequence]:
        """Whose tokens a plan not yet committed draws, in its order."""
        return next(step.sampled for step in self._in_flight if step.plan is plan)

    def _tell_scores(self, step: ScheduledStep, result: StepResult) -> None:
        chunks = zip(step.scored, step.plan.prompt_chunks, result.prompt_logprobs, strict=True)
        for (sequence, first), chunk, logprobs in chunks:
            if sequence.status is not SequenceStatus.FINISHED:
                request_id, count = sequence.request.request_id, len(chunk.token_ids)
                scored = PromptScored(request_id, first, count, logprobs)
                self.roster.outputs.scored.append(scored)

    def _end_complete(self, step: ScheduledStep) -> bool:
        """Ends the sequences of which only the prompt was wanted; returns whether there are any."""
        if len(step.scheduled) == len(step.sampled):
            return False
        complete = [
            s
            for s in step.scheduled
            if s.status is SequenceStatus.RUNNING
            and s.is_complete
            and s.num_computed_tokens == len(s.token_ids)
        ]
        for sequence in complete:
            self.roster.tell_and_finish(sequence, FinishReason.MAX_TOKENS)
        return bool(complete)

    def _book_token(self, sequence: Sequence, result: StepResult, at: int) -> bool:
        """Appends the token drawn at index `at`; returns whether it ended the sequence."""
        if sequence.request.is_beam_search:
            return self._beam_groups.book(sequence, result, at)
        source, token_id = sequence.request.source, result.token_ids[at]
        output = SequenceOutput(source.request_id, sequence.index, (token_id,))
        self.roster.outputs.sequences.append(output)
        if result.logprobs is not None:
            output.logprobs = result.logprobs[at]
        if not result.is_finite[at]:
            output.token_ids, output.logprobs = (), b""
            output.finish_reason = FinishReason.ERROR
            self.kv.unpublish(sequence)
        else:
            sequence.token_ids.append(token_id)
            if token_id in sequence.end_token_ids:
                is_eos = token_id in source.eos_token_ids
                output.finish_reason = FinishReason.EOS if is_eos else FinishReason.STOP_TOKEN
                output.stop_token_id = token_id
            elif len(sequence.token_ids) >= sequence.max_total_tokens:
                at_limit = sequence.num_output_tokens >= source.params.max_tokens
                output.finish_reason = (
                    FinishReason.MAX_TOKENS if at_limit else FinishReason.CONTEXT_LENGTH
                )
            else:
                return False
        self.roster.finish(sequence, output.finish_reason)
        return True

    def take_outputs(self) -> StepOutputs:
        """What happened since the last commit, without one."""
        return self.roster.take_outputs()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every invariant of rows and blocks holds."""
        self.roster.check_integrity()
