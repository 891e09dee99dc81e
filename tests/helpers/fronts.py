"""Fronts over a scripted engine: what texts, stops, cancels and errors do, without a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

from helpers.byte_tokenizer import EOS, ByteTokenizer
from helpers.scripted_runner import ScriptedRunner

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import EngineConfig, ResolvedConfig
from jaxpaged.engine import Engine
from jaxpaged.llm import LLM
from jaxpaged.sampling_validation import SamplingDefaults
from jaxpaged.text import Tokenizer

MODEL_VOCAB_SIZE = 300  # wider than the tokenizer, as many models are


@dataclass
class ScriptedFront:
    llm: AsyncLLM
    engine: Engine
    runner: ScriptedRunner


def scripted_front(
    answers: Mapping[str, str | list[int]],
    *,
    tokenizer: Tokenizer | None = None,
    has_tokenizer: bool = True,
    defaults: SamplingDefaults | None = None,
    **options: Any,
) -> ScriptedFront:
    """A front whose model answers `answers`; texts are bytes, one token each.

    Args:
      options: fields of EngineConfig or ResolvedConfig that differ from those below.
    """
    tokenizer = tokenizer or ByteTokenizer()
    settings = {
        "model": "scripted",
        "vocab_size": MODEL_VOCAB_SIZE,
        "platform": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "max_model_len": 256,
        "block_size": 4,
        "num_blocks": 80,
        "max_num_seqs": 4,
        "max_num_tokens": 64,
        "enable_prefix_caching": True,
        "attention_impl": None,
        "tensor_parallel": 1,
        "scheduling": "fcfs",
        "overlap": True,
    } | options
    resolved = ResolvedConfig(**{f.name: settings[f.name] for f in fields(ResolvedConfig)})
    config = EngineConfig(
        **{f.name: settings[f.name] for f in fields(EngineConfig) if f.name in settings}
    )
    script = {
        tuple(tokenizer.encode(prompt)): tokenizer.encode(answer)
        if isinstance(answer, str)
        else answer
        for prompt, answer in answers.items()
    }
    runner = ScriptedRunner(resolved, script, EOS)
    engine = Engine(resolved, runner)
    llm = AsyncLLM.from_engine(
        config,
        engine,
        tokenizer if has_tokenizer else None,
        defaults or SamplingDefaults(),
        frozenset({EOS}),
    )
    return ScriptedFront(llm, engine, runner)


@contextmanager
def scripted_llm(answers: Mapping[str, str | list[int]], **options: Any) -> Iterator["ScriptedLLM"]:
    """The synchronous face over the same."""
    front = scripted_front(answers, **options)
    with patch("jaxpaged.llm.AsyncLLM", lambda model: front.llm):
        llm = LLM("scripted")
    try:
        yield ScriptedLLM(llm, front.engine, front.runner)
    finally:
        front.runner.open.set()
        llm.close()


@dataclass
class ScriptedLLM:
    llm: LLM
    engine: Engine
    runner: ScriptedRunner
