"""Floods of connections, and what an honest client gets meanwhile and afterwards."""

import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from epikv import Client, RpcError
from epikv.scrape import scrape
from epikv.testing import Daemon, find_binary
from waiting import eventually


def limited(folder: Path, descriptors: int) -> Path:
    """`epikvd` with so many descriptors at most."""
    prlimit = shutil.which("prlimit")
    script = folder / "epikvd-limited"
    script.write_text(
        f'#!/bin/sh\nexec {prlimit} --nofile={descriptors}:{descriptors} "{find_binary()}" "$@"\n'
    )
    script.chmod(0o755)
    return script


@contextmanager
def connections(
    address: str, count: int, source: str = "127.0.0.1"
) -> Iterator[list[socket.socket]]:
    """Idle connections, as many of them as the daemon takes within a second."""
    host, port = address.rsplit(":", 1)
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            try:
                opened.append(
                    stack.enter_context(
                        closing(
                            socket.create_connection(
                                (host, int(port)), timeout=1, source_address=(source, 0)
                            )
                        )
                    )
                )
            except OSError:  # reset, or not answered
                continue
        yield opened


def refused(daemon: Daemon, port: str, reason: str) -> float:
    return scrape(daemon.metrics).value("epikv_connections_refused_total", port=port, reason=reason)


def open_connections(daemon: Daemon) -> float:
    return scrape(daemon.metrics).value("epikv_connections", port="clients")


def serves(daemon: Daemon) -> bool:
    with daemon.client() as client:
        try:
            return bool(client.models())
        except RpcError:
            return False


def test_serves_after_descriptors_ran_out(sample_model: Path, tmp_path: Path) -> None:
    """CVE-2023-4785: a listener of gRPC 1.51 would accept nothing ever after."""
    with Daemon(sample_model, "--threads=1", binary=limited(tmp_path, 160)) as daemon:
        for port in (daemon.grpc, daemon.admin):
            with connections(port, 260):
                pass
        eventually(lambda: serves(daemon), 10)
        assert "raise the limit" in daemon.log
        scrape(daemon.metrics)


def test_what_comes_while_no_descriptor_is_left_is_told_so(sample_model: Path) -> None:
    """It is reset at once, by the one in reserve; who is connected is served."""
    with (
        Daemon(sample_model, "--threads=1") as daemon,
        daemon.client() as early,
        ExitStack() as held,
    ):
        assert early.models()
        # Read while the one in reserve is there: it is away for a moment with every reset.
        last = max(int(entry.name) for entry in Path(f"/proc/{daemon.pid}/fd").iterdir())
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (last + 1, hard))
        host, port = daemon.grpc.rsplit(":", 1)

        def is_reset() -> bool:
            """Before the server's first words. What is not, holds a descriptor that was left."""
            try:
                late = socket.create_connection((host, int(port)), timeout=10)
                held.enter_context(closing(late)).recv(1)
            except ConnectionResetError:
                return True
            return False

        for _ in range(5):
            eventually(is_reset, 10)
        assert early.models()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: serves(daemon), 10)
        assert refused(daemon, "clients", "descriptors") >= 5


@pytest.mark.parametrize("listener", ["grpc", "admin"])
def test_flood_of_one_peer_leaves_the_others_in_peace(sample_model: Path, listener: str) -> None:
    flags = ("--threads=1", "--max_connections=20", "--max_connections_per_peer=8")
    with Daemon(sample_model, *flags) as daemon:
        flooded, name = (
            (daemon.grpc, "clients") if listener == "grpc" else (daemon.admin, "operators")
        )
        with connections(flooded, 100, source="127.0.0.66"):
            eventually(lambda: refused(daemon, name, "peer_limit") > 0, 10)
            assert serves(daemon)
        page = scrape(daemon.metrics)
        assert page.value("epikv_connections_refused_total", port=name, reason="port_limit") == 0


def test_a_full_port_takes_new_connections_when_old_ones_close(sample_model: Path) -> None:
    flags = ("--threads=1", "--max_connections=4", "--max_connections_per_peer=4")
    with Daemon(sample_model, *flags) as daemon:
        eventually(lambda: open_connections(daemon) == 0)  # ours of the start
        with connections(daemon.grpc, 4, source="127.0.0.66"):
            eventually(lambda: open_connections(daemon) == 4, 5)
            assert not serves(daemon)
            assert refused(daemon, "clients", "port_limit") > 0
        eventually(lambda: serves(daemon), 10)


def test_a_connection_that_says_nothing_is_closed(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon:
        with connections(daemon.grpc, 1) as (silent,):
            silent.settimeout(30)
            while silent.recv(4096):  # the server's own first words
                pass
        with Client(daemon.grpc) as client:
            assert client.models()
