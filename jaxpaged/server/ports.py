"""Listening: gRPC's options, and one clear line when a port cannot be had."""

import errno
import socket
from typing import Any

import grpc

from jaxpaged.server.config import ServerConfig

# Clients may ping every 10 s and some every 5 s, also without calls; the library's own limit of
# 5 minutes would end their connections during a long prefill.
_MIN_CLIENT_PING_INTERVAL_MS = 4000


def channel_options(config: ServerConfig) -> tuple[tuple[str, Any], ...]:
    return (
        ("grpc.so_reuseport", 0),  # else two servers share one port without a word
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_send_message_length", config.max_request_bytes),
        ("grpc.keepalive_time_ms", round(config.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        # why too: a ping that shares its way with data has a limit of its own, 60 s
        ("grpc.http2.ping_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # a silent stream is pinged for ever
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_CLIENT_PING_INTERVAL_MS),
    )


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(
    server: grpc.aio.Server,
    field: str,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None,
) -> int:
    """Binds and returns the port; OSError with one clear line when that cannot be.

    Args:
      field: which of the settings the port is.
    """
    failure = _failure(field, host, port)
    address = address_of(host, port)
    probe(field, host, port)  # gRPC's own message names neither the port nor the cause
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        cause = "" if credentials is None else " (are the TLS files a certificate and its key?)"
        raise OSError(f"{failure}: {error}{cause}") from error
    if not bound:
        raise OSError(failure)
    return bound


def probe(field: str, host: str, port: int) -> None:
    """Raises OSError with one clear line when the port cannot be had."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen()
    except OSError as error:
        cause = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise OSError(f"{_failure(field, host, port)}: {cause}") from error


def _failure(field: str, host: str, port: int) -> str:
    return f"{field}={port}: cannot listen on {address_of(host, port)}"
