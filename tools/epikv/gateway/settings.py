"""What a gateway is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """The options of `epikv gateway`, by their names: there they are explained, and have their defaults."""

    listen: str
    servers: Sequence[str]
    workers: int
    tls_certificate: Path | None
    tls_key: Path | None
    max_body_bytes: int
    body_seconds: float
    max_requests: int
    drain_seconds: int
    stall_seconds: float
    origins: Sequence[str]

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
