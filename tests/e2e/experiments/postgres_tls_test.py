"""Experiments kept in a PostgreSQL on another machine, as docs/experiments.md has it: the daemon checks who it is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from credentials import authority, signed
from definitions import LEAN, define
from epikv import RpcError
from epikv.testing import Daemon
from postgres import Postgres
from waiting import eventually

Serve = Callable[[str], Daemon]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: ours.pem has signed server.pem, other.pem nothing."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "other"):
        authority(folder, name)
    signed(folder, "server", by="ours")
    return folder


@pytest.fixture(scope="module")
def port(certificates: Path) -> Iterator[str]:
    with Postgres(certificates / "server.pem") as server:
        yield server.port


@pytest.fixture
def serve(sample_model: Path, certificates: Path, port: str, tmp_path: Path) -> Iterator[Serve]:
    """A daemon with the store at an address, of which it knows the certificate of an authority."""
    with ExitStack() as stack:

        def start(authority: str, host: str) -> Daemon:
            checked = f"sslmode=verify-full&sslrootcert={certificates / authority}.pem"
            store = f"postgresql://epikv@{host}:{port}/postgres?hostaddr=127.0.0.1&{checked}"
            flags = (f"--experiment_store={store}", f"--experiment_spool={tmp_path / 'spool'}")
            return stack.enter_context(Daemon(sample_model, "--threads=1", *flags))

        yield start


def test_a_server_with_a_certificate_of_its_authority_keeps_experiments(serve: Serve) -> None:
    with serve("ours", "localhost").client() as client:
        client.create_experiment(define(LEAN))
        assert [each.name for each in client.experiments()] == ["lean"]


@pytest.mark.parametrize(
    ("authority", "host", "why"),
    [
        ("other", "localhost", "certificate verify failed"),
        ("ours", "elsewhere", "does not match host name"),
        ("no-file", "localhost", "root certificate file"),
    ],
)
def test_any_other_server_is_told_nothing(
    serve: Serve, authority: str, host: str, why: str
) -> None:
    """It is as if the store were away, and the log has the reason."""
    daemon = serve(authority, host)
    with daemon.client() as client, pytest.raises(RpcError) as refused:
        client.create_experiment(define(LEAN))
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: why in daemon.log, show=lambda: daemon.log)
