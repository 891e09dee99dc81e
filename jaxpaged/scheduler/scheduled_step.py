"""A step between its schedule and its commit: the plan, and whom it concerns."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxpaged.request import Sequence
from jaxpaged.scheduler.kv_manager import PrefixMatch
from jaxpaged.step_plan import PromptChunk, RowStart, StepPlan


@dataclass(slots=True)
class ScheduledStep:
    """The plan speaks of rows; this remembers the sequences behind them.

    Attributes:
      max_num_tokens: tokens that it may have in all.
      scheduled: sequences that compute tokens, forked children included.
      q_lens: how many each computes (a child: as many as its parent).
      sampled: sequences that draw a token, in the order of `plan.sample_rows`.
      scored: whose prompt each of `plan.prompt_chunks` is from, and where in it the chunk begins.
      matches: cached prefixes looked up while it was scheduled; some may be evicted since.
      preempted: ids of sequences whose blocks were taken after this step was scheduled.
      started_rows: those in `plan.starts`.
    """

    plan: StepPlan
    max_num_tokens: int
    scheduled: list[Sequence] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    matches: dict[Sequence, PrefixMatch] = field(default_factory=dict)
    preempted: set[int] = field(default_factory=set)
    started_rows: set[int] = field(default_factory=set)

    def close_decodes(self) -> None:
        """Completes the lists once all decode rows are in `plan.rows` and `scheduled`."""
        plan, num_rows = self.plan, len(self.plan.rows)
        plan.num_decode_rows = num_rows
        plan.q_lens = [1] * num_rows
        plan.sample_sources = list(range(num_rows))
        plan.sample_rows = plan.rows.copy()
        self.q_lens = [1] * num_rows
        self.sampled = self.scheduled.copy()

    def start_row(self, sequence: Sequence) -> None:
        """The sequence took a row and has its first blocks."""
        params, row = sequence.request.source.params, row_of(sequence)
        if row in self.started_rows:
            # A beam that forked in this step was preempted before it computed anything.
            self.plan.starts = [start for start in self.plan.starts if start.row != row]
            self.plan.table_updates = [u for u in self.plan.table_updates if u[0] != row]
        self.started_rows.add(row)
        start = RowStart(row, params, sequence.seed)
        if params.adjusts_logits:
            start = replace(
                start,
                num_prompt_tokens=sequence.num_prompt_tokens,
                token_ids=tuple(sequence.token_ids),
                end_token_ids=sequence.end_token_ids,
            )
        self.plan.starts.append(start)
        self.update_table(sequence, range(len(sequence.block_table)))

    def update_table(self, sequence: Sequence, block_idxs: Iterable[int]) -> None:
        row, table = row_of(sequence), sequence.block_table
        self.plan.table_updates.extend((row, i, table[i]) for i in block_idxs)

    def settle_updates(self) -> None:
        """Keeps the last update of each place: a beam that just forked may copy a block at once."""
        last = {(row, idx): block for row, idx, block in self.plan.table_updates}
        self.plan.table_updates = [(row, idx, block) for (row, idx), block in last.items()]

    def add_chunk(self, sequence: Sequence, chunk: int) -> None:
        """The sequence computes its next `chunk` known tokens, and draws one after the last."""
        plan, done = self.plan, sequence.num_scheduled_total
        if sequence.needs_scores:
            self._add_prompt_chunk(sequence, done, done + chunk)
        plan.rows.append(row_of(sequence))
        plan.q_lens.append(chunk)
        plan.kv_lens.append(done + chunk)
        plan.token_ids.extend(sequence.token_ids[done : done + chunk])
        self._book(sequence, chunk, is_last=done + chunk == len(sequence.token_ids))

    def add_fork(self, child: Sequence, chunk: int) -> None:
        """The child draws from the logits of the chunk added last, which it shares."""
        self._book(child, chunk, is_last=True)

    def _add_prompt_chunk(self, sequence: Sequence, start: int, stop: int) -> None:
        """Wants the log-probabilities of the prompt tokens that follow those at start to stop."""
        first, last = sequence.next_scored_idx, min(stop, sequence.num_prompt_tokens - 1)
        if first > last:
            return  # computed before a preemption
        num_best = sequence.request.source.params.prompt_logprobs
        assert num_best is not None
        token_ids = tuple(sequence.token_ids[first : last + 1])
        first_idx = self.plan.num_tokens + first - 1 - start
        self.plan.prompt_chunks.append(PromptChunk(first_idx, token_ids, num_best))
        self.scored.append((sequence, first))
        sequence.next_scored_idx = last + 1

    def _book(self, sequence: Sequence, chunk: int, *, is_last: bool) -> None:
        self.scheduled.append(sequence)
        self.q_lens.append(chunk)
        sequence.num_inflight_tokens += chunk
        if is_last and not sequence.is_complete:
            self.plan.sample_sources.append(len(self.plan.rows) - 1)
            self.plan.sample_rows.append(row_of(sequence))
            self.sampled.append(sequence)
            sequence.num_pending_tokens += 1
            # A beam's next token is chosen later, and not by its row.
            sequence.has_device_token = not sequence.request.is_beam_search


def row_of(sequence: Sequence) -> int:
    assert sequence.row is not None, "only a running sequence has a row"
    return sequence.row
