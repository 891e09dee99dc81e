"""Who may connect and who may call: TLS credentials and bearer tokens.

Tokens are asked for on every call but health checks, which a supervisor makes without a secret.
"""

import hashlib
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jaxpaged.errors import AdminOnlyError, BadTokenError, JaxpagedError
from jaxpaged.server import grpc_errors
from jaxpaged.server.config import ServerConfig
from jaxpaged.validation import check_request_id

_logger = logging.getLogger(__name__)

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_SCHEME = "bearer "


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """None without TLS.

    Raises:
      ValueError: only some of the files are named, or the one of the CA has no certificate.
      OSError: one cannot be read.
    """
    if config.tls_cert is None or config.tls_key is None:
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} needs tls_cert and tls_key, and each of these the other")
        return None
    pair = (Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes())
    if config.tls_client_ca is None:
        return grpc.ssl_server_credentials([pair])
    client_ca = Path(config.tls_client_ca).read_bytes()
    # gRPC takes a file without any: it would then ask clients for no certificate
    if not _has_certificate(client_ca):
        raise ValueError(f"tls_client_ca={config.tls_client_ca!r} must hold a PEM certificate")
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=True)


def _has_certificate(pem: bytes) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", errors="ignore"))
    except (ValueError, ssl.SSLError):
        return False
    return context.cert_store_stats()["x509"] > 0


def check_clear_tokens(config: ServerConfig) -> None:
    """Raises ValueError when tokens would cross a network where everybody can read them."""
    if config.token_file is not None and config.admin_token_file is None:
        raise ValueError("token_file needs admin_token_file: else nobody could call AdminService")
    if config.tls_cert is not None or config.allow_clear_tokens:
        return
    exposed = {"admin_host": config.admin_host} if config.admin_token_file else {}
    if config.token_file:
        exposed["host"] = config.host
    for name, host in exposed.items():
        if not _is_loopback(host):
            raise ValueError(
                f"{name}={host!r} is not loopback, and without TLS the tokens would cross the "
                "network in clear text: set tls_cert and tls_key, or allow_clear_tokens"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Tokens:
    """Bearer tokens of one kind, kept as digests: looking one up tells nothing by its time."""

    def __init__(self, path: str | None) -> None:
        """Raises ValueError for a file without tokens, OSError for one that cannot be read."""
        try:
            # A byte order mark at its beginning is no part of a token.
            text = "" if path is None else Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"the token file {path} is not UTF-8: {error}") from error
        lines = text.splitlines()
        self._digests = {_digest(line.strip()) for line in lines if line.strip()}
        if path is not None and not self._digests:
            raise ValueError(f"the token file {path} is empty")

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, token: str) -> bool:
        return _digest(token) in self._digests

    def overlaps(self, other: "Tokens") -> bool:
        return not self._digests.isdisjoint(other._digests)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a token of `allowed`; one of `users` there is told ADMIN_ONLY.

    Args:
      on_failed: told the reason of every refusal, which leaves one line in the log, too.
    """

    def __init__(
        self, *, allowed: list[Tokens], users: Tokens, on_failed: Callable[[str], None]
    ) -> None:
        self._allowed = allowed
        self._users = users
        self._on_failed = on_failed

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details = handler_call_details
        if details.method.startswith(_HEALTH_PREFIX):  # type: ignore[attr-defined]
            return await continuation(details)
        error = self._refusal(dict(details.invocation_metadata))  # type: ignore[attr-defined]
        if error is None:
            return await continuation(details)
        _logger.info("%r refused: %s", details.method, error.reason)  # type: ignore[attr-defined]
        self._on_failed(error.reason)
        return _refusing(error)

    def _refusal(self, metadata: dict[str, str | bytes]) -> JaxpagedError | None:
        header = metadata.get("authorization", "")
        token = header[len(_SCHEME) :] if isinstance(header, str) else ""
        if not isinstance(header, str) or header[: len(_SCHEME)].lower() != _SCHEME:
            return BadTokenError("the call has no 'authorization: Bearer TOKEN' metadata")
        if any(token in tokens for tokens in self._allowed):
            return None
        if token in self._users:
            return AdminOnlyError("this token may not call AdminService")
        return BadTokenError("the call's bearer token is not known here")


def _refusing(error: JaxpagedError) -> grpc.RpcMethodHandler:
    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> None:
        await grpc_errors.abort(context, error, check_request_id(None))

    # why stream_stream: it begins, and ends, before any message of the call has been read
    return grpc.stream_stream_rpc_method_handler(refuse)
