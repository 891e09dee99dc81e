"""Fronts over a real tiny model: what options do to its tokens, with texts of one byte a token."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.engines import fresh_engine
from helpers.wrapped_runner import WrappedRunner

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.grammar import Vocabulary
from jaxpaged.outputs import RequestOutput
from jaxpaged.runner.processors import LogitsProcessor
from jaxpaged.runner.runner import Runner, StepHandle
from jaxpaged.sampling_params import Prompt, SamplingParams
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.step_plan import StepPlan

BeforeDispatch = Callable[[Engine, int], object]


class KeptRunner(WrappedRunner):
    """Passes everything on but `close`: the session's other tests go on with the runner.

    Attributes:
      plans: of every step.
      interrupt: called once a step was scheduled and before the device gets it, with the step's
        number from 1.
    """

    def __init__(self, runner: Runner, interrupt: Callable[[int], object] = lambda num_steps: None):
        super().__init__(runner)
        self.plans: list[StepPlan] = []
        self.interrupt = interrupt

    def prepare(self, processor: LogitsProcessor) -> None:
        self.runner.prepare(processor)

    def dispatch(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        self.interrupt(len(self.plans))
        return super().dispatch(plan)

    def close(self) -> None:
        pass


def with_model_front[T](
    runner: Runner,
    body: Callable[[AsyncLLM], Awaitable[T]],
    *,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    has_tokenizer: bool = True,
    interrupt: BeforeDispatch = lambda engine, num_steps: None,
    **changes: Any,
) -> T:
    """What `body` gives, run with a front over a fresh engine; afterwards every block is back.

    Args:
      eos_token_ids: none by default, so that answers are as long as they may be.
      interrupt: see `KeptRunner`; gets the engine too.
      changes: to the runner's ResolvedConfig.
    """

    async def run() -> T:
        kept, tokenizer = KeptRunner(runner), ByteTokenizer()
        tokenizer.eos_token_ids = frozenset(eos_token_ids or {EOS})
        vocabulary = Vocabulary.of(tokenizer, runner.config.vocab_size) if has_tokenizer else None
        engine = fresh_engine(runner, wrapped=kept, vocabulary=vocabulary, **changes)
        kept.interrupt = lambda num_steps: interrupt(engine, num_steps)
        llm = AsyncLLM.from_engine(
            EngineConfig(engine.config.model, seed=seed),
            engine,
            tokenizer if has_tokenizer else None,
            SamplingDefaults(),
            frozenset(eos_token_ids),
        )
        try:
            result = await body(llm)
            stats = await llm.stats()
            assert (stats.used_blocks, stats.running_requests, stats.queued_requests) == (0, 0, 0)
            assert stats.compiles_after_warmup == 0
            return result
        finally:
            llm.close()

    return asyncio.run(asyncio.wait_for(run(), timeout=60))


def ask_together(
    runner: Runner,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    **options: Any,
) -> list[RequestOutput]:
    """The answers to prompts asked at once; `options` go to `with_model_front`."""
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else params

    async def body(llm: AsyncLLM) -> list[RequestOutput]:
        calls = [llm.generate(*pair) for pair in zip(prompts, every, strict=True)]
        return list(await asyncio.gather(*calls))

    return with_model_front(runner, body, **options)


def ask(runner: Runner, prompt: Prompt, params: SamplingParams, **options: Any) -> RequestOutput:
    """The answer to one prompt alone."""
    return ask_together(runner, [prompt], params, **options)[0]


def tokens_of(output: RequestOutput, index: int = 0) -> list[int]:
    return output.completions[index].token_ids
