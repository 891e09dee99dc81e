"""Compiles the Hopper kernels and whole steps for an H200 and checks memory and registers.

Run it through scripts/check_cuda, which makes the environment. One line a program:

    variant  compile s  temporary bytes  spilled bytes  registers

and a failure where the pool is copied or not updated in place, where temporaries reach 5 % of it,
where a kernel spills registers, where a step or a draw is more than one CUDA graph, where a loop
would not wait for its condition, where kernels are handed slices that may be misaligned, where a
draw keeps more arrays than it needs, or where a program does not compile at all. Programs that are
wrong on purpose come last and must be noticed.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import jax
from cuda_cases import NUM_SAMPLES, Case, controls, programs
from cuda_programs import Program, dump_steps
from tpu_programs import QWEN3_4B

MAX_TEMPORARIES = 0.05
MAX_COMPILE_S = 120  # Mosaic's search for layouts can be endless
# With JAX 0.11.2 the prefill kernel spills 4 to 40 bytes. A kernel that does not fit its registers
# would spill hundreds.
MAX_SPILL_BYTES = 64
ONE_GRAPH = ("kCommandBuffer",)
# A random draw keeps two arrays like the logits, padded. One more, if only of flags, is read and
# written in every pass.
MAX_SAMPLE_ARRAYS = 2.1


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    seconds: float
    temporary_bytes: int
    spill_bytes: tuple[int, ...]
    registers: tuple[int, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        spills, registers = (
            "/".join(map(str, values)) for values in (self.spill_bytes, self.registers)
        )
        return (
            f"{self.name:36} {self.seconds:6.1f} {self.temporary_bytes:15,d} {spills:>10}"
            f" {registers:>12}  {'; '.join(self.problems) or 'ok'}"
        )


def find_problems(program: Program) -> tuple[str, ...]:
    """What is wrong with a program."""
    problems = []
    if program.num_unwaited_loops:
        # In a graph XLA reads it while the body may still run (docs/performance.md).
        problems.append(f"{program.num_unwaited_loops} loops whose condition takes no kernel")
    launches = program.launches
    if launches is not None and launches != ONE_GRAPH:
        problems.append(f"the host starts {launches[:4]}, not {ONE_GRAPH}")
    if program.num_slices:
        # Mosaic refuses, when it runs, what does not begin at a multiple of 256 bytes.
        problems.append(f"{program.num_slices} kernels are handed slices in place")
    if program.pool is None:
        return (*problems, *_find_sample_problems(program))
    memory, pool_bytes = program.memory, program.pool_bytes
    if copies := program.pool_copies():
        problems.append(f"{len(copies)} copies of the pool, the first: {copies[0]}")
    if memory.alias_size_in_bytes < pool_bytes:
        problems.append(f"{memory.alias_size_in_bytes} bytes in place, the pool has {pool_bytes}")
    if memory.temp_size_in_bytes >= MAX_TEMPORARIES * pool_bytes:
        problems.append(f"temporaries of {memory.temp_size_in_bytes} bytes, pool {pool_bytes}")
    if not program.spill_bytes:
        problems.append("the assembler said nothing: no kernel of ours was compiled")
    if max(program.spill_bytes, default=0) > MAX_SPILL_BYTES:
        problems.append(f"spills of {program.spill_bytes} bytes > {MAX_SPILL_BYTES}")
    return tuple(problems)


def _find_sample_problems(program: Program) -> Iterator[str]:
    found, logits = program.memory.temp_size_in_bytes, NUM_SAMPLES * QWEN3_4B.vocab_size * 4
    if found > MAX_SAMPLE_ARRAYS * logits:
        yield f"temporaries of {found} bytes, {found / logits:.2f} times the logits"


def run(case: Case, folder: Path) -> Row:
    """Compiles a program; the verdict on one that is wrong on purpose is turned around."""
    start = time.monotonic()
    signal.alarm(MAX_COMPILE_S)
    # why any exception: what the compiler refuses comes in many classes, and is a line of the table
    try:
        program = case.compile_it(folder / case.name.replace(" ", "_"))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        problems = (f"{type(error).__name__}: {text}",)
        return Row(case.name, time.monotonic() - start, 0, (), (), problems)
    finally:
        signal.alarm(0)
    problems = find_problems(program)
    if case.wanted:
        is_noticed = all(any(words in problem for problem in problems) for words in case.wanted)
        problems = () if is_noticed else ("what is wrong was not noticed",)
    return Row(
        case.name,
        program.seconds,
        program.memory.temp_size_in_bytes,
        program.spill_bytes,
        program.registers,
        problems,
    )


def _give_up(signal_number: int, frame: object) -> None:
    raise TimeoutError(f"not compiled after {MAX_COMPILE_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles for an H200 and checks memory.")
    parser.add_argument("--short", action="store_true", help="the quick form, under 3 minutes")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="programs with it in their names"
    )
    parser.add_argument(  # scripts/check_cuda has taken it before
        "--newest", action="store_true", help="with the newest JAX of our range, not the oldest"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _give_up)
    start = time.monotonic()
    print(f"{'variant':36} {'s':>6} {'temporaries':>15} {'spills':>10} {'registers':>12}  verdict")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        step_folder = Path(folder) / "steps"
        dump_steps(step_folder)
        for case in chain(programs(step_folder, short=args.short), controls(step_folder)):
            if any(text in case.name for text in args.only):
                rows.append(run(case, Path(folder)))
                print(rows[-1], flush=True)
    if not rows:
        parser.error(f"no program has any of {args.only} in its name")
    num_bad = sum(bool(row.problems) for row in rows)
    print(
        f"{len(rows)} programs, {num_bad} bad, {time.monotonic() - start:.0f} s "
        f"(jax {jax.__version__})"
    )
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
