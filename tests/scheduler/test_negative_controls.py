"""The random operations find each of these faults: without that, their green would mean nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.fake_runner import FakeRunner
from helpers.scheduler_world import random_world

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Sequence
from jaxpaged.scheduler import admission, scheduler, step_size
from jaxpaged.scheduler.beam_group import BeamGroup, BeamGroups
from jaxpaged.scheduler.kv_manager import KVManager, PrefixMatch
from jaxpaged.scheduler.prefix_cache import PrefixCache
from jaxpaged.scheduler.roster import Roster
from jaxpaged.scheduler.scheduled_step import ScheduledStep
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.step_plan import StepPlan, StepResult

MAX_WORLDS = 120

_match = KVManager.match
_release = KVManager._release
_add_chunk = admission.add_chunk
_num_tokens_wanted = admission.num_tokens_wanted
_commit = Scheduler.commit
_book_token = Scheduler._book_token
_preempt = Roster.preempt
_schedule = Scheduler.schedule
_start_row = ScheduledStep.start_row
_select = BeamGroup.select


def skip_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeRunner, "_copy", lambda self, plan: None)


def never_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVManager, "is_shared", lambda self, block: False)


def publish_at_allocation(patch: pytest.MonkeyPatch) -> None:
    def add_chunk(
        config: SchedulerConfig, roster: Roster, step: ScheduledStep, sequence: Sequence, chunk: int
    ) -> None:
        _add_chunk(config, roster, step, sequence, chunk)
        computed, sequence.num_computed_tokens = (
            sequence.num_computed_tokens,
            sequence.num_scheduled_total,
        )
        roster.kv.publish(sequence)
        sequence.num_computed_tokens = computed

    patch.setattr(admission, "add_chunk", add_chunk)
    patch.setattr(scheduler, "add_chunk", add_chunk)


def drop_a_release(patch: pytest.MonkeyPatch) -> None:
    def release(self: KVManager, block: int) -> None:
        if block != 3:
            _release(self, block)

    patch.setattr(KVManager, "_release", release)


def copy_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    def match(self: KVManager, sequence: Sequence) -> PrefixMatch:
        found = _match(self, sequence)
        cached = len(found.blocks) * self.block_size + found.num_copied
        room = found.num_copied < self.block_size and cached + 1 < len(sequence.token_ids)
        return replace(found, num_copied=found.num_copied + (found.num_copied > 0 and room))

    patch.setattr(KVManager, "match", match)


def keys_without_the_parent(patch: pytest.MonkeyPatch) -> None:
    def lookup(self: PrefixCache, parent: object, tokens: tuple[int, ...]):
        found = [block for (_, known), block in self._blocks.items() if known == tokens]
        return (found[0], self._entries[found[0]].identity) if found else None

    patch.setattr(PrefixCache, "lookup", lookup)


def book_steps_of_preempted_sequences(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Scheduler, plan, result):
        self._in_flight[0].preempted.clear()
        return _commit(self, plan, result)

    patch.setattr(Scheduler, "commit", commit)


def forget_output_on_preemption(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: Roster, sequence: Sequence) -> None:
        del sequence.token_ids[sequence.num_prompt_tokens :]
        _preempt(self, sequence)

    patch.setattr(Roster, "preempt", preempt)


def evict_without_forgetting(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: KVManager) -> int | None:
        taken = self.pool.allocate()
        return None if taken is None else taken[0]

    patch.setattr(KVManager, "_allocate", allocate)


def end_at_no_stop_token(patch: pytest.MonkeyPatch) -> None:
    def book_token(self: Scheduler, sequence: Sequence, result: StepResult, at: int) -> bool:
        if result.token_ids[at] in sequence.end_token_ids:
            sequence.token_ids.append(result.token_ids[at])
            return False
        return _book_token(self, sequence, result, at)

    patch.setattr(Scheduler, "_book_token", book_token)


def beams_compute_the_token_of_their_row(patch: pytest.MonkeyPatch) -> None:
    def schedule(self: Scheduler) -> StepPlan | None:
        plan = _schedule(self)
        if plan is not None:
            plan.known_tokens.clear()
        return plan

    patch.setattr(Scheduler, "schedule", schedule)


def start_no_row_of_a_forked_beam(patch: pytest.MonkeyPatch) -> None:
    def start_row(self: ScheduledStep, sequence: Sequence) -> None:
        if not (sequence.request.is_beam_search and sequence.index):
            _start_row(self, sequence)

    patch.setattr(ScheduledStep, "start_row", start_row)


def lose_the_candidates_of_preempted_beams(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: Roster, sequence: Sequence) -> None:
        if isinstance(sequence.request.beams, BeamGroup):
            sequence.request.beams._candidates.pop(sequence.index, None)
        _preempt(self, sequence)

    patch.setattr(Roster, "preempt", preempt)


def swap_the_candidates_of_two_beams(patch: pytest.MonkeyPatch) -> None:
    def select(self: BeamGroup, roster: Roster, step: ScheduledStep) -> None:
        told = self._candidates
        self._candidates = dict(zip(told, reversed(told.values()), strict=True))
        _select(self, roster, step)

    patch.setattr(BeamGroup, "select", select)


def beams_never_make_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BeamGroups, "make_way", lambda self, step: None)
    patch.setattr(BeamGroups, "replace_idle", lambda self, step: None)


def score_what_the_cache_has(patch: pytest.MonkeyPatch) -> None:
    def reads_cache(self: KVManager, sequence: Sequence) -> bool:
        return self._enable_prefix_caching and sequence.request.source.params.use_prefix_cache

    patch.setattr(KVManager, "reads_cache", reads_cache)


def score_again_after_preemption(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: Roster, sequence: Sequence) -> None:
        sequence.next_scored_idx = 1
        _preempt(self, sequence)

    patch.setattr(Roster, "preempt", preempt)


def leave_prompts_no_tokens(patch: pytest.MonkeyPatch) -> None:
    def choose_size(
        config: SchedulerConfig, roster: Roster, step: ScheduledStep, *args: object, **options: bool
    ) -> int:
        return len(step.scheduled) if config.step_sizes else config.max_num_tokens

    patch.setattr(scheduler, "choose_size", choose_size)


def exceed_the_largest_size(patch: pytest.MonkeyPatch) -> None:
    def choose_size(config: SchedulerConfig, *args: object, **options: bool) -> int:
        return config.max_num_tokens

    patch.setattr(scheduler, "choose_size", choose_size)


def lose_those_counted_for_the_size(patch: pytest.MonkeyPatch) -> None:
    def num_tokens_wanted(
        config: SchedulerConfig, roster: Roster, step: ScheduledStep, limit: int
    ) -> int:
        wanted = _num_tokens_wanted(config, roster, step, limit)
        if wanted > limit:
            roster.waiting.pop()
        return wanted

    patch.setattr(step_size, "num_tokens_wanted", num_tokens_wanted)


def use_matches_that_were_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVManager, "is_cached", lambda self, match: True)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    skip_copies,
    never_copy_on_write,
    publish_at_allocation,
    drop_a_release,
    copy_one_token_too_many,
    keys_without_the_parent,
    book_steps_of_preempted_sequences,
    forget_output_on_preemption,
    evict_without_forgetting,
    end_at_no_stop_token,
    beams_compute_the_token_of_their_row,
    start_no_row_of_a_forked_beam,
    lose_the_candidates_of_preempted_beams,
    swap_the_candidates_of_two_beams,
    beams_never_make_way,
    score_what_the_cache_has,
    score_again_after_preemption,
    leave_prompts_no_tokens,
    exceed_the_largest_size,
    lose_those_counted_for_the_size,
    use_matches_that_were_evicted,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(MAX_WORLDS):
            random_world(seed)
