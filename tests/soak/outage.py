"""Takes the experiment store away from a daemon under traffic, and looks whether anybody notices.

    python tests/soak/outage.py [--seconds 60] [--store postgres|sqlite]

Exit status 1: a generation failed, an outcome that was acknowledged is not in the store once it is
back, or is there twice.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import recorded
from calls import Wrong, same
from epikv import Client, RpcError, processes
from epikv.scrape import Page, scrape
from epikv.testing import Daemon, DaemonError
from recorded import Held, Ledger, Traffic
from soak import sample_model

FLAGS = ("--threads=1",)
BEFORE, MEANWHILE, AFTER = 20, 12, 20  # outcomes, at least
TOLD_AGAIN = 20  # outcomes of each kind, which change nothing


@dataclass(frozen=True)
class Found:
    ledger: Ledger
    held: Held
    page: Page  # at the end
    away: tuple[float, float]  # from and until when the store was away
    recovery: float  # seconds from its return until the spool was empty
    generations: Sequence[tuple[float, float]]  # when each began, and its seconds


def run(model: Path, kind: str, seconds: float, folder: Path) -> Found:
    """Raises Wrong."""
    ledger = Ledger()
    with recorded.store(kind, folder) as store:
        flags = (*FLAGS, f"--experiment_store={store.where}", f"--experiment_spool={folder}/spool")
        with Daemon(model, *flags) as daemon, Client(daemon.grpc) as client:
            recorded.begin(client)
            with Traffic(daemon.grpc, ledger) as traffic:
                traffic.until_more("written", BEFORE)
                store.leave()
                try:
                    left = time.monotonic()
                    traffic.until_more("spooled", MEANWHILE)
                    traffic.until_more("generations", MEANWHILE)
                    _look_around(client, daemon)
                    time.sleep(max(0.0, left + seconds - time.monotonic()))
                    came = time.monotonic()
                    traffic.until_more("generations")  # still
                finally:
                    store.come_back()
                recovery = recorded.await_empty_spool(daemon.metrics)
                traffic.until_more("written", AFTER)
                for numbers in (ledger.written, ledger.spooled):
                    for number in sorted(numbers)[:TOLD_AGAIN]:
                        traffic.tell(number)
            recorded.await_empty_spool(daemon.metrics)
            same("generations that failed", traffic.failures, [])
            same("requests that took no part", traffic.outside, [])
            same("outcomes that were refused", ledger.refused, {})
            held = recorded.held(ledger, store)
            held.check()
            same("outcomes in the report", recorded.reported(client), held.outcomes)
            same("outcomes in the store", held.outcomes, len(ledger.acknowledged))
            page = scrape(daemon.metrics)
            _check_series(page, seconds)
    return Found(ledger, held, page, (left, came), recovery, traffic.generations)


def _look_around(client: Client, daemon: Daemon) -> None:
    """What must be in the store says so."""
    try:
        client.stop_experiment(recorded.NAME)
        raise Wrong("the store is away, and a definition was changed")
    except RpcError as error:
        same("reason", (error.code.name, error.reason), ("UNAVAILABLE", "STORE_UNAVAILABLE"))
    page = scrape(daemon.metrics)
    if page.value("epikv_experiment_spool_bytes") <= 0:
        raise Wrong("outcomes wait in the spool, and epikv_experiment_spool_bytes is 0")


def _check_series(page: Page, seconds: float) -> None:
    def fate(name: str) -> float:
        return page.value("epikv_experiment_records_total", fate=name)

    same("records replayed", fate("replayed"), fate("spooled"))
    same("records dropped or refused", (fate("dropped"), fate("refused")), (0, 0))
    outage = page.value("epikv_experiment_store_outage_seconds_total")
    if not seconds - 1 <= outage:  # noticed by the first record that it does not take
        raise Wrong(f"epikv_experiment_store_outage_seconds_total is {outage}, not {seconds}")


def summarize(kind: str, found: Found) -> None:
    left, came = found.away
    parts = {
        "before": [s for at, s in found.generations if at < left],
        "away": [s for at, s in found.generations if left <= at < came],
        "after": [s for at, s in found.generations if at >= came],
    }
    print(
        f"\n{kind}: away for {came - left:.1f} s; spool empty {found.recovery:.2f} s after its return"
    )
    print(f"{'generations':12} {'count':>8} {'p50 ms':>8} {'p99 ms':>8} {'longest':>8}")
    for name, times in parts.items():
        cuts = quantiles(times, n=100, method="inclusive")
        print(
            f"{name:12} {len(times):8} {1e3 * cuts[49]:8.1f} {1e3 * cuts[98]:8.1f}"
            f" {1e3 * max(times):8.1f}"
        )
    ledger, held = found.ledger, found.held
    print(
        f"outcomes acknowledged: {len(ledger.acknowledged)}, {len(ledger.spooled)} of them by the"
        f" spool; in the store {held.outcomes}; lost {held.lost}, twice {held.twice}"
    )


@processes.ending_in_order()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--store", choices=("postgres", "sqlite"), action="append")
    arguments = parser.parse_args()
    for kind in arguments.store or ("postgres", "sqlite"):
        with tempfile.TemporaryDirectory(prefix="epikv-outage-") as folder:
            try:
                summarize(kind, run(sample_model(), kind, arguments.seconds, Path(folder)))
            except (Wrong, DaemonError) as error:
                print(f"\nFAILED: {kind}: {error}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
