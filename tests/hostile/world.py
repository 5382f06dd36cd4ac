"""A daemon as an operator runs it who trusts nobody: TLS, tokens, experiments in PostgreSQL; and what goes wrong
around it: the disk of its spool and access log is small, its store comes and goes, its clock jumps, it is stopped.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from clock_jumps import faked_clock_variables, set_clock
from credentials import authority, new_token, signed
from definitions import LEAN, define
from epikv import Client
from epikv.connection import Tls
from epikv.testing import Daemon
from postgres import Postgres
from proxies import PROXIES

DISK_BYTES = 6 << 20
CORES = sorted(os.sched_getaffinity(0))
# Attackers get at these through the port alone; at all, where there is but one.
DAEMON_CORES = CORES[: (len(CORES) + 1) // 2]
OTHER_CORES = CORES[len(DAEMON_CORES) :] or CORES


@dataclass
class World:
    daemon: Daemon
    disk: Path  # of the spool and the access log
    clients: str  # where clients connect: the daemon, or a proxy before it
    ca: Path
    tokens: dict[str, str]
    folder: Path
    store: Postgres


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES. Raises CalledProcessError where this user may mount none."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def on_cores_of_the_daemon() -> Iterator[None]:
    """For what is started meanwhile. This process runs on the others from then on, with all that it starts."""
    os.sched_setaffinity(0, DAEMON_CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, OTHER_CORES)


@contextmanager
def world(model: Path, folder: Path, proxy: str | None) -> Iterator[World]:
    authority(folder, "ca")
    signed(folder, "server", "ca")
    roles = {"ann": "user", "eve": "user", "ops": "operator", "lab": "experimenter"}
    made = {name: new_token(name, role) for name, role in roles.items()}
    (folder / "tokens").write_text("".join(line for _, line in made.values()))
    tokens = {name: token for name, (token, _) in made.items()}
    tls = Tls(folder / "ca.pem")
    certificate = (
        f"--tls_certificate={folder / 'server.pem'}",
        f"--tls_key={folder / 'server.key'}",
    )
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk"))
        store = stack.enter_context(Postgres())
        flags = (
            "--threads=1",
            "--deterministic=true",
            f"--auth_tokens_file={folder / 'tokens'}",
            f"--access_log={disk / 'access.log'}",
            f"--experiment_store={store.url}",
            f"--experiment_spool={disk / 'spool'}",
            f"--experiment_spool_bytes={4 << 20}",
            *(() if proxy else certificate),
        )
        with faked_clock_variables(folder), on_cores_of_the_daemon():  # its clock alone
            daemon = stack.enter_context(
                Daemon(model, *flags, token=tokens["ops"], tls=None if proxy else tls)
            )
        with Client(daemon.grpc, token=tokens["lab"], tls=None if proxy else tls) as lab:
            lab.create_experiment(define(LEAN))
            lab.start_experiment("lean")
        clients = daemon.grpc.replace("127.0.0.1", "localhost")
        if proxy:
            before = PROXIES[proxy](folder, folder / "server.pem", daemon.grpc)
            clients = stack.enter_context(before)
        yield World(daemon, disk, clients, folder / "ca.pem", tokens, folder, store)


def go_wrong(world: World, seconds: float) -> None:
    """What goes wrong around a daemon while a phase under attack goes on: the store is away for a third of the time,
    and the clock jumps an hour ahead and back."""
    part = seconds / 6
    time.sleep(part)
    world.store.stop()
    time.sleep(part)
    set_clock(world.folder, timedelta(hours=1))
    time.sleep(part)
    world.store.start()
    time.sleep(part)
    set_clock(world.folder, timedelta())
