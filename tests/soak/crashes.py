"""Kills a daemon while it records outcomes, and looks what its store holds.

    python tests/soak/crashes.py [--kills 1000] [--store sqlite|postgres] [--folder DIR]

In batches, each with a store of its own and checked by itself; what they found is kept in DIR until all
are done, so that a run that was interrupted goes on, if with the same binary. The daemon is killed (-9) at random moments: while it starts,
while it takes up the spool of those before it, under traffic; in every fourth round its store is away,
and may come back. Exit status 1: an outcome that was acknowledged is not in the store, or is twice.
"""

import argparse
import hashlib
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import grpc
import recorded
from calls import Wrong, at_most, same
from epikv import Client, RpcError, harness, processes
from epikv.testing import Daemon, DaemonError, find_binary
from recorded import Ledger, Store, Traffic
from soak import sample_model

FLAGS = ("--threads=1", "--decode_kernel=batch", "--kv_pool_bytes=100000000", "--log_level=error")
BATCH = 50  # kills
AWAY_SHARE = 0.25  # of rounds in which the store is away
IN_START_SHARE = 0.15  # of rounds in which the daemon dies before it serves
START_SECONDS, TRAFFIC_SECONDS = 0.4, 0.4  # the latest moments
TOLD_AGAIN = 10  # outcomes of those before, by clients that have heard nothing, or forgotten it


@dataclass(frozen=True)
class Found:
    """Of a batch of kills, or of several."""

    kills: int = 0
    in_start: int = 0
    outages: int = 0
    generations: int = 0
    acknowledged: int = 0  # outcomes
    spooled: int = 0  # of them by the spool
    unheard: int = 0  # whose connection broke first
    stored: int = 0  # those that the store holds
    waiting: int = 0  # acknowledged, and their requests died with the daemon
    lost: int = 0
    twice: int = 0
    seconds: float = 0

    def __add__(self, other: "Found") -> "Found":
        return Found(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def batch(model: Path, kind: str, kills: int, seed: int) -> Found:
    """Raises Wrong."""
    begin = time.monotonic()
    draw = random.Random(f"{kind}/{seed}")
    ledger, found = Ledger(), Found()
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory(prefix="epikv-kills-") as folder,
        recorded.store(kind, Path(folder)) as store,
    ):
        flags = (*FLAGS, f"--experiment_store={store.where}", f"--experiment_spool={folder}/spool")
        with Daemon(model, *flags) as daemon, Client(daemon.grpc) as client:
            recorded.begin(client)
        for _ in range(kills):
            found += _round(model, flags, store, ledger, numbers, draw)
        with Daemon(model, *flags) as daemon, Client(daemon.grpc) as client:
            recorded.await_empty_spool(daemon.metrics)
            held = recorded.held(ledger, store)
            # A request may die with its daemon, and its outcome come after that.
            held.check(lost_requests=ledger.unheard)
            same("outcomes in the report", recorded.reported(client), held.outcomes)
        # So may an outcome be refused, as of an unknown request.
        refused = [str(e) for n, e in ledger.refused.items() if not _may_be(n, e, ledger)]
        same("outcomes that were refused", refused, [])
        sent = ledger.acknowledged | ledger.unheard
        at_most("outcomes in the store, of those sent", held.outcomes, len(sent))
    return found + Found(
        kills=kills,
        acknowledged=len(ledger.acknowledged),
        spooled=len(ledger.spooled),
        unheard=len(ledger.unheard - ledger.acknowledged),
        stored=held.outcomes,
        waiting=len(held.waiting),
        lost=held.lost,
        twice=held.twice,
        seconds=time.monotonic() - begin,
    )


