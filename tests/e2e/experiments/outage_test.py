"""What becomes of experiments whose store is away, or whose disk is full: no generation fails, nothing
that was acknowledged is lost, and clients are told what is not kept."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
from epikv import Client
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError, find_binary

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import outage
import recorded
from recorded import Ledger, Sqlite, Traffic

# Of the store's outage; tests/soak.sh outage takes a minute.
SECONDS = 3.0
DISK_BYTES = 4 << 20


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_nobody_notices_that_the_store_is_away(
    sample_model: Path, tmp_path: Path, kind: str
) -> None:
    found = outage.run(sample_model, kind, SECONDS, tmp_path)
    assert len(found.ledger.spooled) >= outage.MEANWHILE
    assert found.held.lost == found.held.twice == 0


def test_a_daemon_that_is_killed_in_an_outage_leaves_its_spool(
    sample_model: Path, tmp_path: Path
) -> None:
    """The next starts though the store is away, and brings it there."""
    ledger = Ledger()
    with recorded.store("postgres", tmp_path) as store:
        flags = ("--threads=1", f"--experiment_store={store.where}")
        flags = (*flags, f"--experiment_spool={tmp_path / 'spool'}")
        dying = Daemon(sample_model, *flags).__enter__()
        with Client(dying.grpc) as client:
            recorded.begin(client)
        with Traffic(dying.grpc, ledger) as traffic:
            traffic.until_more("written", 10)
            store.leave()
            traffic.until_more("spooled", 10)
            dying.kill()
        with Daemon(sample_model, *flags) as daemon, Client(daemon.grpc) as client:
            assert scrape(daemon.metrics).value("epikv_experiment_spool_bytes") > 0
            client.generate_once([5] * 8)
            store.come_back()
            recorded.await_empty_spool(daemon.metrics)
            recorded.held(ledger, store).check()
            assert recorded.reported(client) >= len(ledger.acknowledged)


class Disk(Protocol):
    """A folder that a daemon of `binary` writes to, and which can be full."""

    folder: Path  # as the daemon names it
    seen: Path  # the same, as we do
    binary: Path

    def fill(self, daemon: Daemon) -> None: ...
    def empty(self, daemon: Daemon) -> None: ...


# For users other than root, in a user namespace.
_AS_ROOT = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


class SmallDisk:
    """A file system of its own, in a mount namespace that nobody else is in."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.folder = tmp_path / "disk"
        self.folder.mkdir()
        mount = f"mount -t tmpfs -o size={DISK_BYTES} epikv {self.folder} && echo && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", *_AS_ROOT, "--mount", "sh", "-c", mount],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(self._holder.wait)
        stack.callback(self._holder.stdin.close)
        if not self._holder.stdout.readline():
            pytest.skip("mounts are not permitted here; `limit` is the same without one")
        self.seen = Path(f"/proc/{self._holder.pid}/root{self.folder}")
        self.binary = tmp_path / "epikvd-on-disk"
        namespaces = "--preserve-credentials --user --mount" if _AS_ROOT else "--mount"
        self.binary.write_text(
            f'#!/bin/sh\nexec nsenter --target={self._holder.pid} {namespaces} {find_binary()} "$@"\n'
        )
        self.binary.chmod(0o755)

    def fill(self, daemon: Daemon) -> None:
        with (self.seen / "ballast").open("ab", buffering=0) as ballast:
            for size in (4096, 1):
                while True:
                    try:
                        ballast.write(b"x" * size)
                    except OSError:
                        break

    def empty(self, daemon: Daemon) -> None:
        (self.seen / "ballast").unlink()


