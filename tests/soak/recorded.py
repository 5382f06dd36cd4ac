"""Requests of an experiment with outcomes, what clients were told of them, and what a store holds."""

import ctypes
import itertools
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from calls import Wrong, same
from epikv import Client, Experiment, Patience, RpcError, Stop
from epikv.scrape import scrape
from epikv.v1 import experiment_pb2
from google.protobuf import text_format

sys.path.append(str(Path(__file__).resolve().parents[1] / "fixtures" / "python"))
from postgres import Postgres

NAME, METRIC = "recorded", "worth"
DEFINITION = f"""
name: "{NAME}" traffic_permille: 1000
arms {{ name: "full" weight_permille: 500 control: true kv {{ policy: "full" }} }}
arms {{ name: "lean" weight_permille: 500 kv {{ policy: "sliding" max_tokens: 64 }} }}
metrics {{ name: "{METRIC}" kind: KIND_MEAN }}
primary_metric: "{METRIC}"
"""
UNITS = 1000
PROMPT, OUTPUT = [5] * 16, 4  # tokens
AT_ONCE = Patience(0, 0)  # what is refused is refused
GENEROUS_SECONDS = 120.0


def begin(client: Client) -> None:
    """The experiment that everyone takes part in."""
    client.create_experiment(text_format.Parse(DEFINITION, experiment_pb2.Experiment()))
    client.start_experiment(NAME)


class Store(Protocol):
    """Where a daemon keeps experiments, and which can be taken away from it."""

    @property
    def where(self) -> str: ...
    def leave(self) -> None: ...
    def come_back(self) -> None: ...
    def query(self, sql: str) -> list[tuple[str, ...]]: ...


def _exchange(one: Path, other: Path) -> None:
    """At once: there is no moment at which a daemon could make a new file there."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, bytes(one), here, bytes(other), exchange) != 0:
        raise OSError(ctypes.get_errno(), "renameat2", str(one))


class Sqlite:
    """A file, in whose place something else may be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path.with_name("aside")

    @property
    def where(self) -> str:
        return str(self._path)

    def leave(self) -> None:
        self._aside.mkdir()
        _exchange(self._path, self._aside)

    def come_back(self) -> None:
        if self._aside.exists():
            _exchange(self._path, self._aside)
            self._aside.rmdir()

    def query(self, sql: str) -> list[tuple[str, ...]]:
        connection = sqlite3.connect(self._path, timeout=60)
        try:
            return [tuple(map(str, row)) for row in connection.execute(sql)]
        finally:
            connection.close()


class PostgresStore:
    """A server, which may stop as if it had crashed."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self._away = False

    @property
    def where(self) -> str:
        return self._server.url

    def leave(self) -> None:
        self._server.stop()
        self._away = True

    def come_back(self) -> None:
        if self._away:
            self._server.start()
            self._away = False

    def query(self, sql: str) -> list[tuple[str, ...]]:
        command = ["psql", "--no-psqlrc", "--no-align", "--tuples-only", "--command", sql]
        done = subprocess.run([*command, self.where], check=True, capture_output=True, text=True)
        return [tuple(line.split("|")) for line in done.stdout.splitlines()]


@contextmanager
def store(kind: str, folder: Path) -> Iterator[Store]:
    """A new one, "sqlite" or "postgres"."""
    if kind == "sqlite":
        yield Sqlite(folder / "experiments.db")
        return
    with Postgres() as server:
        yield PostgresStore(server)


def request_id(number: int) -> str:
    """An outcome's number is its value and names its request."""
    return f"request-{number}"


@dataclass
class Ledger:
    """What clients were told, by the numbers of outcomes. Written by one thread at a time."""

    written: set[int] = field(default_factory=set)  # acknowledged, as being in the store
    spooled: set[int] = field(default_factory=set)  # acknowledged, as waiting for it
    refused: dict[int, RpcError] = field(default_factory=dict)  # by the server's own word
    unheard: set[int] = field(default_factory=set)  # the connection broke

    @property
    def acknowledged(self) -> set[int]:
        return self.written | self.spooled


