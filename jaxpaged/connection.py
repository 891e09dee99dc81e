"""What all calls of a client have in common. Standard library only: the command line reads it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Connection:
    """How to reach a server, and how long to wait for it.

    Attributes:
      token: bearer token; without TLS it crosses the network in clear text.
      tls: encrypt, and check the server's certificate.
      tls_ca: PEM file of who signed it; None: those that gRPC knows.
      tls_cert, tls_key: PEM files of this client's certificate and key, for mTLS.
      tls_server_name: the name in the certificate, where it is not the address.
      timeout_s: deadline of every call, a stream's whole length included; None: none.
      retries: try calls again that the server could not take.
    """

    token: str | None = None
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    timeout_s: float | None = None
    retries: bool = True

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def call_options(self) -> dict[str, Any]:
        """What every call of a stub gets."""
        return {"timeout": self.timeout_s, "metadata": self.metadata}
