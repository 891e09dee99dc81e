"""`jaxpaged serve`: loads a model and serves it over gRPC until it is told to stop."""

import argparse
import asyncio
import logging
import os
import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from jaxpaged.cli.flags import (
    add_dataclass_flags,
    add_engine_flags,
    engine_fields,
    limit_device_memory,
)

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.server.lifecycle import Server

_SERVER_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one",
    "admin_host": "address of the admin port",
    "admin_port": "port of AdminService; 0: any free one",
    "metrics_host": "address of the metrics port",
    "metrics_port": "port where Prometheus finds /metrics; default: none",
    "max_request_bytes": "largest message",
    "keepalive_time_s": "seconds without traffic after which a connection is pinged",
    "keepalive_timeout_s": "seconds to wait for the answer to a ping",
    "stop_grace_s": "seconds that running requests get to end when the server is stopped",
    "stall_timeout_s": "a step that lasts longer counts as stuck, and health says NOT_SERVING; "
    "raise it where steps are slow (a CPU)",
    "max_pending_tokens": "tokens that the reader of a stream may be behind",
    "max_messages_per_s": "messages that all streams together get; beyond that, a message carries "
    "several tokens, so that many streams do not slow the engine down; default: 500 a core, 200 "
    "where the model runs on a CPU",
    "tls_cert": "PEM file with the server's certificate chain",
    "tls_key": "PEM file with its key",
    "tls_client_ca": "PEM file; clients must show a certificate signed by it (mTLS)",
    "token_file": "file of bearer tokens, one a line, that calls must carry",
    "admin_token_file": "likewise for AdminService; these are good for all calls",
    "allow_clear_tokens": "take tokens without TLS on an address that is not loopback",
    "max_engine_restarts": "restarts of an engine that keeps dying before the server exits with "
    "code 70; 0: exit at once",
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    from jaxpaged.server.config import ServerConfig

    parser = commands.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Serves a model over gRPC, its engine in a process of its own. SIGINT or "
        "SIGTERM stops it: running requests get --stop-grace-s seconds to end; a second signal "
        "ends it at once. Without --token-file everybody who reaches --host may call.",
    )
    add_dataclass_flags(parser.add_argument_group("server"), ServerConfig, _SERVER_HELP)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    limit_device_memory(options.memory_fraction)
    from jaxpaged.server.config import ServerConfig
    from jaxpaged.server.lifecycle import serve
    from jaxpaged.server.ports import address_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = ServerConfig(
        **{field.name: getattr(options, field.name) for field in fields(ServerConfig)}
    )

    def load() -> "AsyncLLM":
        from jaxpaged.async_llm import AsyncLLM
        from jaxpaged.process_client import start_in_process

        start_engine = partial(start_in_process, max_restarts=config.max_engine_restarts)
        return AsyncLLM(start_engine=start_engine, **engine_fields(options))

    def announce(server: "Server", llm: "AsyncLLM") -> None:
        address = address_of(config.host, server.port)
        admin_address = address_of(config.admin_host, server.admin_port)
        print(
            f"jaxpaged serving {llm.info.model} on {address} (admin on {admin_address})",
            flush=True,
        )

    async def serve_and_leave() -> NoReturn:
        code = await serve(config, load, announce)
        logging.shutdown()
        sys.stdout.flush()
        # why not sys.exit: it waits for threads, and a constraint that is compiled for nobody any
        # more cannot be interrupted
        os._exit(code)

    return asyncio.run(serve_and_leave())
