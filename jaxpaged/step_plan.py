"""What the scheduler decided for one step, and what the runner answers.

The only place where scheduler and runner meet. A plan carries what changed since the plan before:
the runner keeps each row's block table and sampling options on its side.
"""

from dataclasses import dataclass, field

from jaxpaged.sampling_params import ResolvedParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence takes a row: what to keep for it there.

    Attributes:
      token_ids: prompt and output so far, where `params.adjusts_logits`; else empty.
      end_token_ids: what `min_tokens` forbids, likewise.
    """

    row: int
    params: ResolvedParams
    seed: int
    num_prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    end_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens whose log-probabilities are wanted.

    Attributes:
      first_idx: which of the step's tokens precedes the first of them; the others follow.
      token_ids: the tokens.
      num_best: how many of the most likely tokens to tell at each.
    """

    first_idx: int
    token_ids: tuple[int, ...]
    num_best: int


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
      known_tokens: index into the decode rows -> the token to compute instead of the slot's.
      rows: the row of each scheduled sequence.
      q_lens: tokens each computes in this step.
      kv_lens: valid KV tokens of each after this step's write.
      token_ids: the tokens of the rows after the decode rows, joined.
      sample_sources: per token to draw, the index into `rows` whose last position's logits give it.
      sample_rows: per token to draw, the row whose options apply and whose device slot keeps it.
      has_masks: some of these rows draw under a grammar; the masks come after `dispatch`.
      prompt_chunks: prompt tokens whose log-probabilities are wanted.
    """

    step_id: int
    starts: list[RowStart] = field(default_factory=list)
    table_updates: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_decode_rows: int = 0
    known_tokens: dict[int, int] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sample_sources: list[int] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    has_masks: bool = False
    prompt_chunks: list[PromptChunk] = field(default_factory=list)

    @classmethod
    def empty(cls, null_row: int) -> "StepPlan":
        """One decode row, the null row: computes nothing that anybody reads."""
        return cls(
            step_id=0,
            num_decode_rows=1,
            rows=[null_row],
            q_lens=[1],
            kv_lens=[1],
            sample_sources=[0],
            sample_rows=[null_row],
        )

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + len(self.token_ids)


@dataclass(slots=True)
class StepResult:
    """Tokens drawn in one step, in the order of `StepPlan.sample_rows`.

    Attributes:
      token_ids: the drawn ids.
      is_finite: False where the row's logits held NaN or nothing was left to draw from.
      logprobs: a packed record for each drawn token, empty for rows that did not ask; None when
        no row did.
      prompt_logprobs: joined records for each of `StepPlan.prompt_chunks`.
    """

    token_ids: list[int]
    is_finite: list[bool]
    logprobs: list[bytes] | None = None
    prompt_logprobs: list[bytes] = field(default_factory=list)
