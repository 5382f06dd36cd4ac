"""Envoy and HAProxy before replicas, as deploy/ has them."""

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from epikv import processes
from epikv.client import Client
from epikv.harness import ROOT

DEPLOYED = ROOT / "deploy"
_FIRST_REPLICA = "50051"  # of both configurations
_READY_SECONDS = 30


def free_ports(count: int) -> list[str]:
    with ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(port.getsockname()[1]) for port in ports]


def envoy_replicas(addresses: Sequence[str]) -> str:
    """deploy/envoy/replicas.yaml with these, HOST:PORT on this host, instead of its own."""
    return _instead((DEPLOYED / "envoy/replicas.yaml").read_text(), "port_value", addresses)


def _instead(text: str, mark: str, addresses: Sequence[str]) -> str:
    """The text with a line for each address, like the first of its lines that have `mark`."""
    lines = text.splitlines(keepends=True)
    first, *_ = own = [line for line in lines if re.search(mark, line)]
    place = lines.index(first)
    ports = [address.rpartition(":")[2] for address in addresses]
    made = [
        first.replace(_FIRST_REPLICA, port).replace("server a", f"server r{port}") for port in ports
    ]
    return "".join([*lines[:place], *made, *lines[place + len(own) :]])


@contextmanager
def envoy(folder: Path, addresses: Sequence[str], program: str) -> Iterator[str]:
    """Its address, once it serves."""
    clients, admin = free_ports(2)
    text = (DEPLOYED / "envoy/envoy.yaml").read_text()
    ports = {"50050": clients, "9901": admin}
    text = re.sub(r"(?<=port_value: )\d+", lambda port: ports[port[0]], text)
    (folder / "envoy.yaml").write_text(text)
    (folder / "replicas.yaml").write_text(envoy_replicas(addresses))
    command = [program, "-c", "envoy.yaml", "--concurrency", "1", "--disable-hot-restart"]
    with _running(command, folder, clients) as address:
        yield address


@contextmanager
def haproxy(folder: Path, addresses: Sequence[str], program: str) -> Iterator[str]:
    """Its address, once it serves; calls go to the replica that has the fewest."""
    (clients,) = free_ports(1)
    text = (DEPLOYED / "haproxy/haproxy.cfg").read_text()
    assert "balance leastconn" in text
    text = _instead(text, r"^ *server [ab] ", addresses)
    (folder / "haproxy.cfg").write_text(text.replace("50050", clients))
    with _running([program, "-db", "-f", "haproxy.cfg"], folder, clients) as address:
        yield address


@contextmanager
def _running(command: Sequence[str], folder: Path, port: str) -> Iterator[str]:
    address = f"127.0.0.1:{port}"
    with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
        process = processes.start(command, stdout=log, stderr=log, cwd=folder)
    try:
        with Client(address) as client:
            client.wait_ready(_READY_SECONDS)
        yield address
    finally:
        process.kill()
        process.wait()
