"""`jaxpaged generate`: loads a model in this process and streams its answer."""

import argparse

from jaxpaged.cli.flags import (
    add_engine_flags,
    add_prompt_flags,
    add_sampling_flags,
    engine_fields,
    limit_device_memory,
    prompt_of,
    sampling_params_of,
)
from jaxpaged.cli.printing import print_events


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate",
        help="load a model and stream its answer",
        description="Loads a model in this process and streams its answer to stdout.",
    )
    add_engine_flags(parser, seed_flag="--engine-seed")
    add_prompt_flags(parser)
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    limit_device_memory(options.memory_fraction)
    from jaxpaged.llm import LLM

    params = sampling_params_of(options)
    prompt = prompt_of(options)
    with LLM(**engine_fields(options)) as llm:
        print_events(llm.stream_events(prompt, params), params.n or 1)
    return 0
