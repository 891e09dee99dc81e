"""What the scheduler decided for one step, and what the runner answers.

The only place where scheduler and runner meet. A plan carries what changed since the plan before:
the runner keeps each row's block table and sampling options on its side.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence takes a row: the sampling options to keep for it there."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(slots=True)
class StepPlan:
    """One step. The scheduled rows come in batch order, decode rows first.

    Attributes:
      step_id: 1, 2, 3, ...; plans are committed in this order.
      starts: rows taken by a sequence since the plan before, forked ones included.
      table_updates: (row, position in its block table, block id) entries to write first.
      copies: (source, destination) block ids, copied before anything is computed; a destination
        is never a source of the same plan.
      num_decode_rows: leading rows that compute one token, the one their device slot holds.
      rows: the row of each scheduled sequence.
      q_lens: tokens each computes in this step.
      kv_lens: valid KV tokens of each after this step's write.
      token_ids: the tokens of the rows after the decode rows, joined.
      sample_sources: per token to draw, the index into `rows` whose last position's logits give it.
      sample_rows: per token to draw, the row whose options apply and whose device slot keeps it.
    """

    step_id: int
    starts: list[RowStart] = field(default_factory=list)
    table_updates: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_decode_rows: int = 0
    rows: list[int] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sample_sources: list[int] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens drawn in one step, in the order of `StepPlan.sample_rows`.

    Attributes:
      token_ids: the drawn ids.
      is_finite: False where the row's logits held NaN or nothing was left to draw from.
    """

    token_ids: list[int]
    is_finite: list[bool]
