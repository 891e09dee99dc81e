"""Parts of scripts/test_gpu: greedy tokens of whole models, in every way that an engine runs them.

Requests come at random steps, so that prompts and decodes mix; once with an empty prefix cache,
once more with what that left, and once with so few blocks that they are preempted; all of it with
and without overlap. None of this may change a token that is not nearly tied.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_parts_kernels
import numpy as np
from helpers.engines import Answers, fresh_engine, load_runner
from helpers.golden_cases import check_continuation, golden_requests
from helpers.requests import make_request
from helpers.tiny_models import prompt_logits

from jaxpaged.checkpoint.locate import home_folder
from jaxpaged.engine import Engine
from jaxpaged.logprobs import unpack_logprobs
from jaxpaged.models.precision import MAX_TWO_TERM_ROWS, MAX_WIDE_TOKENS
from jaxpaged.request import EngineRequest, FinishReason
from jaxpaged.runner.runner import Runner
from jaxpaged.runner.sharding import tensor_mesh

MARGIN = 0.1  # of the top two log-probabilities, above which rounding must not change a token
LOGITS_TOLERANCE = 1e-3  # logits reach 19; TensorFloat-32 would round them to 1e-2
GOLDENS = Path("tests/goldens")


def check_float32() -> str:
    """Tiny models in float32 give Hugging Face's logits and tokens, as they do on the CPU."""
    errors, num_runs = [], 0
    for name in ("tiny_qwen3", "tiny_llama"):
        cases = json.loads((GOLDENS / f"{name}.json").read_text())["cases"]
        runner = load_runner(
            str(GOLDENS / name),
            dtype="float32",
            max_model_len=160,
            num_blocks=100,
            max_num_seqs=4,
            max_num_tokens=32,
        )
        found = prompt_logits(runner.weights, cases[4]["prompt_token_ids"], tensor_mesh(1))
        expected = np.load(GOLDENS / f"{name}_logits.npz")["case_4"]
        errors.append(float(np.abs(found - expected).max()))
        assert errors[-1] < LOGITS_TOLERANCE, f"{name}: logits are off by {errors[-1]:.1e}"
        runs = every_way(runner, golden_requests(cases), few_blocks=12)
        for answers in runs.values():
            for i, case in enumerate(cases):
                check_continuation(case, answers.tokens[str(i), 0])
        num_runs += len(runs)
        runner.close()
    return f"{num_runs} runs give the goldens' tokens, logits are off by {max(errors):.1e} at most"


def check_bf16() -> str:
    """A random Qwen3 with head_dim 128, bf16: our kernels against XLA's operations."""
    folder = home_folder() / "test_gpu_qwen3"
    requests = random_requests()
    runs: dict[str, dict[str, Answers]] = {}
    config = tiny_qwen3_config(head_dim=128, num_attention_heads=8)
    for impl in dict.fromkeys((gpu_parts_kernels.IMPL, "xla")):
        runner = load_random(
            folder, config, attention_impl=impl, max_num_seqs=8, max_num_tokens=64, num_blocks=256
        )
        runs[impl] = every_way(runner, requests, few_blocks=24)
        runner.close()
    expected = runs["xla"]["plain"]
    found = runs[gpu_parts_kernels.IMPL] | {"XLA, overlap": runs["xla"]["overlap"]}
    agreements = {name: agreement(expected, answers) for name, answers in found.items()}
    told = told_of(agreements, sum(map(len, expected.tokens.values())))
    check_control(expected)
    return told


def check_smollm2() -> str:
    """SmolLM2's goldens (Hugging Face, float32) hold where the margin allows no doubt."""
    cases = json.loads((GOLDENS / "smollm2.json").read_text())["cases"]
    told = [f"{dtype}: {smollm2_agreement(cases, dtype)}" for dtype in ("bfloat16", "float16")]
    return "; ".join(told)


def smollm2_agreement(cases: Sequence[dict[str, Any]], dtype: str) -> str:
    """A line about the runs in one dtype."""
    runner = load_runner(
        "smollm2",
        dtype=dtype,
        max_model_len=1024,
        num_blocks=2048,
        max_num_seqs=8,
        # In longer steps bfloat16 is rounded more often, and first differences have margins of 0.2
        # (Hugging Face's bfloat16 has the same).
        max_num_tokens=MAX_TWO_TERM_ROWS if dtype == "bfloat16" else MAX_WIDE_TOKENS,
    )
    runs = every_way(runner, golden_requests(cases, ignore_eos=True), few_blocks=64)
    runner.close()
    expected = {(str(i), 0): case for i, case in enumerate(cases)}
    agreements = {
        name: Agreement.joined(
            first_difference(case["output_token_ids"], answers.tokens[key], case["margins"])
            for key, case in expected.items()
        )
        for name, answers in runs.items()
    }
    total = sum(len(case["output_token_ids"]) for case in cases)
    return told_of(agreements, total)


# --- the ways that an engine runs requests -----------------------------------------------------


