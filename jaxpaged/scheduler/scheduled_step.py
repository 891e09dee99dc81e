"""A step between its schedule and its commit: the plan, and whom it concerns."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxpaged.request import Sequence
from jaxpaged.step_plan import RowStart, StepPlan


@dataclass(slots=True)
class ScheduledStep:
    """The plan speaks of rows; this remembers the sequences behind them.

    Attributes:
      scheduled: sequences that compute tokens, forked children included.
      q_lens: how many each computes (a child: as many as its parent).
      sampled: sequences that draw a token, in the order of `plan.sample_rows`.
      preempted: ids of sequences whose blocks were taken after this step was scheduled.
    """

    plan: StepPlan
    scheduled: list[Sequence] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    preempted: set[int] = field(default_factory=set)

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
        params = sequence.request.source.params
        self.plan.starts.append(
            RowStart(
                row=row_of(sequence),
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=sequence.seed,
            )
        )
        self.update_table(sequence, range(len(sequence.block_table)))

    def update_table(self, sequence: Sequence, block_idxs: Iterable[int]) -> None:
        row, table = row_of(sequence), sequence.block_table
        self.plan.table_updates.extend((row, i, table[i]) for i in block_idxs)

    def add_chunk(self, sequence: Sequence, chunk: int) -> None:
        """The sequence computes its next `chunk` known tokens, and draws one after the last."""
        plan, done = self.plan, sequence.num_scheduled_total
        plan.rows.append(row_of(sequence))
        plan.q_lens.append(chunk)
        plan.kv_lens.append(done + chunk)
        plan.token_ids.extend(sequence.token_ids[done : done + chunk])
        self._book(sequence, chunk, is_last=done + chunk == len(sequence.token_ids))

    def add_fork(self, child: Sequence, chunk: int) -> None:
        """The child draws from the logits of the chunk added last, which it shares."""
        self._book(child, chunk, is_last=True)

    def _book(self, sequence: Sequence, chunk: int, *, is_last: bool) -> None:
        self.scheduled.append(sequence)
        self.q_lens.append(chunk)
        sequence.num_inflight_tokens += chunk
        if is_last:
            self.plan.sample_sources.append(len(self.plan.rows) - 1)
            self.plan.sample_rows.append(row_of(sequence))
            self.sampled.append(sequence)
            sequence.num_pending_tokens += 1
            sequence.has_device_token = True


def row_of(sequence: Sequence) -> int:
    assert sequence.row is not None, "only a running sequence has a row"
    return sequence.row
