"""What a daemon with --load_reports tells balancers, as they read it."""

import base64
from pathlib import Path

import pytest
from epikv.connection import connect
from epikv.testing import Daemon
from epikv.v1 import generation_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from raw_http2 import RawHttp2, message_header

ONCE = "/epikv.v1.GenerationService/GenerateOnce"
MODELS = "/epikv.v1.ModelService/ListModels"
WATCH = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
OK, INVALID = "0", "3"


def report(data: bytes) -> Message:
    """An xds.data.orca.v3.OrcaLoadReport, by what the project of its name publishes."""
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="orca", syntax="proto3")
    message = file.message_type.add(name="OrcaLoadReport")
    entry = message.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    kinds = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind) in enumerate(
        [("key", kinds.TYPE_STRING), ("value", kinds.TYPE_DOUBLE)], 1
    ):
        entry.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    for number, name in ((6, "rps_fractional"), (7, "eps"), (9, "application_utilization")):
        message.field.add(
            name=name, number=number, type=kinds.TYPE_DOUBLE, label=kinds.LABEL_OPTIONAL
        )
    message.field.add(
        name="named_metrics",
        number=8,
        type=kinds.TYPE_MESSAGE,
        label=kinds.LABEL_REPEATED,
        type_name=".orca.OrcaLoadReport.NamedMetricsEntry",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("orca.OrcaLoadReport"))
    return kind.FromString(data)


def behind(client: RawHttp2, method: str, message: bytes, status: str) -> Message | None:
    stream = client.call(method)
    client.send(stream, message_header(len(message)) + message, end=True)
    assert client.await_status(stream, 30) == status
    trailer = client.trailers[stream].get(b"endpoint-load-metrics-bin")
    return (
        None if trailer is None else report(base64.b64decode(trailer + b"=" * (-len(trailer) % 4)))
    )


def ask(**kv: object) -> bytes:
    request = generation_pb2.GenerateRequest(text="1 2", kv=kv)
    request.stop.max_output_tokens = 2
    return request.SerializeToString()


def test_requests_and_watchers_are_told(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1", "--load_reports") as daemon:
        with RawHttp2(daemon.grpc) as client:
            told = behind(client, ONCE, ask(), OK)
            assert told is not None
            assert 0.08 < told.rps_fractional <= 0.1 and told.eps == 0  # type: ignore[attr-defined]
            assert 0 <= told.application_utilization < 0.5  # type: ignore[attr-defined]
            assert {"running_requests", "waiting_requests"} <= set(told.named_metrics)  # type: ignore[attr-defined]
            refused = behind(client, ONCE, ask(policy="none such"), INVALID)
            assert refused is not None and refused.eps == 0  # type: ignore[attr-defined]
            assert behind(client, MODELS, b"", OK) is None
        with connect(daemon.grpc) as channel:
            watched = channel.unary_stream(WATCH)(b"")
            first, second = report(next(watched)), report(next(watched))
            assert first.rps_fractional > second.rps_fractional > 0  # type: ignore[attr-defined]
            watched.cancel()


def test_nobody_is_told_unless_asked(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, RawHttp2(daemon.grpc) as client:
        assert behind(client, ONCE, ask(), OK) is None


@pytest.mark.parametrize("interval", [b"", b"\x0a\x02\x08\x78"], ids=["none", "two minutes"])
def test_a_watcher_does_not_hold_up_an_end(sample_model: Path, interval: bytes) -> None:
    """Drained, it is told to go within its interval; what is left of it ends with the port."""
    with Daemon(sample_model, "--threads=1", "--load_reports", "--drain_seconds=5") as daemon:
        with connect(daemon.grpc) as channel:
            watched = channel.unary_stream(WATCH)(interval)
            next(watched)
            assert daemon.stop() == 0
