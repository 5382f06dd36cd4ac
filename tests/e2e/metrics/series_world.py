"""A daemon whose page is looked at while it is asked for something."""

import contextlib
import re
import sqlite3
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
from epikv import Client, Experiment, Output, Patience, RpcError, Scheduling, Stop, Stream
from epikv.connection import connect
from epikv.testing import PACED, Daemon
from epikv.v1 import admin_pb2_grpc, experiment_pb2_grpc
from metrics_page import Family, Series, moved, parse, skim
from series_families import CALLS

GENEROUS_SECONDS = 30
BETWEEN_LOOKS = 0.05  # seconds
PROMPT = [5] * 40
AT_ONCE = Patience(busy=0, unknown=0)

# More than what lies in the buffers between the daemon and a client that does not read.
MUCH = Output(top_logprobs=20, residual_steps=True)


def text(daemon: Daemon) -> str:
    with urllib.request.urlopen(f"http://{daemon.metrics}/metrics", timeout=30) as reply:
        return reply.read().decode()


def page(daemon: Daemon) -> dict[str, Family]:
    return parse(text(daemon))


@dataclass
class Files:
    """What daemons are started with."""

    model: Path
    artefacts: Path | None
    tokens: Path
    # Models: damaged, odd in what it makes of some tokens, and of a kind that is not built.
    damaged: Path
    odd: Path
    unreadable: Path
    store: Path  # of experiments

    @property
    def spool(self) -> Path:
        return self.store.with_name(self.store.name + ".spool")


class World:
    """A daemon, the calls that it gets, and which series move meanwhile."""

    def __init__(
        self,
        daemon: Daemon,
        files: Files,
        token: str = "",
        user: str = "",
        experimenter: str = "",
    ) -> None:
        """`token`, of an operator, and those of others: empty where the daemon asks for none."""
        self.daemon, self.files, self.token, self.user = daemon, files, token, user
        self.client = Client(daemon.grpc, token=token)
        self.paced = Client(daemon.grpc, PACED, token=token)
        self.experimenter = Client(daemon.grpc, token=experimenter)
        self.experiments = experiment_pb2_grpc.ExperimentServiceStub(
            connect(daemon.grpc, token=experimenter)
        )
        self.admin = admin_pb2_grpc.AdminServiceStub(connect(daemon.admin, token=token))
        self.page = page(daemon)
        self.bound = int(self.page["epikv_metrics_series"].values[frozenset()])
        self.moved: dict[str, set[Series]] = defaultdict(set)
        self._scenario = ""

    def run(self, scenario: Callable[["World"], None]) -> None:
        self._scenario = scenario.__name__
        self._settle()
        self.moved[self._scenario].clear()
        scenario(self)
        self.until("epikv_requests_running", 0)
        self._settle()

    def _settle(self) -> None:
        """Looks until the access log has given up the line of every call."""
        deadline = time.monotonic() + GENEROUS_SECONDS
        self.look()
        while len({self.value(family) for family in CALLS}) > 1:
            assert time.monotonic() < deadline, {f: self.value(f) for f in CALLS}
            time.sleep(BETWEEN_LOOKS)
            self.look()

    def look(self) -> None:
        self._take(text(self.daemon))

    def _take(self, answer: str) -> None:
        before, self.page = self.page, skim(answer)
        self.moved[self._scenario] |= moved(before, self.page)

    def value(self, family: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        if family not in self.page:
            return 0
        values = self.page[family].values.items()
        return sum(v for has, v in values if labels.items() <= dict(has).items())

    def until(self, family: str, value: float, **labels: str) -> None:
        """Of a counter or gauge. Looks at the page that shows it."""
        deadline = time.monotonic() + GENEROUS_SECONDS
        pairs = [f'{label}="{wanted}"' for label, wanted in labels.items()]
        while True:
            answer = text(self.daemon)
            lines = [line for line in answer.splitlines() if re.match(rf"{family}\b", line)]
            found = [line for line in lines if all(pair in line for pair in pairs)]
            if sum(float(line.rpartition(" ")[2]) for line in found) == value:
                return self._take(answer)
            assert time.monotonic() < deadline, f"{family} {labels}: not {value} but {found}"
            time.sleep(BETWEEN_LOOKS)

    def until_more(self, family: str, **labels: str) -> None:
        """Looks until it is more than at the last look."""
        before = self.value(family, **labels)
        deadline = time.monotonic() + GENEROUS_SECONDS
        while self.value(family, **labels) <= before:
            assert time.monotonic() < deadline, f"{family} {labels} stays {before}"
            time.sleep(BETWEEN_LOOKS)
            self.look()

    def take_part(self, request_id: str, tokens: int = 80, **context: bool | str) -> str:
        """The arm of a request, which is its own unit."""
        result = self.experimenter.generate_once(
            PROMPT,
            stop=Stop(tokens, min_output_tokens=tokens, ignore_eos=True),
            experiment=Experiment(**context),
            model="sample",
            request_id=request_id,
        )
        assert result.accepted is not None
        return result.accepted.arm

    def record(self, request_id: str, metric: str, value: float, key: str = "") -> bool:
        """Whether the outcome is in the spool."""
        client = self.experimenter
        return client.record_outcome(request_id, metric, value, key=key, patience=AT_ONCE).spooled

    @contextlib.contextmanager
    def store_away(self) -> Iterator[None]:
        """Nobody can write to it."""
        with contextlib.closing(sqlite3.connect(self.files.store, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield

    def hold(
        self, tokens: int, priority: str = "normal", request_id: str = "", model: str = "sample"
    ) -> Stream:
        """A request of so many tokens of KV, whose client does not read."""
        stop = Stop(tokens - len(PROMPT), min_output_tokens=tokens - len(PROMPT), ignore_eos=True)
        return self.paced.generate(
            PROMPT,
            stop=stop,
            output=MUCH,
            scheduling=Scheduling(priority),
            request_id=request_id,
            model=model,
        )

    def running(self, *tokens: int, priorities: Sequence[str] = ()) -> list[Stream]:
        """Held, and admitted in this order."""
        streams = []
        for number, priority in zip_longest(tokens, priorities, fillvalue="normal"):
            streams.append(self.hold(number, priority))
            self.until("epikv_requests_running", self.value("epikv_requests_running") + 1)
        return streams

    def leave(self, *streams: Stream) -> None:
        for stream in streams:
            stream.cancel()
        self.until("epikv_requests_running", 0)


def refused(reason: str, call: Callable[[], object]) -> None:
    with pytest.raises(RpcError) as caught:
        call()
    assert caught.value.reason.lower() == reason, caught.value
