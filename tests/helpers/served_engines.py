"""Engines behind a server, in a thread or in a process, without a model and with faults on demand.

The answers are those of the fake runner: a request's tokens depend on its prompt and seed alone, so
that whatever happens around it must not change them. Faults are asked for by an id in a prompt.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_runner import FakeRunner, expected_tokens

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.checkpoint import Checkpoint
from jaxpaged.config import EngineConfig, ResolvedConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_client import ThreadEngineClient
from jaxpaged.errors import CheckpointError
from jaxpaged.process_client import ProcessEngineClient
from jaxpaged.request_maker import FrontModel
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.step_plan import StepPlan, StepResult
from jaxpaged.v1 import inference_pb2 as pb

# Ids in a prompt: what the step does that computes them.
RAISE, EXIT, STALL, NON_FINITE = 250, 251, 252, 253
STALL_S = 2.0
MAX_MODEL_LEN = 640
BLOCK_SIZE = 16
_DRAWN_IDS = 128  # answers are ASCII
WEIGHTS = "config.json"  # what a folder must have so that weights can be loaded from it


class FaultyRunner(FakeRunner):
    """The fake runner with faults, a time that each step takes, and weights to replace."""

    num_compiles_after_warmup = 0

    def __init__(self, config: ResolvedConfig, step_s: float):
        self._make = partial(
            super().__init__,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            vocab_size=_DRAWN_IDS,
        )
        self._make()
        self._step_s = step_s
        self._bad_rows: set[int] = set()
        self._first_step = 0

    def dispatch(self, plan: StepPlan) -> StepResult:
        time.sleep(self._step_s)
        if EXIT in plan.token_ids:
            os._exit(9)
        if RAISE in plan.token_ids:
            raise RuntimeError("a fault that was asked for")
        if STALL in plan.token_ids:
            time.sleep(STALL_S)
        self._bad_rows -= {start.row for start in plan.starts}
        self._find_bad_rows(plan)
        result = super().dispatch(replace(plan, step_id=plan.step_id - self._first_step))
        is_finite = [row not in self._bad_rows for row in plan.sample_rows]
        return replace(result, is_finite=is_finite)

    def _find_bad_rows(self, plan: StepPlan) -> None:
        start = 0
        prefilling = slice(plan.num_decode_rows, None)
        for row, q_len in zip(plan.rows[prefilling], plan.q_lens[prefilling], strict=True):
            if NON_FINITE in plan.token_ids[start : start + q_len]:
                self._bad_rows.add(row)
            start += q_len

    def reset(self) -> None:
        # The step that failed was counted by the scheduler, but not here.
        num_steps, first_step = self.num_steps, self._first_step
        self._make()
        self._bad_rows.clear()
        self._first_step = first_step + num_steps + 1

    def load_weights(self, checkpoint: Checkpoint) -> Path:
        if "refused" in checkpoint.config:
            raise CheckpointError("model.safetensors is truncated")
        return checkpoint.path

    def replace_weights(self, weights: Path) -> None:
        pass

    def close(self) -> None:
        pass


def make_engine(step_s: float = 0.0, **changes: Any) -> Engine:
    config = ResolvedConfig(
        model="fake",
        vocab_size=260,
        platform="cpu",
        dtype="float32",
        kv_dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=64,
        max_num_seqs=8,
        max_num_tokens=64,
        enable_prefix_caching=True,
        attention_impl=None,
        tensor_parallel=1,
        scheduling="fcfs",
        overlap=True,
    )
    config = replace(config, **changes)
    return Engine(config, FaultyRunner(config, step_s))


def make_llm(
    where: str,
    step_s: float = 0.0,
    *,
    max_queued_requests: int = 1024,
    max_restarts: int = 3,
    **changes: Any,
) -> AsyncLLM:
    """A front before such an engine.

    Args:
      where: "thread" or "process".
      step_s: what each step takes.
      changes: to the engine's ResolvedConfig.
    """
    make = partial(make_engine, step_s, **changes)
    config = EngineConfig("fake", max_queued_requests=max_queued_requests)
    model = FrontModel(config, ByteTokenizer(), SamplingDefaults(), frozenset())

    def connect(on_outputs: Callable, on_died: Callable) -> Any:
        if where == "thread":
            return ThreadEngineClient(make(), on_outputs, on_died)
        return ProcessEngineClient(
            make, on_outputs, on_died, max_restarts=max_restarts, backoff_s=0.1
        )

    return AsyncLLM.from_client(model, connect)


def long_text() -> pb.GenerateRequest:
    """Long enough for a thread of the tokenizer's; two tokens of its answer fit the context."""
    request = pb.GenerateRequest(text="<|bos|>" * (MAX_MODEL_LEN - 10))
    request.sampling.max_tokens = 2
    return request


def solo_tokens(prompt: Sequence[int], max_tokens: int, seed: int | None = None) -> list[int]:
    """What a request gets whatever else runs; `seed` None is greedy."""
    return expected_tokens(tuple(prompt), max_tokens, seed=seed, vocab_size=_DRAWN_IDS)
