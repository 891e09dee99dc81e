"""Proof on a GPU: what scripts/test_gpu runs. Each part runs even if another fails."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import jax
from gpu_parts_engines import check_compiles, check_engines
from gpu_parts_kernels import SHAPES, check_kernels, check_write
from gpu_parts_models import check_bf16, check_float32, check_smollm2
from gpu_parts_products import check_products
from gpu_parts_sampling import check_sample


def main() -> int:
    parser = argparse.ArgumentParser(description="Proves the Hopper kernels on a GPU.")
    parts: dict[str, Callable[[], str]] = {
        "kernels": check_kernels,
        "write": check_write,
        "products": check_products,
        "sample": check_sample,
        "float32": check_float32,
        "bf16": check_bf16,
        "smollm2": check_smollm2,
        "engines": check_engines,
        "compiles": check_compiles,
    }
    parser.add_argument("--only", nargs="+", choices=parts, help="run these parts alone")
    parser.add_argument(
        "--share",
        type=share,
        default=(1, 1),
        metavar="I/N",
        help="of the kernels' shapes, every N-th: compiling is mostly Python, so that N processes "
        "(with XLA_PYTHON_CLIENT_PREALLOCATE=false) are done sooner than one",
    )
    options = parser.parse_args()
    first, step = options.share
    parts["kernels"] = partial(check_kernels, range(first - 1, len(SHAPES), step))
    os.environ["JAXPAGED_DEBUG"] = "1"  # every step of an engine is followed by `check_integrity`
    print(f"jax {jax.__version__} on {jax.devices()[0]}", flush=True)
    results = [run_part(name, parts[name]) for name in options.only or parts]
    print("\n".join(["", *results]))
    return any("FAILED" in result for result in results)


def share(text: str) -> tuple[int, int]:
    """I and N of "I/N", 1 <= I <= N."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return int(first), int(step)


def run_part(name: str, part: Callable[[], str]) -> str:
    """One line of the summary; printed at once, too."""
    start = time.monotonic()
    try:
        result = f"ok      {part()}"
    except Exception as error:
        traceback.print_exc()
        result = f"FAILED  {error}".splitlines()[0]
    line = f"{name:8} {result}  ({time.monotonic() - start:.0f} s)"
    print(line, flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
