"""Sends spans of an access log to a collector."""

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from epikv.traces.log_file import LogFile
from epikv.traces.spans import is_wanted, spans_of

_log = logging.getLogger(__name__)
LINES = 256  # read at a time: so much is in memory
_LOOK_SECONDS = 0.5  # between looks at a log that has not grown
_MOST_PAUSE_SECONDS = 30.0  # between tries


@dataclass
class Shipped:
    """What became of lines."""

    calls: int = 0  # whose spans have gone out
    spans: int = 0
    left_out: int = 0  # not sampled
    damaged: int = 0  # no lines of an access log


class Shipper:
    """Nothing of a log is skipped: while the collector does not take spans it waits, and the log with it.
    One thread; `stop` comes from any."""

    def __init__(self, log: LogFile, endpoint: str | None, share: float, service: str) -> None:
        """endpoint: of OTLP over HTTP; None: as $OTEL_EXPORTER_OTLP_ENDPOINT says."""
        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        self._log = log
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=10)
        self._share = share
        self._resource = Resource.create(
            {"service.name": service, "service.version": version("epikv")}
        )
        self._stopping = threading.Event()
        self.shipped = Shipped()

    def run(self, *, follow: bool) -> None:
        """Until the log's end; with `follow`, until it is stopped."""
        while not self._stopping.is_set():
            lines = list(self._log.read(LINES))
            calls = self._calls_of(lines)
            if calls and not self._send([span for spans in calls for span in spans]):
                return  # they come again, from the place that was kept
            self.shipped.calls += len(calls)
            self.shipped.spans += sum(map(len, calls))
            if lines:
                self._log.keep_place()
            elif not follow:
                return
            else:
                self._stopping.wait(_LOOK_SECONDS)

    def stop(self) -> None:
        self._stopping.set()
        self._exporter.shutdown()

    def _calls_of(self, lines: Sequence[bytes]) -> list[list[ReadableSpan]]:
        """Spans of each call that is wanted."""
        calls = []
        damaged: list[tuple[bytes, Exception]] = []
        for line in lines:
            try:
                entry = json.loads(line)
                if is_wanted(entry, self._share):
                    calls.append(list(spans_of(entry, self._resource)))
                else:
                    self.shipped.left_out += 1
            except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
                damaged.append((line, error))
        if damaged:
            self.shipped.damaged += len(damaged)
            line, why = damaged[0]
            _log.warning("%d lines without spans, the first (%r): %.200r", len(damaged), why, line)
        return calls

    def _send(self, spans: list[ReadableSpan]) -> bool:
        """False: it was stopped first."""
        pause = 1.0
        while not self._stopping.is_set():
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                return True
            _log.warning("the collector took none of %d spans; again in %.0f s", len(spans), pause)
            self._stopping.wait(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)
        return False