def every_way(
    runner: Runner, requests: Sequence[EngineRequest], *, few_blocks: int
) -> dict[str, Answers]:
    """The answers to the same requests, by how they were run."""
    runs = {}
    for name, overlap in (("overlap", True), ("plain", False)):
        engine = fresh_engine(runner, overlap=overlap)
        runs[name] = run_mixed(engine, requests, seed=1)
        runs[f"{name}, again"] = run_mixed(engine, requests, seed=2)
        started = runs[f"{name}, again"].started.values()
        num_cached = sum(request.num_cached_tokens for request in started)
        assert num_cached > 0.5 * sum(request.num_prompt_tokens for request in started), num_cached
        engine = fresh_engine(runner, overlap=overlap, num_blocks=few_blocks)
        runs[f"{name}, preempted"] = run_mixed(engine, requests, seed=3)
        stats = engine.stats()
        assert stats.preemptions > 0, "a pool that was to be too small was not"
        assert stats.compiles_after_warmup == 0, f"{stats.compiles_after_warmup} compiles"
    return runs


def run_mixed(engine: Engine, requests: Sequence[EngineRequest], *, seed: int) -> Answers:
    """Adds the requests at random steps and in random order, and runs them to their end."""
    rng = np.random.default_rng(seed)
    waiting = [requests[i] for i in rng.permutation(len(requests))]
    answers = Answers()
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), int(rng.integers(0, 3)))):
            engine.add(waiting.pop())
        answers.take(engine.step())
    answers.take(engine.step())
    assert engine.stats().used_blocks == 0
    errors = [error for error in answers.errors.values() if error]
    assert not errors and len(answers.errors) == len(requests), errors
    failed = [key for key, reason in answers.reasons.items() if reason is FinishReason.ERROR]
    assert not failed, f"logits that are not finite, in {sorted(failed)}"
    return answers


# --- random models and requests ----------------------------------------------------------------


def tiny_qwen3_config(**changes: Any) -> dict[str, Any]:
    """The config of the golden Qwen3 with another shape."""
    return json.loads((GOLDENS / "tiny_qwen3" / "config.json").read_text()) | changes


def load_random(folder: Path, config: Mapping[str, Any], **options: Any) -> Runner:
    """A runner with random weights in bf16; its config.json is put into `folder`."""
    write_config(folder, config)
    return load_runner(str(folder), dtype="bfloat16", load_format="random", **options)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def random_requests() -> list[EngineRequest]:
    """Greedy requests that tell the two best tokens; some prompts begin alike."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 256, 70).tolist()
    requests = []
    for i in range(20):
        prompt = prefix[: rng.integers(0, 71)] if i % 2 else []
        prompt = prompt + rng.integers(0, 256, rng.integers(1, 80)).tolist()
        requests.append(make_request(str(i), prompt, max_tokens=20, ignore_eos=True, logprobs=2))
    return requests


# --- comparison --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How far answers go together.

    Attributes:
      num_tokens: before first differences.
      margins: at the first differences, where the expected token was that much likelier than any.
    """

    num_tokens: int
    margins: tuple[float, ...]

    @classmethod
    def joined(cls, parts: Iterable["Agreement"]) -> "Agreement":
        parts = list(parts)
        margins = sorted((margin for part in parts for margin in part.margins), reverse=True)
        return cls(sum(part.num_tokens for part in parts), tuple(margins))


def told_of(agreements: Mapping[str, Agreement], total: int) -> str:
    """A line about the runs; raises where one differs with a clear margin, or too early."""
    clear = {
        name: [round(found_margin, 2) for found_margin in found.margins if found_margin > MARGIN]
        for name, found in agreements.items()
    }
    fewest = min(found.num_tokens for found in agreements.values())
    assert not any(clear.values()), f"margins over {MARGIN} at first differences: {clear}"
    assert fewest > 0.5 * total, f"only {fewest} of {total} tokens come before first differences"
    return (
        f"{len(agreements)} runs, {fewest} to "
        f"{max(found.num_tokens for found in agreements.values())} of {total} tokens before first "
        f"differences, whose margins are {max_margin(agreements):.2f} at most"
    )


def max_margin(agreements: Mapping[str, Agreement]) -> float:
    return max((m for found in agreements.values() for m in found.margins), default=0.0)


def agreement(expected: Answers, found: Answers) -> Agreement:
    return Agreement.joined(
        first_difference(tokens, found.tokens[key], margins(tokens, expected.logprobs[key]))
        for key, tokens in expected.tokens.items()
    )


def first_difference(
    expected: Sequence[int], found: Sequence[int], margins: Sequence[float]
) -> Agreement:
    for i, (token, other) in enumerate(zip(expected, found, strict=True)):
        if token != other:
            return Agreement(i, (margins[i],))
    return Agreement(len(expected), ())


def margins(tokens: Sequence[int], packed: bytes) -> list[float]:
    """Of the two best tokens at each position, as the engine told them."""
    positions = unpack_logprobs(packed, tokens, lambda _: b"")
    return [position.top[0].logprob - position.top[1].logprob for position in positions]


def check_control(expected: Answers) -> None:
    """Answers to other prompts must be told apart."""
    keys = list(expected.tokens)
    others = dict(zip(keys, [*keys[1:], keys[0]], strict=True))
    swapped = Answers(tokens={key: expected.tokens[other] for key, other in others.items()})
    differences = agreement(expected, swapped).margins
    assert max(differences) > MARGIN, "swapped answers went unnoticed"
