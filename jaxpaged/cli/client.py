"""`jaxpaged client`: streams an answer from a server. Never loads JAX."""

import argparse
import os
import sys

from jaxpaged.cli.flags import (
    add_dataclass_flags,
    add_prompt_flags,
    add_sampling_flags,
    prompt_of,
    sampling_params_of,
)
from jaxpaged.cli.printing import print_events, print_stats
from jaxpaged.connection import Connection

_CONNECTION_HELP = {
    "token": "bearer token; better in the environment variable JAXPAGED_TOKEN, where no process "
    "list shows it",
    "tls": "encrypt, and check the server's certificate",
    "tls_ca": "PEM file of who signed the server's certificate",
    "tls_cert": "PEM file with a certificate of this client (mTLS)",
    "tls_key": "PEM file with its key",
    "tls_server_name": "name in the server's certificate, where it is not the address",
    "timeout_s": "seconds that the answer may take",
    "retries": "try again when the server could not take the call",
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "client",
        help="stream an answer from a server",
        description="Streams an answer from a server to stdout.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="the server, as HOST:PORT")
    add_prompt_flags(parser)
    parser.add_argument("--stats", action="store_true", help="then print what the block pool did")
    parser.add_argument(
        "--admin-address", metavar="HOST:PORT", help="the server's admin port, for --stats"
    )
    add_dataclass_flags(parser.add_argument_group("connection"), Connection, _CONNECTION_HELP)
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    # Here, so that `jaxpaged generate` and `serve` do not load the client, nor --help grpc.
    import grpc

    from jaxpaged.client import Client

    if options.stats and options.admin_address is None:
        raise ValueError("--stats needs --admin-address")
    try:
        connection = {name: getattr(options, name) for name in _CONNECTION_HELP}
        connection["token"] = options.token or os.environ.get("JAXPAGED_TOKEN")
        with Client(options.address, options.admin_address, **connection) as client:
            params = sampling_params_of(options)
            print_events(client.stream_events(prompt_of(options), params), params.n or 1)
            if options.stats:
                print_stats(client.stats(), client.block_states())
    except grpc.RpcError as error:
        code, details = error.code().name, error.details()  # type: ignore[attr-defined]
        print(f"jaxpaged: {options.address}: {code}: {details}", file=sys.stderr)
        return 1
    return 0
