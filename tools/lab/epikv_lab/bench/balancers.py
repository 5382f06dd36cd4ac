"""Envoy and HAProxy before replicas, as deploy/ has them; and Ray Serve, which has replicas of its own."""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
def ray(python: str, settings: dict[str, Any]) -> Iterator[str]:
    """The address of Ray's gRPC proxy, once its replicas serve. python: one that has Ray; settings: of
    epikv.ray.Settings."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short path: Ray's sockets lie below it
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    environment |= {
        "PYTHONPATH": f"{ROOT / 'tools'}:{ROOT / 'tools/lab'}",
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    script = str(Path(__file__).with_name("ray_replicas.py"))
    try:
        with (Path(folder) / "replicas.log").open("wb") as log:
            process = processes.start(
                [python, script, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        address = process.stdout.readline().strip()  # type: ignore[union-attr]
        if not address:
            raise RuntimeError((Path(folder) / "replicas.log").read_text()[-2000:])
        try:
            yield address
        finally:
            process.communicate()  # closes its standard input
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
