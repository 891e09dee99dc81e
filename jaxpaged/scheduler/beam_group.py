"""The beams of one request as sequences: which fork, which go, and what is told at the end.

The search decides (beam_search.py); here its decisions become forks, frees and tokens. A beam's
token is chosen when all beams of its request have told their candidates, so beams draw nothing
ahead: between a commit and the next selection a beam waits, with its blocks and its row. It loses
both where another beam of its search, or all others, would wait for them.
"""

from jaxpaged.config import SchedulerConfig
from jaxpaged.logprobs import unpack_best
from jaxpaged.outputs import SequenceOutput
from jaxpaged.request import FinishReason, Request, Sequence, SequenceStatus
from jaxpaged.scheduler.admission import admit_waiting
from jaxpaged.scheduler.beam_search import BeamSearch, Candidate
from jaxpaged.scheduler.roster import Roster
from jaxpaged.scheduler.scheduled_step import ScheduledStep
from jaxpaged.step_plan import StepResult


class BeamGroups:
    """All searches under way."""

    def __init__(self, config: SchedulerConfig, roster: Roster):
        self._config = config
        self._roster = roster
        self._ready: list[BeamGroup] = []

    def book(self, sequence: Sequence, result: StepResult, at: int) -> bool:
        """Keeps what a beam may continue with; returns whether its request ended."""
        request, roster = sequence.request, self._roster
        if not result.is_finite[at]:
            roster.kv.unpublish(sequence)
            error = SequenceOutput(request.request_id, 0, (), FinishReason.ERROR)
            roster.outputs.sequences.append(error)
            roster.finish_all(request, FinishReason.ERROR)
            return True
        if request.beams is None:
            request.beams = BeamGroup(request, self._config.max_model_len)
        assert result.logprobs is not None
        if request.beams.book(sequence, result.logprobs[at]):
            self._ready.append(request.beams)
        return False

    def select(self, step: ScheduledStep) -> None:
        """Chooses the tokens of searches whose beams have all told their candidates."""
        ready, self._ready = self._ready, []
        for group in ready:
            if group.is_live:  # not aborted since
                group.select(self._roster, step)
                self._roster.forget_finished()

    def replace_idle(self, step: ScheduledStep) -> None:
        """Lets a waiting beam run in the place of one that waits for it.

        One a step: what else waits may need only the row that this one had.
        """
        running = self._roster.running
        idle = next(
            (s for s in reversed(running) if s.awaits_selection and _waits_for_row(s)), None
        )
        if idle is not None:
            self._roster.preempt(idle)
            admit_waiting(self._config, self._roster, step)

    def make_way(self, step: ScheduledStep) -> None:
        """Lets a waiting sequence run where all that run are beams that wait for others."""
        roster = self._roster
        while roster.waiting and roster.running and not step.scheduled:
            roster.preempt(roster.running[-1])
            admit_waiting(self._config, roster, step)


def _waits_for_row(beam: Sequence) -> bool:
    """Whether another beam of its search has no row, and has told no candidates."""
    return any(
        other.status is SequenceStatus.WAITING
        and not (other.awaits_selection or other.num_pending_tokens)
        for other in beam.request.sequences
    )


class BeamGroup:
    """One request's search and its sequences."""

    def __init__(self, request: Request, max_model_len: int):
        source = request.source
        params, num_prompt = source.params, len(source.prompt_token_ids)
        assert params.beam is not None
        room = max_model_len - num_prompt
        self._request = request
        self._at_limit = (
            FinishReason.MAX_TOKENS if params.max_tokens <= room else FinishReason.CONTEXT_LENGTH
        )
        self._search = BeamSearch(
            beam_width=params.n,
            length_penalty=params.beam.length_penalty,
            max_tokens=min(params.max_tokens, room),
            end_token_ids=source.end_token_ids,
        )
        self._max_model_len = max_model_len
        self._beams = list(request.sequences)
        self._candidates: dict[int, list[Candidate]] = {}  # by the sequence's index
        # Summed over the selections; without sharing they would be equal.
        self._num_held_blocks = self._num_table_entries = 0

    @property
    def is_live(self) -> bool:
        return self._request.num_unfinished > 0

    def book(self, sequence: Sequence, logprobs: bytes) -> bool:
        """Takes a beam's candidates; returns whether a selection can follow."""
        self._candidates[sequence.index] = unpack_best(logprobs)
        sequence.awaits_selection = True
        return len(self._candidates) == len(self._beams)

    def select(self, roster: Roster, step: ScheduledStep) -> None:
        """Grows, forks and drops beams; the last selection ends the request."""
        self._count_blocks()
        parents = self._beams
        chosen = self._search.advance([self._candidates[s.index] for s in parents])
        self._candidates = {}
        if not chosen:
            self._end(roster)
            return
        for at in set(range(len(parents))) - {beam.parent for beam in chosen}:
            roster.drop(parents[at])
        self._beams, continued = [], set()
        for beam in chosen:
            parent = parents[beam.parent]
            is_fork = beam.parent in continued
            self._beams.append(self._fork(roster, step, parent) if is_fork else parent)
            continued.add(beam.parent)
        for sequence, beam in zip(self._beams, chosen, strict=True):
            # Only now: what forked shares the tokens before it.
            sequence.token_ids.append(beam.token_ids[-1])
            sequence.awaits_selection = False

    def _fork(self, roster: Roster, step: ScheduledStep, parent: Sequence) -> Sequence:
        child = self._request.new_sequence(self._max_model_len)
        child.token_ids = list(parent.token_ids)
        if parent.status is SequenceStatus.RUNNING and roster.num_free_rows:
            roster.kv.fork(parent, child)
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_cached_tokens = parent.num_cached_tokens
            roster.start(child)
            step.start_row(child)
        else:
            roster.waiting.push(child)  # without blocks; it finds what is cached
        return child

    def _end(self, roster: Roster) -> None:
        request, eos = self._request, self._request.source.eos_token_ids
        for index, hypothesis in enumerate(self._search.best()):
            reason, ended_by = self._at_limit, hypothesis.ended_by
            if ended_by is not None:
                reason = FinishReason.EOS if ended_by in eos else FinishReason.STOP_TOKEN
            output = SequenceOutput(request.request_id, index, hypothesis.token_ids, reason)
            output.stop_token_id = ended_by
            output.cumulative_logprob = hypothesis.cumulative_logprob
            roster.outputs.sequences.append(output)
        if self._num_table_entries:
            request.block_saving = 1 - self._num_held_blocks / self._num_table_entries
        for sequence in list(request.sequences):
            roster.finish(sequence, FinishReason.MAX_TOKENS)

    def _count_blocks(self) -> None:
        tables = [sequence.block_table for sequence in self._beams]
        self._num_held_blocks += len({block for table in tables for block in table})
        self._num_table_entries += sum(map(len, tables))
