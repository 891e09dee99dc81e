"""`jaxpaged serve`: loads a model and serves it over gRPC until it is told to stop."""

import argparse
import asyncio
import logging
from dataclasses import fields
from typing import TYPE_CHECKING

from jaxpaged.cli.flags import add_engine_flags, engine_fields, limit_device_memory

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.server.lifecycle import Server

_SERVER_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one",
    "admin_host": "address of the admin port",
    "admin_port": "port of AdminService; 0: any free one",
    "max_request_bytes": "largest message",
    "keepalive_time_s": "seconds without traffic after which a connection is pinged",
    "keepalive_timeout_s": "seconds to wait for the answer to a ping",
    "stop_grace_s": "seconds that running requests get to end when the server is stopped",
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    from jaxpaged.server.config import ServerConfig

    parser = commands.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Serves a model over gRPC. SIGINT or SIGTERM stops it: running requests get "
        "--stop-grace-s seconds to end. There is no authentication: mind what --host opens.",
    )
    group = parser.add_argument_group("server")
    for field in fields(ServerConfig):
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(field.default),
            default=field.default,
            metavar=type(field.default).__name__.upper(),
            help=f"{_SERVER_HELP[field.name]} (default: {field.default})",
        )
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    limit_device_memory(options.memory_fraction)
    from jaxpaged.server.config import ServerConfig
    from jaxpaged.server.lifecycle import address_of, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = ServerConfig(
        **{field.name: getattr(options, field.name) for field in fields(ServerConfig)}
    )

    def load() -> "AsyncLLM":
        from jaxpaged.async_llm import AsyncLLM

        return AsyncLLM(**engine_fields(options))

    def announce(server: "Server", llm: "AsyncLLM") -> None:
        address = address_of(config.host, server.port)
        admin_address = address_of(config.admin_host, server.admin_port)
        print(
            f"jaxpaged serving {llm.info.model} on {address} (admin on {admin_address})",
            flush=True,
        )

    asyncio.run(serve(config, load, announce))
    return 0
