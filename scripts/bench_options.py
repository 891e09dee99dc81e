#!/usr/bin/env python3
"""Times a decode step with options on every row, beside plain greedy rows, in one process.

    scripts/bench_options.py [--quick] [--model NAME] [--batch 1 8] [--json FILE]

The cases take turns, some steps each, in another order every round, so that whatever else the
machine does slows all of them alike. A ratio is the median, over the rounds, of a case's time over
the plain one's in the same round; "greedy again" shows what such a ratio can be told to.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxpaged import Constraint, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine, load_engine
from jaxpaged.request import EngineRequest
from jaxpaged.request_maker import FrontModel, RequestMaker

PROMPT_TOKENS = 64
# More than a turn's steps: nothing ends in one.
MAX_TOKENS = 256
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
    "minItems": 1000,
}
PLAIN = "greedy"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
CASES: dict[str, dict[str, Any]] = {
    PLAIN: GREEDY,
    "greedy again": GREEDY,
    "penalties": GREEDY | PENALTIES,
    "logprobs=5": GREEDY | {"logprobs": 5},
    "JSON schema": {"temperature": 0.0, "constraint": Constraint(json_schema=SCHEMA)},
    "temperature": GREEDY | {"temperature": 1.0, "seed": 1},
    "temperature, top_p": GREEDY | {"temperature": 1.0, "top_p": 0.9, "seed": 1},
}
# What a case may take, as a ratio to plain greedy rows.
LIMITS = {"penalties": 1.15, "logprobs=5": 1.15, "JSON schema": 1.30}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times decode steps with options.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument("--model", default="smollm2", help="what LLM takes")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", help="write the figures there, too")
    options = parser.parse_args()
    num_steps, num_rounds = (8, 5) if options.quick else (12, 20)
    config = EngineConfig(options.model, max_num_seqs=max(options.batch), max_model_len=512)
    model = FrontModel.load(config)
    engine = load_engine(config, model.vocabulary)
    maker = RequestMaker(model, engine.config)
    figures = {}
    for batch in options.batch:
        requests = {case: make_requests(maker, batch, case) for case in CASES}
        seconds = time_cases(engine, requests, num_steps, num_rounds)
        figures[batch] = {case: figures_of(seconds, case) for case in CASES}
        print_table(batch, figures[batch])
    engine.close()
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))


def make_requests(maker: RequestMaker, batch: int, case: str) -> list[EngineRequest]:
    rng, params = random.Random(batch), SamplingParams(max_tokens=MAX_TOKENS, **CASES[case])

    async def make() -> list[EngineRequest]:
        prompts = [[rng.randrange(100, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        return [await maker.make(str(i), prompt, params) for i, prompt in enumerate(prompts)]

    return asyncio.run(make())


def time_cases(
    engine: Engine,
    requests: Mapping[str, list[EngineRequest]],
    num_steps: int,
    num_rounds: int,
) -> dict[str, list[float]]:
    """Seconds of a step of each case, in each round."""
    seconds: dict[str, list[float]] = {case: [] for case in requests}
    order = list(requests)
    with tqdm(total=num_rounds * len(order), unit="turn", leave=False, disable=None) as bar:
        for round_idx in range(-1, num_rounds):  # the first one warms up
            random.Random(round_idx).shuffle(order)
            for case in order:
                found = decode_seconds(engine, requests[case], num_steps)
                if round_idx >= 0:
                    seconds[case].append(found)
                    bar.update()
    return seconds


def decode_seconds(engine: Engine, requests: list[EngineRequest], num_steps: int) -> float:
    """Median seconds of a step in which all requests decode."""
    for request in requests:
        engine.add(request)
    num_told = 0
    while num_told < 2 * len(requests):  # two tokens each: the pipeline is full
        num_told += sum(len(output.token_ids) for output in engine.step().sequences)
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        output = engine.step()
        seconds.append(time.perf_counter() - start)
        assert len(output.sequences) == len(requests)
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    return statistics.median(seconds)


def figures_of(seconds: Mapping[str, list[float]], case: str) -> dict[str, float]:
    pairs = zip(seconds[case], seconds[PLAIN], strict=True)
    return {
        "step_ms": 1e3 * statistics.median(seconds[case]),
        "ratio": statistics.median(one / plain for one, plain in pairs),
    }


def print_table(batch: int, figures: Mapping[str, dict[str, float]]) -> None:
    print(f"{f'batch {batch}':20} {'step ms':>9} {'ratio':>7} {'limit':>7}")
    for case, figure in figures.items():
        limit = f"{LIMITS[case]:7.2f}" if case in LIMITS else ""
        print(f"{case:20} {figure['step_ms']:9.2f} {figure['ratio']:7.3f} {limit}", flush=True)


if __name__ == "__main__":
    main()
