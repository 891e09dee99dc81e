"""Drives a Scheduler with a FakeRunner, as the engine does, and checks what it says."""

from collections import Counter, deque
from dataclasses import replace
from functools import lru_cache

from helpers.fake_runner import FakeRunner, expected_hypotheses

from jaxpaged.config import SchedulerConfig
from jaxpaged.outputs import StepOutputs
from jaxpaged.request import EngineRequest, FinishReason, Sequence, SequenceStatus
from jaxpaged.sampling_params import sequence_seed
from jaxpaged.scheduler.scheduler import Scheduler
from jaxpaged.step_plan import StepPlan, StepResult

type Key = tuple[str, int]
# Tokens, finish reason and cumulative log-probability (None of what is no hypothesis).
type Answer = tuple[list[int], FinishReason, float | None]


def make_config(
    *,
    block_size: int = 4,
    num_blocks: int = 16,
    max_num_seqs: int = 4,
    max_num_tokens: int = 64,
    max_model_len: int | None = None,
    enable_prefix_caching: bool = True,
    step_sizes: tuple[int, ...] = (),
) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        max_model_len=max_model_len or num_blocks * block_size,
        enable_prefix_caching=enable_prefix_caching,
        step_sizes=step_sizes,
    )


class Driver:
    """The engine's loop in small; what came out is kept by (request id, index)."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        overlap: bool = False,
        vocab_size: int = 7,
        non_finite_token_id: int | None = None,
    ):
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            vocab_size=vocab_size,
            non_finite_token_id=non_finite_token_id,
        )
        self.overlap = overlap
        self.plans: list[StepPlan] = []
        self.tokens: dict[Key, list[int]] = {}
        self.reasons: dict[Key, FinishReason] = {}
        self.num_cached: dict[str, int] = {}
        self.cumulative_logprobs: dict[Key, float | None] = {}
        self.num_preemptions: dict[str, int] = {}
        self.block_saving: dict[str, float | None] = {}
        self.prompt_logprobs: dict[str, bytes] = {}
        self.num_scored: Counter[str] = Counter()
        self.peak_used_blocks = 0
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()

    @property
    def pool(self):
        return self.scheduler.kv.pool

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add(request)

    def sequence(self, request_id: str, index: int = 0) -> Sequence:
        return self.scheduler.roster.requests[request_id].sequences[index]

    def start_order(self) -> list[str]:
        """Ids of the requests in the order in which they started."""
        return list(self.num_cached)

    def schedule(self) -> StepPlan | None:
        """Schedules and dispatches one step, and leaves it in flight."""
        plan = self.scheduler.schedule()
        self.peak_used_blocks = max(self.peak_used_blocks, self.pool.num_used)
        if plan is not None:
            check_writes(self.scheduler, plan)
            sizes = self.scheduler.config.step_sizes
            assert not sizes or plan.num_tokens <= sizes[-1], "no size holds the step"
            self.plans.append(plan)
            self.in_flight.append((plan, self.runner.dispatch(plan)))
        return plan

    def commit(self) -> StepOutputs:
        """Commits the oldest step in flight."""
        plan, handle = self.in_flight.popleft()
        outputs = self.scheduler.commit(plan, self.runner.collect(handle))
        self.note(outputs)
        return outputs

    def step(self) -> StepPlan | None:
        plan = self.schedule()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_work, "work, but nothing to wait for"
            if self.in_flight:
                self.commit()
        while len(self.in_flight) > self.overlap:
            self.commit()
        return plan

    def run(self, *, max_steps: int = 2000) -> None:
        """Steps until nothing is left; `max_steps` is the bound that tells a hang."""
        for _ in range(max_steps):
            if not (self.scheduler.has_work or self.in_flight):
                break
            self.step()
            self.scheduler.check_integrity()
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        self.note(self.scheduler.take_outputs())

    def note(self, outputs: StepOutputs) -> None:
        for started in outputs.started:
            assert started.request_id not in self.num_cached, "a request starts once"
            self.num_cached[started.request_id] = started.num_cached_tokens
        for scored in outputs.scored:
            request_id = scored.request_id
            assert scored.first_position == self.num_scored[request_id] + 1, "told out of order"
            assert request_id not in self.num_preemptions
            self.num_scored[request_id] += scored.num_positions
            self.prompt_logprobs.setdefault(request_id, b"")
            self.prompt_logprobs[request_id] += scored.logprobs
        for output in outputs.sequences:
            key = output.request_id, output.index
            assert key not in self.reasons, f"{key} goes on after its end"
            assert output.request_id not in self.num_preemptions
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
                self.cumulative_logprobs[key] = output.cumulative_logprob
        for ended in outputs.ended:
            assert ended.request_id not in self.num_preemptions, "a request ends once"
            self.num_preemptions[ended.request_id] = ended.num_preemptions
            self.block_saving[ended.request_id] = ended.block_saving

    def answers(self, request_id: str) -> list[Answer]:
        """What was told of the sequences that ended, in the order of their index."""
        keys = sorted(key for key in self.reasons if key[0] == request_id)
        assert [index for _, index in keys] == list(range(len(keys)))
        return [(self.tokens[k], self.reasons[k], self.cumulative_logprobs[k]) for k in keys]

    def assert_equal_to_solo(self, *requests: EngineRequest) -> None:
        for request in requests:
            if request.params.beam is not None:
                expected = expected_beams(request, self.scheduler.config.max_model_len)
                assert self.answers(request.request_id) == expected, request
                continue
            for index in range(request.params.n):
                key = request.request_id, index
                solo = solo_run(request, index, self.scheduler.config.max_model_len)
                assert (self.tokens[key], self.reasons[key]) == solo, key


def preempt(scheduler: Scheduler, sequence: Sequence) -> None:
    """Preempts any running sequence between two steps."""
    for step in scheduler._in_flight:
        step.preempted.add(id(sequence))
    scheduler.roster.preempt(sequence)


def check_writes(scheduler: Scheduler, plan: StepPlan) -> None:
    """Raises if the step writes into a block that is published, or that is in two tables."""
    running, size = scheduler.roster.running, scheduler.config.block_size
    holders = Counter(block for sequence in running for block in sequence.block_table)
    by_row = {sequence.row: sequence for sequence in running}
    for row, q_len, kv_len in zip(plan.rows, plan.q_lens, plan.kv_lens, strict=True):
        sequence = by_row[row]
        assert sequence.status is SequenceStatus.RUNNING
        for idx in range((kv_len - q_len) // size, (kv_len - 1) // size + 1):
            block = sequence.block_table[idx]
            assert block not in scheduler.kv.cache, f"published block {block} is written"
            # Children forked by this very step share the chunk that their parent computes.
            children = sum(
                plan.sample_sources.count(source) - 1
                for source, other in enumerate(plan.rows)
                if other == row and source in plan.sample_sources
            )
            assert holders[block] <= 1 + children, f"shared block {block} is written"


def expected_beams(
    request: EngineRequest,
    max_model_len: int,
    *,
    vocab_size: int = 7,
    non_finite_token_id: int | None = None,
) -> list[Answer]:
    """What is told of a beam search; the search itself runs without blocks or scheduler."""
    hypotheses = expected_hypotheses(
        request, max_model_len, vocab_size=vocab_size, non_finite_token_id=non_finite_token_id
    )
    if hypotheses is None:
        return [([], FinishReason.ERROR, None)]
    fits = len(request.prompt_token_ids) + request.params.max_tokens <= max_model_len
    answers = []
    for hypothesis in hypotheses:
        reason = FinishReason.MAX_TOKENS if fits else FinishReason.CONTEXT_LENGTH
        if hypothesis.ended_by is not None:
            is_eos = hypothesis.ended_by in request.eos_token_ids
            reason = FinishReason.EOS if is_eos else FinishReason.STOP_TOKEN
        answers.append((list(hypothesis.token_ids), reason, hypothesis.cumulative_logprob))
    return answers


def solo_run(
    request: EngineRequest,
    index: int,
    max_model_len: int,
    *,
    vocab_size: int = 7,
    non_finite_token_id: int | None = None,
) -> tuple[list[int], FinishReason]:
    """Tokens and finish reason of one sequence, alone in a big pool with the cache off."""
    params = request.params
    alone = replace(
        request,
        request_id="solo",
        params=replace(params, n=1, seed=sequence_seed(params.seed, index), priority=0),
    )
    tokens, reason = _solo_run(alone, max_model_len, vocab_size, non_finite_token_id)
    return list(tokens), reason


@lru_cache(maxsize=1024)
def _solo_run(
    request: EngineRequest, max_model_len: int, vocab_size: int, non_finite_token_id: int | None
) -> tuple[tuple[int, ...], FinishReason]:
    config = make_config(
        block_size=16,
        num_blocks=-(-max_model_len // 16),
        max_num_seqs=1,
        max_num_tokens=max_model_len,
        max_model_len=max_model_len,
        enable_prefix_caching=False,
    )
    driver = Driver(config, vocab_size=vocab_size, non_finite_token_id=non_finite_token_id)
    driver.add(request)
    driver.run()
    return tuple(driver.tokens["solo", 0]), driver.reasons["solo", 0]
