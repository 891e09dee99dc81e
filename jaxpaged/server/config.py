"""Settings of a server, the engine's apart."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """Where and how to listen. Port 0: any free one."""

    host: str = "127.0.0.1"
    port: int = 50051
    admin_host: str = "127.0.0.1"
    admin_port: int = 50052
    max_request_bytes: int = 64 * 2**20
    keepalive_time_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    stop_grace_s: float = 30.0
