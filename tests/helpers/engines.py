"""Engines for tests: one compiled runner serves many engines of other settings, one at a time."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxpaged import checkpoint
from jaxpaged.checkpoint.locate import home_folder
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine, StepRunner
from jaxpaged.outputs import RequestStarted, StepOutputs
from jaxpaged.request import EngineRequest, FinishReason
from jaxpaged.runner.runner import Runner
from jaxpaged.runner.start import start_runner

if TYPE_CHECKING:
    from jaxpaged.grammar import Vocabulary


def load_runner(model: str, **options: Any) -> Runner:
    config = EngineConfig(model, **options)
    return start_runner(config, checkpoint.locate(model, config.load_format), home_folder())


def fresh_engine(
    runner: Runner,
    *,
    wrapped: StepRunner | None = None,
    vocabulary: "Vocabulary | None" = None,
    **changes: Any,
) -> Engine:
    """An engine with an empty pool. A smaller pool or budget than the runner's needs no compile.

    Args:
      wrapped: takes the runner's place in the engine.
      changes: to the runner's ResolvedConfig. `max_model_len` shrinks with the pool.
    """
    runner.reset()
    config = replace(runner.config, **changes)
    room = config.num_blocks * config.block_size
    config = replace(config, max_model_len=min(config.max_model_len, room))
    return Engine(config, wrapped or runner, vocabulary)


@dataclass
class Answers:
    """What an engine told, by request id, or by (request id, index)."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], bytes] = field(default_factory=dict)
    reasons: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    started: dict[str, RequestStarted] = field(default_factory=dict)
    errors: dict[str, str | None] = field(default_factory=dict)
    num_preemptions: dict[str, int] = field(default_factory=dict)

    def take(self, outputs: StepOutputs) -> None:
        for started in outputs.started:
            assert started.request_id not in self.started, "started twice"
            self.started[started.request_id] = started
        for output in outputs.sequences:
            key = (output.request_id, output.index)
            assert key not in self.reasons, f"{key} told after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            self.logprobs[key] = self.logprobs.get(key, b"") + output.logprobs
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
        for ended in outputs.ended:
            assert ended.request_id not in self.errors, "ended twice"
            self.errors[ended.request_id] = ended.error
            self.num_preemptions[ended.request_id] = ended.num_preemptions


def run_to_end(engine: Engine, requests: Iterable[EngineRequest]) -> Answers:
    """Runs requests together until nothing is left; every block must be free then."""
    answers = Answers()
    for request in requests:
        engine.add(request)
    steps_left = 10_000
    while engine.has_work:
        answers.take(engine.step())
        steps_left -= 1
        assert steps_left, "the engine does not come to an end"
    answers.take(engine.step())
    assert engine.stats().used_blocks == 0
    return answers


def solo_tokens(runner: Runner, request: EngineRequest) -> list[int]:
    """The request's first sequence, alone in an engine without a prefix cache."""
    engine = fresh_engine(runner, enable_prefix_caching=False, overlap=False)
    return run_to_end(engine, [request]).tokens[request.request_id, 0]