class Traffic:
    """Clients, each of which asks, and tells what the answer was worth, one after another: until the
    `with` block ends, or an answer of its own fails, if it does not go on then."""

    def __init__(
        self,
        address: str,
        ledger: Ledger,
        *,
        clients: int = 4,
        numbers: Iterator[int] | None = None,
        goes_on: bool = False,
    ) -> None:
        """numbers: of the requests; default: from 0 on."""
        self._goes_on = goes_on
        self.ledger = ledger
        self.failures: list[RpcError] = []  # of generations
        self.outside: list[int] = []  # requests that took no part
        self.generations: list[tuple[float, float]] = []  # when each began, and its seconds
        self._numbers = itertools.count() if numbers is None else numbers
        self._client = Client(address)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def until_more(self, what: str, count: int = 1) -> None:
        """Until there are `count` more generations, or outcomes written, spooled or refused."""
        enough = self._count(what) + count
        deadline = time.monotonic() + GENEROUS_SECONDS
        while self._count(what) < enough:
            if self.failures:
                raise Wrong(f"a generation failed: {self.failures[0]}")
            if time.monotonic() > deadline:
                raise Wrong(
                    f"{what}: {self._count(what)} in {GENEROUS_SECONDS:.0f} s, not {enough}"
                )
            time.sleep(0.01)

    def tell(self, number: int) -> None:
        """The outcome of a request; again, of one that was told before."""
        try:
            recorded = self._client.record_outcome(
                request_id(number), METRIC, float(number), patience=AT_ONCE
            )
        except RpcError as error:
            with self._lock:
                if error.reason:
                    self.ledger.refused[number] = error
                else:
                    self.ledger.unheard.add(number)
            return
        with self._lock:
            (self.ledger.spooled if recorded.spooled else self.ledger.written).add(number)

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                number = next(self._numbers)
            arm = self._ask(number)
            if arm is None:
                if not self._goes_on:
                    return
            elif arm != "none":
                self.tell(number)

    def _ask(self, number: int) -> str | None:
        """Its arm; None: there was no answer."""
        begin = time.monotonic()
        try:
            result = self._client.generate_once(
                PROMPT,
                stop=Stop(OUTPUT, min_output_tokens=OUTPUT, ignore_eos=True),
                experiment=Experiment(unit_id=f"unit-{number % UNITS}"),
                request_id=request_id(number),
            )
        except RpcError as error:
            with self._lock:
                self.failures.append(error)
            return None
        with self._lock:
            self.generations.append((begin, time.monotonic() - begin))
            if result.accepted.arm == "none":
                self.outside.append(number)
        return result.accepted.arm

    def _count(self, what: str) -> int:
        if what == "generations":
            return len(self.generations)
        return len(getattr(self.ledger, what))


def tell_again(address: str, ledger: Ledger) -> set[int]:
    """Tells outcomes once more of which a replica did not know the request yet; those that stay refused."""
    traffic = Traffic(address, ledger, clients=0)
    with traffic:
        for number in sorted(ledger.refused):
            traffic.tell(number)
    return ledger.refused.keys() - ledger.acknowledged


def await_empty_spool(metrics: str) -> float:
    """Seconds until all that waited is in the store; metrics: the daemon's address."""
    begin = time.monotonic()
    while scrape(metrics).value("epikv_experiment_spool_bytes") > 0:
        if time.monotonic() > begin + GENEROUS_SECONDS:
            raise Wrong(f"the spool is not empty after {GENEROUS_SECONDS:.0f} s")
        time.sleep(0.02)
    return time.monotonic() - begin


@dataclass(frozen=True)
class Held:
    """What a store holds of a ledger."""

    outcomes: int
    waiting: set[int]  # those whose requests are not there
    lost: int  # acknowledged, and not there
    twice: int  # outcomes or requests

    def check(self, lost_requests: set[int] | frozenset[int] = frozenset()) -> None:
        """lost_requests: those that may never have been written, which nobody was promised."""
        if self.lost or self.twice:
            raise Wrong(
                f"acknowledged outcomes: {self.lost} are lost; {self.twice} are there twice"
            )
        if others := self.waiting - lost_requests:
            raise Wrong(f"acknowledged outcomes: {len(others)} are there without their requests")


def held(ledger: Ledger, store: Store) -> Held:
    """Raises Wrong if an outcome has another's value."""
    found: dict[int, int] = {}
    waiting: set[int] = set()
    for request, value in store.query(
        "SELECT r.request_id, o.value FROM outcomes o JOIN requests r ON r.id = o.request"
    ):
        number = round(float(value))
        same("the request of an outcome", request, request_id(number))
        found[number] = found.get(number, 0) + 1
    for request, value in store.query("SELECT request_id, value FROM waiting_outcomes"):
        number = round(float(value))
        same("the request of an outcome that waits", request, request_id(number))
        waiting.add(number)
    requests = store.query(
        "SELECT request_id FROM requests GROUP BY request_id HAVING COUNT(*) > 1"
    )
    return Held(
        outcomes=len(found),
        waiting=waiting,
        lost=len(ledger.acknowledged - found.keys() - waiting),
        twice=sum(times - 1 for times in found.values())
        + len(waiting & found.keys())
        + len(requests),
    )


def reported(client: Client) -> int:
    """Outcomes that the experiment's report counts."""
    report = client.experiment_report(NAME)
    metric = next(m for m in report.metrics if m.metric.name == METRIC)
    return sum(arm.observations for arm in metric.all.arms)