class Limit:
    """No file of the daemon's may be written to: what `ulimit -f` does, and quotas."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.folder = self.seen = tmp_path
        self.binary = find_binary()

    def fill(self, daemon: Daemon) -> None:
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def empty(self, daemon: Daemon) -> None:
        everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, everything)


@pytest.fixture(params=[SmallDisk, Limit], ids=["disk", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    make: Callable[[Path, ExitStack], Disk] = request.param
    with ExitStack() as stack:
        yield make(tmp_path, stack)


def assert_told(ledger: Ledger) -> None:
    """What was not kept was refused for now; of requests that nothing could be written of, as unknown."""
    codes = {(error.code.name, error.reason) for error in ledger.refused.values()}
    assert ("UNAVAILABLE", "STORE_UNAVAILABLE") in codes
    assert codes <= {("UNAVAILABLE", "STORE_UNAVAILABLE"), ("NOT_FOUND", "NOT_FOUND")}
    assert all(error.retry_delay > 0 for error in ledger.refused.values())


def test_a_full_disk_refuses_outcomes_and_no_request(
    sample_model: Path, disk: Disk, tmp_path: Path
) -> None:
    """Store and spool lie on it, as they do unless one says otherwise."""
    ledger = Ledger()
    flags = ("--threads=1", f"--experiment_store={disk.folder / 'experiments.db'}")
    killed = pytest.raises(DaemonError, match="status -9")

    def start() -> Daemon:
        return Daemon(sample_model, *flags, binary=disk.binary)

    with killed, start() as daemon, Client(daemon.grpc) as client:
        recorded.begin(client)
        with Traffic(daemon.grpc, ledger) as traffic:
            traffic.until_more("written", 20)
            disk.fill(daemon)
            traffic.until_more("refused", 20)
            traffic.until_more("generations", 20)
            page = scrape(daemon.metrics)
            disk.empty(daemon)
            recorded.await_empty_spool(daemon.metrics)
            traffic.until_more("written", 20)
        assert traffic.failures == []
        assert_told(ledger)
        assert page.value("epikv_experiment_records_total", fate="refused") > 0
        assert page.value("epikv_experiment_records_total", fate="dropped") > 0
        recorded.await_empty_spool(daemon.metrics)
        found = recorded.reported(client)
        daemon.kill()
    for file in ("experiments.db", "experiments.db-wal"):  # SQLite cannot look into the namespace
        shutil.copy(disk.seen / file, tmp_path / f"copy-{file}")
    held = recorded.held(ledger, Sqlite(tmp_path / "copy-experiments.db"))
    held.check(lost_requests=ledger.acknowledged)
    assert held.outcomes + len(held.waiting) == len(ledger.acknowledged)
    assert found == held.outcomes
    with start() as daemon, Client(daemon.grpc) as client:
        assert recorded.reported(client) == found


def test_a_full_spool_refuses_outcomes_only_while_the_store_is_away(
    sample_model: Path, disk: Disk, tmp_path: Path
) -> None:
    ledger = Ledger()
    with recorded.store("postgres", tmp_path) as store:
        flags = ("--threads=1", f"--experiment_store={store.where}")
        flags = (*flags, f"--experiment_spool={disk.folder / 'spool'}")
        with (
            Daemon(sample_model, *flags, binary=disk.binary) as daemon,
            Client(daemon.grpc) as client,
        ):
            recorded.begin(client)
            with Traffic(daemon.grpc, ledger) as traffic:
                disk.fill(daemon)
                traffic.until_more("written", 20)
                assert ledger.refused == {}
                store.leave()
                traffic.until_more("refused", 20)
                disk.empty(daemon)
                traffic.until_more("spooled", 20)
                disk.fill(daemon)
                traffic.until_more("refused", 20)
                traffic.until_more("generations", 20)
                store.come_back()
                traffic.until_more("written", 20)
                recorded.await_empty_spool(daemon.metrics)
            assert traffic.failures == []
            assert_told(ledger)
            held = recorded.held(ledger, store)
            held.check(lost_requests=ledger.acknowledged)
            assert recorded.reported(client) == held.outcomes
            assert held.outcomes + len(held.waiting) == len(ledger.acknowledged)
            disk.empty(daemon)
