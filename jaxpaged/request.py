"""A request and its sequences, as the scheduler sees them: token ids and counts, no text."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jaxpaged.sampling_params import ResolvedParams, sequence_seed


class FinishReason(Enum):
    """Why a sequence ended. The first five travel over gRPC; the others are statuses there."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds no row and no block
    RUNNING = "running"  # holds a row and blocks
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the front hands to the engine: validated, tokenised, every option resolved.

    Attributes:
      eos_token_ids: ids that end a sequence with `eos`; empty when `ignore_eos` is set.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: ResolvedParams
    eos_token_ids: frozenset[int]

    @property
    def end_token_ids(self) -> frozenset[int]:
        """EOS and stop ids."""
        return self.eos_token_ids | self.params.stop_token_ids


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One of a request's n generations. Only the scheduler changes it.

    Token positions, from the left (a decode step in flight, overlapped loop):

        |<---------- token_ids ---------->|<- num_pending_tokens ->|
        |<- num_computed ->|<-- num_inflight ------------------>|  |

    Attributes:
      token_ids: prompt and committed output.
      max_total_tokens: where `max_tokens` or the context ends it.
      end_token_ids: EOS and stop ids.
      order: (priority, arrival, index), the scheduling order.
      num_computed_tokens: tokens whose KV is in the pool, by steps already committed.
      num_inflight_tokens: tokens of steps scheduled but not committed.
      num_pending_tokens: sampled on the device, not yet known here.
      block_table: physical block ids, in order.
      row: place in the device batch while running, else None.
      has_device_token: the newest token sits in the device slot of `row`.
      num_published_blocks: leading blocks of the table whose content has a prefix key.
      chain: identity of the last of them (the parent of the next key).
      awaits_selection: a beam whose candidates are known, while other beams' are not.
      next_scored_idx: the prompt token whose log-probability is to be computed next.
    """

    request: "Request"
    index: int
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    end_token_ids: frozenset[int]
    order: tuple[int, int, int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    row: int | None = None
    has_device_token: bool = False
    num_published_blocks: int = 0
    chain: int | tuple[str, int, str] | None = None
    awaits_selection: bool = False
    next_scored_idx: int = 1  # nothing precedes the first
    finish_reason: FinishReason | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted that no step computes yet."""
        wanted = self.request.source.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.next_scored_idx < self.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Whether no token is to be drawn after the known ones: only the prompt was wanted."""
        return len(self.token_ids) >= self.max_total_tokens

    @property
    def num_scheduled_total(self) -> int:
        """Tokens that are computed once every dispatched step has run."""
        return self.num_computed_tokens + self.num_inflight_tokens

    @property
    def num_total_tokens(self) -> int:
        """Known tokens and those only the device knows."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """An `EngineRequest` and its sequences while it is in the scheduler.

    Only sequence 0 exists until its prompt is computed; then the others fork from it. In a beam
    search sequences come and go, and their index only tells them apart.

    Attributes:
      beams: a beam search's `BeamGroup`, once its prompt is computed.
      block_saving: see `RequestEnded`.
    """

    source: EngineRequest
    arrival_idx: int
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    started: bool = False
    num_preemptions: int = 0
    num_sequences_made: int = 0
    beams: Any = None
    block_saving: float | None = None

    @property
    def is_beam_search(self) -> bool:
        return self.source.params.beam is not None

    @property
    def request_id(self) -> str:
        return self.source.request_id

    def new_sequence(self, max_model_len: int) -> Sequence:
        """Makes the next sequence, its tokens the prompt's, and counts it as unfinished."""
        source, index = self.source, self.num_sequences_made
        self.num_sequences_made += 1
        num_prompt = len(source.prompt_token_ids)
        sequence = Sequence(
            request=self,
            index=index,
            seed=sequence_seed(source.params.seed, index),
            token_ids=list(source.prompt_token_ids),
            num_prompt_tokens=num_prompt,
            max_total_tokens=min(num_prompt + source.params.max_tokens, max_model_len),
            end_token_ids=source.end_token_ids,
            order=(source.params.priority, self.arrival_idx, index),
        )
        self.sequences.append(sequence)
        self.num_unfinished += 1
        return sequence
