#!/usr/bin/env python3
"""Times decode steps of the whole engine at Qwen3-4B shapes, and says where a step's time goes.

    scripts/bench_step.py [--only TEXT ...] [--quick] [--json FILE] [--profile]
                          [--options FIELD=VALUE ...]

A step's time is (time for 144 new tokens - time for 16) / 128 through `LLM.generate`, so host work
counts. Weights and token ids are random. `--profile` traces decode steps behind prompts of 512
tokens and prints the device's time by kernel and the gaps between steps. Without a GPU small cases
run on the CPU.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from model_shapes import QWEN3_4B, SMALL_QWEN3
from traces import random_trace

from jaxpaged import LLM, SamplingParams


@dataclass(frozen=True)
class Case:
    """Rows of equal prompts; `required_ms` and `peer_ms` (vLLM 0.23) are of an H200."""

    num_rows: int
    num_prompt: int
    required_ms: float | None = None
    peer_ms: float | None = None
    is_sampled: bool = False

    @property
    def name(self) -> str:
        about = ", temperature 0.7, top_p 0.9" if self.is_sampled else ""
        return f"{self.num_rows} x {self.num_prompt}{about}"


CASES = (
    Case(1, 512, 3.0, 3.52),
    Case(64, 512, 5.0, 5.31),
    Case(64, 2048, 8.5, 8.54),
    Case(256, 512, 10.5, 11.5),
    Case(256, 512, None, None, is_sampled=True),
    Case(256, 1024, 15.4, 16.2),
)
SMALL_CASES = (Case(1, 32), Case(8, 32), Case(8, 32, is_sampled=True))
LARGE_GAP_US = 10
PROFILED = (Case(1, 512), Case(64, 512), Case(256, 512), Case(256, 512, is_sampled=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times decode steps of the whole engine.")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="cases that have it in their names"
    )
    parser.add_argument("--quick", action="store_true", help="one repeat of each case")
    parser.add_argument("--json", help="write the figures there, too")
    parser.add_argument("--profile", action="store_true", help="where a step's time goes")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="FIELD=VALUE", help="of EngineConfig; JSON"
    )
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    cases, profiled = (
        [case for case in group if any(text in case.name for text in options.only)]
        for group in ((CASES, PROFILED) if on_gpu else (SMALL_CASES, SMALL_CASES[1:2]))
    )
    if not cases:
        parser.error(f"no case has any of {options.only} in its name")
    if options.profile and not profiled:
        parser.error(f"no case that --profile traces has any of {options.only} in its name")
    engine_options = {name: json.loads(value) for name, value in _pairs(options.options)}
    engine_options.setdefault("max_num_seqs", max(case.num_rows for case in cases))
    figures: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    with tempfile.TemporaryDirectory() as folder:
        config = QWEN3_4B if on_gpu else SMALL_QWEN3
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.monotonic()
        with LLM(folder, load_format="random", **engine_options) as llm:
            figures["start_s"] = time.monotonic() - start
            print(f"{figures['device']}: started in {figures['start_s']:.1f} s", flush=True)
            print(f"{'rows x prompt':44} {'ms':>7} {'required':>9} {'vLLM':>7}", flush=True)
            for case in cases:
                figures[case.name] = step_seconds(llm, case, 1 if options.quick else 3) * 1e3
                print_case(case, figures[case.name])
            for number, case in enumerate(profiled if options.profile else ()):
                print_profile(llm, case, Path(folder) / str(number))
            print(f"{llm.stats().compiles_after_warmup} compiles after warm-up")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


def step_seconds(llm: LLM, case: Case, repeats: int) -> float:
    """Median seconds of one decode step."""
    generate(llm, case, 4)
    few, many = 16, 144
    return statistics.median(
        (generate(llm, case, many) - generate(llm, case, few)) / (many - few)
        for _ in range(repeats)
    )


def generate(llm: LLM, case: Case, max_tokens: int) -> float:
    """Seconds that a batch of new prompts takes."""
    return answer(llm, case, new_prompts(llm, case), max_tokens)


def new_prompts(llm: LLM, case: Case) -> list[list[int]]:
    trace = random_trace([case.num_prompt] * case.num_rows, 0, llm.info.vocab_size)
    return [prompt for prompt, _ in trace]


def answer(llm: LLM, case: Case, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds that a batch takes."""
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0.7 if case.is_sampled else 0.0,
        top_p=0.9 if case.is_sampled else 1.0,
    )
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    told = {output.usage.completion_tokens for output in outputs}
    assert told == {max_tokens}, f"answers of {told} tokens, not {max_tokens}"
    return seconds


def print_case(case: Case, milliseconds: float) -> None:
    peers = "".join(
        f" {value:{width}.2f}" if value else f" {'-':>{width}}"
        for value, width in ((case.required_ms, 9), (case.peer_ms, 7))
    )
    print(f"{case.name:44} {milliseconds:7.2f}{peers}", flush=True)


def print_profile(llm: LLM, case: Case, folder: Path) -> None:
    """Device time by kernel, and the gaps between kernels, of a batch's decode steps."""
    prompts = new_prompts(llm, case)
    answer(llm, case, prompts, 1)  # why: nearly all of the prompts is in the cache then
    tracing = jax.profiler.ProfileOptions()
    tracing.host_tracer_level = 1
    tracing.python_tracer_level = 0  # why: a host that is traced falls behind the device
    with jax.profiler.trace(str(folder), profiler_options=tracing):
        answer(llm, case, prompts, 64)
    (file,) = folder.glob("**/*.xplane.pb")
    events = sorted(_device_events(jax.profiler.ProfileData.from_file(str(file))))
    if not events:
        print("the trace has no kernels: no device but the CPU was at work")
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for start_ns, end_ns, name in events:
        seconds[name] += (end_ns - start_ns) / 1e9
    total = sum(seconds.values())
    gaps = [(later[0] - event[1]) / 1e3 for event, later in itertools.pairwise(events)]
    print(f"{case.name}: device time by kernel, {total:.3f} s in all")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1])[:30]:
        print(f"{value / total:6.1%} {value * 1e3:10.2f} ms  {name[:90]}")
    # Within a step they are 1 or 2 us; a loop in a CUDA graph is not traced, and counts as a gap.
    large = sorted((gap for gap in gaps if gap > LARGE_GAP_US), reverse=True)
    if large:
        print(
            f"gaps over {LARGE_GAP_US} us: {len(large)}, median {statistics.median(large):.0f} us, "
            f"the largest {[round(gap) for gap in large[:10]]} us"
        )


def _device_events(profile: Any) -> Iterator[tuple[float, float, str]]:
    """(start, end, name) of what ran on the streams of a GPU, in nanoseconds."""
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name is not None and line.name.startswith("Stream"):
                    for event in line.events:
                        yield event.start_ns, event.end_ns, event.name


def _pairs(settings: list[str]) -> Iterator[tuple[str, str]]:
    for setting in settings:
        name, _, value = setting.partition("=")
        yield name, value


if __name__ == "__main__":
    main()
