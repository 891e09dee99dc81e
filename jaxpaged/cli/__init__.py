"""The `jaxpaged` command. Each command is a module with `add_parser` and `run`."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import jaxpaged
from jaxpaged.errors import JaxpagedError


class _CommandParser(argparse.ArgumentParser):
    """Refuses flags that it does not know itself, so that its own usage is shown for them."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors are one line on stderr."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter must not flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (JaxpagedError, ValueError, NotImplementedError, OSError) as error:
        print(f"jaxpaged: {error}", file=sys.stderr)
        return 1


def _make_parser() -> argparse.ArgumentParser:
    from jaxpaged.cli import client, generate, serve

    parser = argparse.ArgumentParser(
        prog="jaxpaged", description="Paged-attention inference for language models in JAX."
    )
    parser.add_argument("--version", action="version", version=f"jaxpaged {jaxpaged.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for module in (serve, generate, client):
        module.add_parser(commands)
    return parser
