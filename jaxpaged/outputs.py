"""What comes out: of the engine (token ids, one message a step) and of the front (text)."""

from dataclasses import dataclass, field

from jaxpaged.logprobs import PositionLogprobs, TokenLogprob
from jaxpaged.request import FinishReason

# --- engine -> front ---------------------------------------------------------------------------


@dataclass(
    slots=True
)  # not frozen: one is made a row and step, and frozen ones cost three times more
class SequenceOutput:
    """New tokens of one sequence; `finish_reason` is set in its last one.

    `logprobs` has a record for each token, as logprobs.py says; empty when not asked for.
    `cumulative_logprob` is told of the hypotheses of a beam search.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: bytes = b""
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from `first_position` on, packed likewise."""

    request_id: str
    first_position: int
    num_positions: int
    logprobs: bytes


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request was scheduled for the first time."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_looked_up_tokens: int = 0  # in the prefix cache: all of the prompt's, or none


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """All sequences of a request have ended; nothing more comes for this id.

    `block_saving` is told of a beam search: the share of its block tables' entries that took no
    block of their own.
    """

    request_id: str
    num_preemptions: int
    error: str | None = None  # what went wrong in the engine, when a step failed
    block_saving: float | None = None


@dataclass(slots=True)
class StepOutputs:
    """Everything one committed step has to tell, to be handled in this order."""

    started: list[RequestStarted] = field(default_factory=list)
    scored: list[PromptScored] = field(default_factory=list)
    sequences: list[SequenceOutput] = field(default_factory=list)
    ended: list[RequestEnded] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.started or self.scored or self.sequences or self.ended)


# --- front -> user -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the request was accepted."""

    queued_s: float
    time_to_first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """One of a request's n generations, ended.

    `matched_stop` is the stop string or the stop token id that ended it. `logprobs` (one for each
    token) and their sum are None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    matched_stop: str | int | None
    seed: int
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request; completions in the order of their index.

    `prompt_logprobs` has an entry for each token of the prompt, the first one empty; None unless
    asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    usage: Usage
    timing: Timing
    prompt_logprobs: list[PositionLogprobs] | None = None
    block_saving: float | None = None  # of a beam search, see BeamSearchOutput


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a completion is after its prompt: the log-probability of each of its tokens."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """One of a beam search's answers; `score` is its log-probability over length ** penalty."""

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answer to one beam search, the best hypothesis first.

    Attributes:
      block_saving: the share of the KV blocks that beams without sharing would have held, and
        these did not; None when preemption left nothing to count.
    """

    request_id: str
    prompt_token_ids: list[int]
    hypotheses: list[BeamHypothesis]
    usage: Usage
    block_saving: float | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of a stream, at once, queued or not."""

    request_id: str
    prompt_token_ids: list[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Started:
    """The request was scheduled for the first time."""

    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from `first_position` on, if asked for."""

    first_position: int
    logprobs: list[PositionLogprobs]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one sequence; `finish_reason` is set in its last one.

    Joined texts of one index equal the unary text; text is whole UTF-8; a delta may carry several
    tokens, or tokens without text (text held back).
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    logprobs: list[PositionLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a stream."""

    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing has happened for a while; the place in the queue, 0 once started."""

    queue_position: int


StreamEvent = Accepted | Started | PromptLogprobs | Delta | Finished | Heartbeat


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block of the pool, for a picture of it."""

    references: int
    used_slots: int
    cached: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of a running engine; the fields of EngineStats in admin.proto."""

    running_requests: int
    queued_requests: int
    total_blocks: int
    used_blocks: int
    cached_free_blocks: int
    used_slots: int  # slots holding a token, in used blocks
    block_size: int
    steps: int
    preemptions: int
    compiles_after_warmup: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    # Not on the wire, and None behind it: seconds spent in steps, and prompt tokens of the requests
    # that may read the prefix cache.
    step_s: float | None = None
    looked_up_tokens: int | None = None

    @property
    def waste(self) -> float:
        """Share of the allocated slots that hold no token, 0 when nothing is allocated."""
        allocated = self.used_blocks * self.block_size
        return 1 - self.used_slots / allocated if allocated else 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What GetModelInfo tells about the loaded model and the engine around it."""

    model: str
    weights_version: str
    vocab_size: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    has_chat_template: bool
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_queued_requests: int
    default_temperature: float
    default_top_k: int
    default_top_p: float
    default_min_p: float
    default_repetition_penalty: float
