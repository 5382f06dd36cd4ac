"""Twice as much as the daemon can do, for a while: who is refused, who is served, what is left."""

import random
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import grpc
from epikv import Client, RpcError, Scheduling, Stop
from epikv.sample import problem
from epikv.scrape import Page, scrape
from epikv.testing import Daemon

SECONDS = 20
PLACES = 4
QUEUE = 8
FLAGS = [
    "--threads=1",
    f"--max_running_requests={PLACES}",
    f"--max_queued_requests={QUEUE}",
    "--priority_ageing_seconds=1",
]
PROMPT = " ".join(problem(9).prompt.split(" ")[:40])
STOP = Stop(max_output_tokens=300)
PRIORITIES = ("low", "normal", "high")


def ask(client: Client, timeout: float | None = None, number: int = 0) -> str:
    """How it ended: "ok", or the reason that the server gave, or the code."""
    scheduling = Scheduling(PRIORITIES[number % 3], tenant=f"tenant {number % 5}")
    try:
        result = client.generate_once(PROMPT, stop=STOP, scheduling=scheduling, timeout=timeout)
    except RpcError as error:
        if error.reason in ("QUEUE_FULL", "DEADLINE_INFEASIBLE"):  # at the door, or in the queue
            assert error.retry_delay is not None and 0 < error.retry_delay <= 300
        if error.reason == "DEADLINE_INFEASIBLE":
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        return error.reason or error.code.name
    assert result.summary is not None and result.accepted is not None
    assert result.summary.timings.queue is not None
    return "ok"


def capacity(client: Client) -> float:
    """Requests a second, as many at once as there are places."""
    begin, done = time.monotonic(), 0
    with ThreadPoolExecutor(PLACES) as pool:
        while time.monotonic() < begin + 2:
            assert set(pool.map(lambda _: ask(client), range(PLACES))) == {"ok"}
            done += PLACES
    return done / (time.monotonic() - begin)


def idle_median(client: Client) -> float:
    times = []
    for _ in range(9):
        begin = time.monotonic()
        assert ask(client) == "ok"
        times.append(time.monotonic() - begin)
    return statistics.median(times)


class Scraper(threading.Thread):
    """Looks at the metrics while requests come and go."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._ended = threading.Event()
        self.pages: list[Page] = []

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self.pages.append(scrape(self._address))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def test_twice_the_capacity_is_accounted_for(sample_model: Path) -> None:
    with Daemon(sample_model, *FLAGS) as daemon, daemon.client() as client:
        timeout = 3 * idle_median(client)
        rate = 2 * capacity(client)
        before = scrape(daemon.metrics)
        rng = random.Random(5)
        begin = due = time.monotonic()
        calls = []
        with ThreadPoolExecutor(256) as pool, Scraper(daemon.metrics) as scraper:
            while due < begin + SECONDS:
                time.sleep(max(0, due - time.monotonic()))
                calls.append(pool.submit(ask, client, timeout, len(calls)))
                due += rng.expovariate(rate)
            ends = Counter(call.result() for call in calls)
        settled = time.monotonic() + 30
        while (after := scrape(daemon.metrics)).total("epikv_requests_running"):
            assert time.monotonic() < settled
            time.sleep(0.05)

    added = after - before
    # Each was served, refused, dropped or cut off, and the server and its clients agree on it.
    assert set(ends) <= {"ok", "QUEUE_FULL", "DEADLINE_INFEASIBLE", "DEADLINE_EXCEEDED"}
    assert ends["ok"] > 0 and ends["ok"] < len(calls)
    rejected = added.total("epikv_requests_rejected_total")
    finished = added.total("epikv_requests_finished_total")
    reached = added.total("epikv_grpc_requests_total")
    assert rejected + finished == reached
    # A client's clock may run out before its request is on the way.
    assert 0 <= len(calls) - reached <= ends["DEADLINE_EXCEEDED"]
    # Nor is a deadline told from a change of mind where a request was long on its way.
    assert added.total("epikv_requests_finished_total", reason="cancelled") <= len(calls) / 50
    assert added.total("epikv_requests_finished_total", reason="error") == 0
    assert added.total("epikv_requests_rejected_total", reason="queue_full") >= ends["QUEUE_FULL"]
    # Deadlines were known in advance to be missed.
    assert ends["DEADLINE_INFEASIBLE"] > 0
    # The queue is bounded, its gauges too, and all answered throughout. A full one takes those of a
    # tenant that has less than its share of it, up to twice the limit.
    waited = [page.total("epikv_requests_waiting") for page in scraper.pages]
    assert len(waited) > 20 and 0 < max(waited) <= 2 * QUEUE
    assert max(page.total("epikv_requests_running") for page in scraper.pages) <= PLACES
    assert any(page.value("epikv_predicted_wait_seconds") > 0 for page in scraper.pages)
    # Nothing is left.
    assert after.total("epikv_requests_waiting") == 0
    assert after.value("epikv_predicted_wait_seconds") == 0
    free = sum(after.value("epikv_kv_bytes", state=s) for s in ("free", "cached_prefix"))
    assert free == after.value("epikv_kv_capacity_bytes") > 0
