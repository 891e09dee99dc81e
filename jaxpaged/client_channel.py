"""Opens a client's channels: message limits, TLS, and when gRPC tries again by itself."""

import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jaxpaged.connection import Connection
from jaxpaged.grpc_lifetime import keep_grpc_running

# gRPC tries again by this. A call whose first message has arrived is committed and never tried
# again, so a stream is never repeated; only UNAVAILABLE is, which promises that nothing was done.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": "jaxpaged.v1.InferenceService"},
                {"service": "jaxpaged.v1.AdminService", "method": "GetStats"},
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def open_channel(address: str, connection: Connection) -> grpc.Channel:
    options, credentials = _options(connection), _credentials(connection)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_async_channel(address: str, connection: Connection) -> grpc.aio.Channel:
    keep_grpc_running()
    options, credentials = _options(connection), _credentials(connection)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _options(connection: Connection) -> tuple[tuple[str, Any], ...]:
    options: list[tuple[str, Any]] = [
        # The library's default of 4 MiB is too small for long prompts and answers.
        ("grpc.max_receive_message_length", 64 * 2**20),
        ("grpc.max_send_message_length", 64 * 2**20),
    ]
    if connection.retries:
        options.append(("grpc.service_config", json.dumps(_SERVICE_CONFIG)))
    else:
        options.append(("grpc.enable_retries", 0))
    if connection.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", connection.tls_server_name))
    return tuple(options)


def _credentials(connection: Connection) -> grpc.ChannelCredentials | None:
    files = [connection.tls_ca, connection.tls_key, connection.tls_cert]
    if not connection.tls:
        if any(files):
            raise ValueError("tls_ca, tls_cert and tls_key need tls=True")
        return None
    if (connection.tls_cert is None) != (connection.tls_key is None):
        raise ValueError("tls_cert and tls_key belong together")
    ca, key, cert = (None if name is None else Path(name).read_bytes() for name in files)
    return grpc.ssl_channel_credentials(ca, key, cert)
