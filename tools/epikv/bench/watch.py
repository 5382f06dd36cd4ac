"""`python -m epikv.bench.watch SERVER METRICS PERIOD`: what a daemon answers while it is loaded.

Every PERIOD seconds a health check and a scrape, in a process of their own so that the load's work
does not delay them, until stdin ends; then one line of JSON. Latencies count from when each was due:
a probe that hangs delays those behind it, and that is counted.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epikv import processes
from epikv.connection import Tls, connect
from epikv.scrape import fetch

Answer = TypeVar("Answer")

TIMEOUT_SECONDS = 30

# What is kept of a page. Series that differ by labels, models too, are summed.
_GAUGES = {
    "resident_bytes": "process_resident_memory_bytes",
    "waiting": "epikv_requests_waiting",
    "running": "epikv_requests_running",
}


@dataclass
class Readings:
    """Each is (when it was due, by the monotonic clock, and what was found)."""

    health: list[tuple[float, float]] = field(default_factory=list)  # seconds until the answer
    scrapes: list[tuple[float, float]] = field(default_factory=list)  # the same
    gauges: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cpu_seconds: float = 0


class Watch:
    """Probes a daemon until the `with` block ends; then `readings` holds what it found."""

    def __init__(self, server: str, metrics: str | None, period: float) -> None:
        self._command = [sys.executable, "-m", __name__, server, metrics or "", str(period)]
        self.readings = Readings()

    def __enter__(self) -> Self:
        self._process = processes.start(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # a Ctrl-C at the terminal is for the bench
        )
        return self

    def __exit__(self, *_: object) -> None:
        found, _ = self._process.communicate()
        if self._process.returncode == 0:
            self.readings = Readings(**json.loads(found))
        else:
            status = f"the watch ended with status {self._process.returncode}"
            self.readings = Readings(failures=[status])


def _probe(
    ask: Callable[[], Answer],
    keep: Callable[[float, float, Answer], None],
    period: float,
    over: threading.Event,
    failures: list[str],
) -> None:
    """Asks every `period` seconds. keep: when it was due, how long it took, the answer."""
    due = time.monotonic()
    while not over.wait(max(due - time.monotonic(), 0)):
        try:
            answer = ask()
            keep(due, time.monotonic() - due, answer)
        except (grpc.RpcError, OSError) as error:
            failures.append(f"after {time.monotonic() - due:.1f} s: {error}")
        due += period


def _gauges(page: str) -> dict[str, float]:
    sums = dict.fromkeys(_GAUGES.values(), 0.0)
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        if name in sums:
            sums[name] += float(value)
    return {gauge: sums[name] for gauge, name in _GAUGES.items()}


def main() -> None:
    server, metrics, period = sys.argv[1], sys.argv[2], float(sys.argv[3])
    readings, over = Readings(), threading.Event()

    def keep_health(due: float, seconds: float, _: health_pb2.HealthCheckResponse) -> None:
        readings.health.append((due, seconds))

    def keep_page(due: float, seconds: float, page: str) -> None:
        readings.scrapes.append((due, seconds))
        readings.gauges.append((due, _gauges(page)))

    with connect(server, tls=Tls.from_environment()) as channel:  # health asks for no token
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        check = partial(health.Check, request, timeout=TIMEOUT_SECONDS)
        check(wait_for_ready=True)  # connecting is no part of an answer
        probes: list[tuple[Callable[[], Any], Callable[[float, float, Any], None]]] = [
            (check, keep_health)
        ]
        if metrics:
            probes.append((partial(fetch, metrics), keep_page))
        threads = [
            threading.Thread(target=_probe, args=(*probe, period, over, readings.failures))
            for probe in probes
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        over.set()
        for thread in threads:
            thread.join()
    readings.cpu_seconds = time.process_time()
    json.dump(asdict(readings), sys.stdout)


if __name__ == "__main__":
    main()