def _round(
    model: Path,
    flags: Sequence[str],
    store: Store,
    ledger: Ledger,
    numbers: "itertools.count[int]",
    draw: random.Random,
) -> Found:
    away = draw.random() < AWAY_SHARE
    from_start = away and draw.random() < 0.5
    daemon = None
    if from_start:
        store.leave()
    try:
        if draw.random() < IN_START_SHARE:
            _kill_in_start(model, flags, draw.uniform(0, START_SECONDS))
            return Found(in_start=1, outages=from_start)
        daemon = Daemon(model, *flags).__enter__()
        earlier = sorted(ledger.acknowledged | ledger.unheard)[-2 * TOLD_AGAIN :]
        with Traffic(daemon.grpc, ledger, numbers=numbers) as traffic:
            for number in draw.sample(earlier, min(TOLD_AGAIN, len(earlier))):
                traffic.tell(number)
            time.sleep(draw.uniform(0, TRAFFIC_SECONDS))
            if away and not from_start:
                store.leave()
                time.sleep(draw.uniform(0, TRAFFIC_SECONDS))
            if away and draw.random() < 0.5:
                store.come_back()
                time.sleep(draw.uniform(0, TRAFFIC_SECONDS))
            daemon.kill()
    finally:
        if daemon is not None:
            daemon.kill()
        store.come_back()
    return Found(outages=away, generations=len(traffic.generations))


def _may_be(number: int, error: RpcError, ledger: Ledger) -> bool:
    lost = number in ledger.unheard and number not in ledger.written
    return lost and error.code is grpc.StatusCode.NOT_FOUND


def _kill_in_start(model: Path, flags: Sequence[str], seconds: float) -> None:
    ports = [f"--{port}=127.0.0.1:0" for port in ("listen", "metrics_listen", "admin_listen")]
    command = [str(find_binary()), *ports, f"--model={model}", *flags]
    process = processes.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    process.kill()
    same("how a daemon that starts ended", process.wait(), -signal.SIGKILL)


def run(model: Path, kind: str, kills: int, file: Path) -> Found:
    """As many as there are not in the file yet; it is made longer by a line a batch."""
    lines = file.read_text().splitlines() if file.exists() else []
    batches = [Found(**json.loads(line)) for line in lines]
    while (done := sum(one.kills for one in batches)) < kills:
        if batches:
            left = (kills - done) * sum(one.seconds for one in batches) / done
            harness.say(f"{kind}: {done} of {kills} kills, {left / 60:.0f} minutes left")
        batches.append(batch(model, kind, min(BATCH, kills - done), seed=len(batches)))
        with file.open("a") as out:
            print(json.dumps(asdict(batches[-1])), file=out)
    return sum(batches, Found())


def summarize(found: dict[str, Found]) -> None:
    print(f"\n{'':28}" + "".join(f"{kind:>12}" for kind in found))
    for what, text in (
        ("kills", "kills -9"),
        ("in_start", "of them while it starts"),
        ("outages", "with the store away"),
        ("generations", "generations"),
        ("acknowledged", "outcomes acknowledged"),
        ("spooled", "of them by the spool"),
        ("unheard", "clients that heard nothing"),
        ("stored", "in the store"),
        ("waiting", "kept without a request"),
        ("lost", "lost"),
        ("twice", "counted twice"),
    ):
        print(f"{text:28}" + "".join(f"{getattr(one, what):12}" for one in found.values()))


@processes.ending_in_order()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--store", choices=("sqlite", "postgres"), action="append")
    parser.add_argument("--folder", type=Path, help="default: build/soak/crashes")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(__file__).resolve().parents[2] / "build" / "soak" / "crashes"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(find_binary().read_bytes()).hexdigest()[:12]
    kinds = arguments.store or ("sqlite", "postgres")
    files = {kind: folder / f"{kind}-{digest}.jsonl" for kind in kinds}
    found: dict[str, Found] = {}
    try:
        for kind, file in files.items():
            found[kind] = run(sample_model(), kind, arguments.kills, file)
    except (Wrong, DaemonError) as error:
        print(f"\nFAILED: {kind}: {error}")
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here")
        return 130
    summarize(found)
    for file in files.values():
        file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
