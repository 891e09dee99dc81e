"""The engine table of docs/performance.md, row by row: ours, what is required, and a peer's.

Every group of rows runs in a process of its own. They share compiled programs, so that only the
first one compiles: `start` first, in an empty home that the others then use.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_processes import figures_of, model_folder
from model_shapes import QWEN3_4B, SMALL_QWEN3

ENGINE_ROWS = Path(__file__).with_name("engine_rows.py")
PEER = Path(__file__).with_name("bench_peer_hf.py")
ROW_NAMES = ("start", "hf", "prefill", "mixed", "continuous", "sharing")
EQUAL_BATCHES, SMALL_EQUAL_BATCHES, EQUAL_TOKENS = (1, 32, 128), (1, 4), (128, 64)


@dataclass(frozen=True)
class Bound:
    """What a figure must reach on an H200, and what others reach there.

    Attributes:
      required: at least; for `lower_is_better`, at most.
      peer: of vLLM 0.23 or Hugging Face transformers 5.17.
    """

    required: float | None = None
    peer: float | None = None
    lower_is_better: bool = False


BOUNDS = {
    "start_cold_s": Bound(60, 71, lower_is_better=True),
    "start_warm_s": Bound(20, lower_is_better=True),
    "prefill_tokens_per_s": Bound(73_000, 73_000),
    "mixed_tokens_per_s": Bound(16_000, 14_913),
    "mixed_s": Bound(peer=16.5, lower_is_better=True),
    "continuous_tokens_per_s": Bound(18 * 988, 988),
    "generate_tokens_per_s_1": Bound(peer=21),
    "generate_tokens_per_s_32": Bound(11 * 686, 686),
    "generate_tokens_per_s_128": Bound(peer=2_892),
    "hf_ratio_32": Bound(11),
    "sharing_speedup": Bound(1.8),
    "sharing_blocks_saved": Bound(0.4),
    "compiles_after_warmup": Bound(0, lower_is_better=True),
}


def run_rows(
    rows: Sequence[str], *, gpu: str | None, quick: bool, peer: str | None, json_file: str | None
) -> int:
    """Prints each figure as it comes; 1 if one missed its bound or a process failed."""
    table = Table(gpu, json_file)
    with ExitStack() as stack:
        config = QWEN3_4B if gpu else SMALL_QWEN3
        folder = stack.enter_context(model_folder(config, has_tokenizer=False))
        options: dict[str, Any] = {"model": folder, "quick": quick}
        environment: dict[str, str] = {}
        if "start" in rows:
            home = stack.enter_context(tempfile.TemporaryDirectory())
            environment = {"JAXPAGED_HOME": home, "CUDA_CACHE_PATH": f"{home}/cuda"}
            for name in ("start_cold_s", "start_warm_s"):
                table.take(_start_seconds(name, options, environment))
        if "hf" in rows and peer:
            table.take(_peer_figures(peer, options, is_large=gpu is not None))
        groups = [[row for row in rows if row not in ("start", "sharing")], ["sharing"]]
        for group in groups:
            if set(group) & set(rows):
                arguments = options | {"rows": group}
                table.take(figures_of(sys.executable, ENGINE_ROWS, arguments, **environment))
    return table.close()


def _start_seconds(
    name: str, options: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[tuple[str, float]]:
    """From the start of a process to its first token."""
    begin = time.monotonic()
    arguments = {**options, "rows": ["start"]}
    for told, value in figures_of(sys.executable, ENGINE_ROWS, arguments, **environment):
        if told == "first_token":
            yield name, time.monotonic() - begin
        elif told == "engine_start_s":
            yield f"{name.removesuffix('_s')}_of_engine_s", value


def _peer_figures(
    python: str, options: Mapping[str, Any], *, is_large: bool
) -> Iterator[tuple[str, float]]:
    """Hugging Face's generate loop; its process has ended when an engine starts."""
    batches = EQUAL_BATCHES if is_large else SMALL_EQUAL_BATCHES
    arguments = {
        "path": options["model"],
        "random": True,
        "generate": [(batch, *EQUAL_TOKENS) for batch in batches],
        "repeats": 1 if options["quick"] else 3,
    }
    for name, value in figures_of(python, PEER, arguments):
        yield f"hf_{name}", value


class Table:
    """Prints figures as they come, and keeps them in a file where asked."""

    def __init__(self, gpu: str | None, json_file: str | None):
        self._has_bounds = gpu is not None  # they are of an H200
        self._json_file = json_file
        self._figures: dict[str, Any] = {"device": gpu or "cpu"}
        self._is_kept = True
        print(gpu or "cpu, small shapes: no bounds")
        print(f"{'figure':30} {'ours':>12} {'required':>10} {'peer':>10} {'ratio':>7}", flush=True)

    def take(self, figures: Iterator[tuple[str, float]]) -> None:
        """Takes what a process tells; one that fails is reported, and what it told stays."""
        try:
            for name, value in figures:
                self._add(name, value)
                ours, theirs = name, f"hf_{name}"
                if theirs in self._figures:
                    ratio = self._figures[ours] / self._figures[theirs]
                    self._add(f"hf_ratio_{name.rpartition('_')[2]}", ratio)
        except subprocess.CalledProcessError as error:
            print(f"FAILED with {error.returncode}: {' '.join(error.cmd)}", flush=True)
            self._is_kept = False

    def close(self) -> int:
        return 0 if self._is_kept else 1

    def _add(self, name: str, value: float) -> None:
        self._figures[name] = value
        bound = BOUNDS.get(name, Bound()) if self._has_bounds else Bound()
        line = f"{name:30} {value:12,.2f} {_number(bound.required)} {_number(bound.peer)}"
        line += f" {value / bound.peer:7.2f}" if bound.peer else " " * 8
        if bound.required is not None:
            is_met = value <= bound.required if bound.lower_is_better else value >= bound.required
            line += "  ok" if is_met else "  MISSED"
            self._is_kept &= is_met
        if name.endswith("_failed"):
            self._is_kept = False
        print(line.rstrip(), flush=True)
        if self._json_file:
            Path(self._json_file).write_text(json.dumps(self._figures, indent=2))


def _number(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:10,.1f}"
