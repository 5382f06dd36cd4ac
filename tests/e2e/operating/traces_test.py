"""Spans that `epikv traces` ships from a daemon's access log, as a collector decodes them."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from epikv import Chat, Client, RpcError, Stop
from epikv.connection import connect
from epikv.testing import Daemon
from epikv.traces.log_file import LONGEST
from epikv.v1 import generation_pb2, generation_pb2_grpc, kv_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from waiting import eventually

EPIKV = (sys.executable, "-c", "from epikv.cli import main; main()")
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = [5 + place % 90 for place in range(200)]


class Collector(ThreadingHTTPServer):
    """OTLP over HTTP: keeps what it gets, unless it is told to fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.fails = False
        self.refused = 0

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(
            self.rfile.read(int(self.headers["content-length"]))
        )
        if self.path != "/v1/traces" or self.server.fails:
            self.server.refused += 1
            self.send_response(400)
        else:
            for of in request.resource_spans:
                attributes = {each.key: each.value.string_value for each in of.resource.attributes}
                self.server.services.add(attributes["service.name"])
                for scope in of.scope_spans:
                    self.server.spans += scope.spans
            self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def log(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a daemon that has ended: a request of a sampled trace that evicts, one of a trace that is not
    sampled, one that begins a trace, and one that fails by its deadline."""
    path = tmp_path_factory.mktemp("traces") / "access.log"
    flags = ("--threads=1", "--prefill_chunk_tokens=64", f"--access_log={path}")
    with Daemon(sample_model, *flags) as daemon:
        evicting = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT),
            kv=kv_pb2.KvOptions(policy="sliding", max_tokens=150, protect_prompt=False),
            stop=generation_pb2.StopParams(max_output_tokens=60, ignore_eos=True),
        )
        with connect(daemon.grpc) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for sampled in ("01", "00"):
                traced = [("traceparent", f"00-{TRACE}-{CALLER}-{sampled}")]
                stub.GenerateOnce(evicting, metadata=traced)
        with Client(daemon.grpc) as client:
            client.generate_once(Chat([{"role": "user", "content": "hello"}]), stop=Stop(2))
            with pytest.raises(RpcError):
                client.generate_once(PROMPT, stop=Stop(1000, min_output_tokens=1000), timeout=0.05)
    return path


def traces(log: Path, collector: Collector, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*EPIKV, "traces", str(log), "--endpoint", collector.url, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def attributes(span: Span | Span.Event) -> dict[str, object]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        assert kind is not None
        found[each.key] = getattr(each.value, kind)
    return found


def test_a_call_is_a_span_in_its_callers_trace(log: Path, collector: Collector) -> None:
    ended = traces(log, collector, "--share", "0")
    assert ended.returncode == 0, ended.stderr
    assert "1 calls as 4 spans; 3 not sampled, 0 lines damaged" in ended.stderr
    assert collector.services == {"epikvd"}
    call, *parts = collector.spans
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert call.name == "epikv.v1.GenerationService/GenerateOnce"
    assert call.kind == Span.SPAN_KIND_SERVER
    assert call.parent_span_id.hex() == CALLER
    told = attributes(call)
    assert told["rpc.grpc.status_code"] == 0
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.usage.output_tokens"] == 60
    assert told["epikv.policy"] == "sliding" and told["epikv.budget_tokens"] == 150
    assert [span.name for span in parts] == ["queue", "prefill", "decode"]
    assert {span.parent_span_id for span in parts} == {call.span_id}
    assert len({span.span_id for span in collector.spans}) == 4
    ends = [span.end_time_unix_nano for span in parts]
    assert [span.start_time_unix_nano for span in parts[1:]] == ends[:2], "one after the other"
    assert call.start_time_unix_nano <= parts[0].start_time_unix_nano
    assert ends[-1] <= call.end_time_unix_nano


def test_rounds_are_events_where_they_were(log: Path, collector: Collector) -> None:
    assert traces(log, collector, "--share", "0").returncode == 0
    [line] = [each for each in map(json.loads, log.read_text().splitlines()) if each.get("sampled")]
    assert line["rounds"] > 12 == len(line["eviction_rounds"]), "the first ones are told"
    of = {span.name: span.events for span in collector.spans}
    assert len(of["prefill"]) >= 1 and len(of["decode"]) >= 1
    events = [*of["prefill"], *of["decode"]]
    assert len(events) == 12
    assert sum(attributes(event)["epikv.evicted_tokens"] for event in events) == sum(  # type: ignore[misc]
        each["evicted_tokens"] for each in line["eviction_rounds"]
    )
    for span in collector.spans:
        for event in span.events:
            assert span.start_time_unix_nano < event.time_unix_nano
    assert [event.time_unix_nano for event in events] == sorted(
        event.time_unix_nano for event in events
    )


def test_who_begins_a_trace_is_sampled_by_share(log: Path, collector: Collector) -> None:
    assert traces(log, collector).returncode == 0
    calls = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert len(calls) == 3, "all but the one whose caller does not sample"
    chat, late = (call for call in calls if not call.parent_span_id)
    assert attributes(chat)["gen_ai.operation.name"] == "chat"
    assert chat.status.code == Status.STATUS_CODE_UNSET
    assert late.status.code == Status.STATUS_CODE_ERROR
    assert attributes(late)["rpc.grpc.status_code"] == 4


def test_what_is_no_line_is_passed_over(log: Path, collector: Collector, tmp_path: Path) -> None:
    damaged = tmp_path / "log"
    lines = log.read_text().splitlines(keepends=True)
    deep, long = (
        "[" * 200_000 + "\n",
        "7" * (5 * LONGEST // 2) + "\n",
    )  # the latter comes in three pieces
    strange = ['{"time": "x"}\n', "\n", "7\n", deep, long]
    damaged.write_text("".join([*strange, *lines, '{"time": "2026-']))
    ended = traces(damaged, collector)
    assert ended.returncode == 0
    assert "7 lines damaged" in ended.stderr
    assert ended.stderr.count("\n") == 2  # they are told of together
    assert len({span.trace_id for span in collector.spans}) == 3


def test_it_follows_a_log_that_is_rotated_and_goes_on_later(
    sample_model: Path, collector: Collector, tmp_path: Path
) -> None:
    """Nothing is lost nor sent twice: over a rename, an end, and a collector that was away."""
    log, state = tmp_path / "access.log", tmp_path / "state"
    command = [*EPIKV, "traces", str(log), "--endpoint", collector.url, "--follow", "--state"]
    asked: list[str] = []

    def seen() -> list[str]:
        names = [attributes(s).get("epikv.request_id") for s in collector.spans]
        return [str(name) for name in names if name is not None]

    with (
        Daemon(sample_model, "--threads=1", f"--access_log={log}") as daemon,
        Client(daemon.grpc) as client,
    ):

        def ask(count: int = 3) -> None:
            for _ in range(count):
                asked.append(f"r{len(asked)}")
                client.generate_once([5, 6], request_id=asked[-1], stop=Stop(1))

        ask()
        eventually(lambda: log.exists() and log.read_text().count("\n") == 3)
        shipper = subprocess.Popen([*command, str(state)])
        try:
            eventually(lambda: seen() == asked)
            log.rename(tmp_path / "old.log")
            ask()
            eventually(lambda: seen() == asked)
            collector.fails = True
            ask()
            eventually(lambda: collector.refused > 0)
        finally:
            shipper.send_signal(signal.SIGTERM)
            assert shipper.wait(20) == 0
        ask()
        collector.fails = False
        shipper = subprocess.Popen([*command, str(state)])
        try:
            eventually(lambda: len(seen()) >= len(asked))
            ask()
            eventually(lambda: len(seen()) >= len(asked))
        finally:
            shipper.terminate()
            assert shipper.wait(20) == 0
    assert seen() == asked
