"""Settings of a server, the engine's apart."""

from dataclasses import dataclass
from math import inf

# gRPC takes sizes and milliseconds as 32-bit integers.
_MAX_BYTES = 2**31 - 1
_MAX_KEEPALIVE_S = 2_000_000


@dataclass(frozen=True)
class ServerConfig:
    """Where and how to listen, whom to let in, and when to give up. Port 0: any free one.

    Attributes:
      metrics_port: None = no metrics.
      stop_grace_s: what running requests get to end in when the server drains.
      stall_timeout_s: a step that lasts longer counts as stuck, and health says so.
      max_pending_tokens: tokens that a stream's reader may leave while it is busy; what the
        server holds back itself does not count.
      max_messages_per_s: deltas that all streams together get; beyond that, tokens are merged.
        None: 500 a CPU core, 200 where the model runs on them, too, and at most 8000.
      tls_cert, tls_key: PEM files; both or neither.
      tls_client_ca: PEM file; clients must then show a certificate that it has signed.
      token_file: bearer tokens, one a line.
      admin_token_file: likewise, for AdminService; these are good for everything.
      allow_clear_tokens: take tokens without TLS on an address that is not loopback.
      max_engine_restarts: restarts of an engine that keeps dying, before the server exits.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    admin_host: str = "127.0.0.1"
    admin_port: int = 50052
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    max_request_bytes: int = 64 * 2**20
    keepalive_time_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    stop_grace_s: float = 30.0
    stall_timeout_s: float = 1.5
    max_pending_tokens: int = 4096
    max_messages_per_s: float | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    token_file: str | None = None
    admin_token_file: str | None = None
    allow_clear_tokens: bool = False
    max_engine_restarts: int = 3

    def __post_init__(self):
        """Raises ValueError for what cannot be meant; gRPC would take a port modulo 65536."""
        for name in ("port", "admin_port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name}={port} must be between 0 and 65535")
        for name in ("max_request_bytes", "max_pending_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_request_bytes > _MAX_BYTES:
            value = self.max_request_bytes
            raise ValueError(f"max_request_bytes={value} must be at most {_MAX_BYTES}")
        for name in ("stop_grace_s", "max_engine_restarts"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for name in (
            "keepalive_time_s",
            "keepalive_timeout_s",
            "stall_timeout_s",
            "max_messages_per_s",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name}={value} must be above 0")
        for name in ("keepalive_time_s", "keepalive_timeout_s"):
            if getattr(self, name) > _MAX_KEEPALIVE_S:
                value = getattr(self, name)
                raise ValueError(f"{name}={value} must be at most {_MAX_KEEPALIVE_S}")
