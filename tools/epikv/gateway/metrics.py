"""Series of a gateway, for Prometheus."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@contextmanager
def shared_among_workers() -> Iterator[None]:
    """For workers that begin meanwhile: what one of them is asked for is of all."""
    with tempfile.TemporaryDirectory(prefix="epikv-gateway-") as folder:
        os.environ[_FOLDER] = folder
        yield


def shared() -> bool:
    """Whether this process is one of several workers."""
    return _FOLDER in os.environ


def forget_worker(pid: int | None) -> None:
    """What one that has died had in flight is no longer; what it has counted stays."""
    mark_process_dead(pid)


class Metrics:
    """Of one application. Routes and statuses are few: a path that is not known is "other"."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "epikv_gateway_requests",
            "Requests that have ended, by route and HTTP status; 499: the client had gone.",
            ("route", "status"),
            registry=self._registry,
        )
        self.first_byte = Histogram(
            "epikv_gateway_first_byte_seconds",
            "From a request's first byte to its answer's.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "epikv_gateway_requests_in_flight",
            "Requests that have begun and not ended.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    def page(self) -> bytes:
        if not shared():
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
