"""The way to a server: plain text or TLS, with or without a token."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

DEFAULT_SERVER = "127.0.0.1:50051"
TLS_VARIABLES = ("EPIKV_TLS_CA", "EPIKV_TLS_CERTIFICATE", "EPIKV_TLS_KEY")
# Of a client's channel. A server that is away is tried again within 2 s, not within gRPC's 120.
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


@dataclass(frozen=True)
class Tls:
    """Files in PEM. `ca`: who may have signed the server's certificate; None: whom gRPC trusts by
    itself. `certificate` and `key`: shown to servers that ask for one."""

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None

    @classmethod
    def from_environment(cls) -> "Tls | None":
        """Of TLS_VARIABLES; None where none is set."""
        given = [os.environ.get(name) or None for name in TLS_VARIABLES]
        return cls(*given) if any(given) else None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ValueError for a file that cannot be read, and for half of a pair."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS: a client's certificate and its key are given together")
        try:
            ca, key, certificate = (
                None if path is None else Path(path).read_bytes()
                for path in (self.ca, self.key, self.certificate)
            )
        except OSError as error:
            raise ValueError(f"TLS: {error}") from error
        return grpc.ssl_channel_credentials(ca, key, certificate)


def token_from_environment() -> str | None:
    return os.environ.get("EPIKV_TOKEN")


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that shows `token`, if there is one."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def connect(
    server: str,
    options: Sequence[tuple[str, Any]] = (),
    *,
    tls: Tls | None = None,
    token: str | None = None,
) -> grpc.Channel:
    """Raises ValueError for a URL."""
    _check_address(server)
    if tls is None:
        channel = grpc.insecure_channel(server, options)
    else:
        channel = grpc.secure_channel(server, tls.credentials(), options)
    return grpc.intercept_channel(channel, _Bearer(token)) if token else channel


def connect_async(
    server: str, options: Sequence[tuple[str, Any]] = (), *, tls: Tls | None = None
) -> grpc.aio.Channel:
    """For asyncio. A token goes with each call, as `bearer` has it: an interceptor of this kind of
    channel costs time with every message. Raises ValueError for a URL."""
    _check_address(server)
    if tls is None:
        return grpc.aio.insecure_channel(server, options)
    return grpc.aio.secure_channel(server, tls.credentials(), options)


def _check_address(server: str) -> None:
    if server.startswith(("http://", "https://")):
        raise ValueError(
            f"a server is HOST:PORT, not '{server}'; for TLS name its authority in $EPIKV_TLS_CA"
        )


class _Details(NamedTuple):
    """The fields of grpc.ClientCallDetails."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds a token to every call, also in plain text, where gRPC's own call credentials refuse."""

    def __init__(self, token: str) -> None:
        self._metadata = bearer(token)

    def _call(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return continuation(
            _Details(
                details.method,
                details.timeout,
                [*(details.metadata or ()), *self._metadata],
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    intercept_unary_unary = _call
    intercept_unary_stream = _call
