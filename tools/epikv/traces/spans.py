"""Lines of the access log as spans."""

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

# Fields of the log that go with a request's span, by OpenTelemetry's name where it has one.
_NAMES = {
    "identity": "enduser.id",
    "model": "gen_ai.request.model",
    "operation": "gen_ai.operation.name",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "peer": "network.peer.address",
    "reason": "error.type",
}
_KEPT = (
    "tenant request_id policy arm budget_tokens cached_prompt_tokens evicted_tokens rounds"
    " peak_tokens ttft_seconds eviction_seconds"
).split()
_PACKAGES = {"VllmEngine": "vllm.grpc.engine", "OpenRcaService": "xds.service.orca.v3"}
# Status codes of gRPC that are the server's, as OpenTelemetry's conventions for RPC have them.
_SERVER_ERRORS = {
    "UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
}  # fmt: skip
_CODES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED"
    " RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE"
    " DATA_LOSS UNAUTHENTICATED"
).split()


def is_wanted(entry: Mapping[str, Any], share: float) -> bool:
    """Whether a call's spans are shipped: as its caller says; of traces that begin at the daemon, this
    share, chosen by their ids."""
    if "parent_span_id" in entry:
        return bool(entry.get("sampled", False))
    # The lower 56 bits are random, as W3C's trace context has it.
    return int(entry["trace_id"][-14:], 16) < share * (1 << 56)


def spans_of(entry: Mapping[str, Any], resource: Resource) -> Iterator[ReadableSpan]:
    """A call's span, and below it those of its queue, prefill and decode, with rounds of eviction as
    events. Raises KeyError or ValueError: it is no line of the access log.

    A span has the same id whenever it is made of the same line.
    """
    begin = _nanoseconds(entry["time"])
    context = _context(entry["trace_id"], entry["span_id"])
    parent = entry.get("parent_span_id")
    service, method = entry["method"].split("/")
    service = f"{_PACKAGES.get(service, 'epikv.v1')}.{service}"
    code = entry["code"]
    attributes: dict[str, Any] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": _CODES.index(code),
    }
    attributes |= {name: entry[field] for field, name in _NAMES.items() if field in entry}
    attributes |= {f"epikv.{field}": entry[field] for field in _KEPT if field in entry}
    if "finish_reason" in entry:
        attributes["gen_ai.response.finish_reasons"] = [entry["finish_reason"]]
    failed = code in _SERVER_ERRORS
    yield ReadableSpan(
        name=f"{service}/{method}",
        context=context,
        parent=None if parent is None else _context(entry["trace_id"], parent, remote=True),
        resource=resource,
        attributes=attributes,
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, entry.get("reason", code)) if failed else Status(),
        start_time=begin,
        end_time=begin + _of_seconds(entry.get("seconds", 0)),
    )
    at = begin + _of_seconds(entry.get("read_seconds", 0))  # when the request had come
    rounds = [
        (at + _of_seconds(each["end_seconds"]), each) for each in entry.get("eviction_rounds", ())
    ]
    for name in ("queue", "prefill", "decode"):
        seconds = entry.get(f"{name}_seconds", 0)
        if not seconds:
            continue
        end = at + _of_seconds(seconds)
        last = name == "decode"
        yield ReadableSpan(
            name=name,
            context=_context(entry["trace_id"], _derived(entry["span_id"], name)),
            parent=context,
            resource=resource,
            events=[
                _round(when, each) for when, each in rounds if at < when and (last or when <= end)
            ],
            start_time=at,
            end_time=end,
        )
        at = end


def _round(when: int, told: Mapping[str, Any]) -> Event:
    return Event(
        "eviction",
        {
            "epikv.evicted_tokens": told.get("evicted_tokens", 0),
            "epikv.seconds": told.get("seconds", 0.0),
        },
        timestamp=when,
    )


def _context(trace: str, span: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), remote, TraceFlags(TraceFlags.SAMPLED))


def _derived(span: str, name: str) -> str:
    return hashlib.sha256(f"{span} {name}".encode()).hexdigest()[:16]


def _nanoseconds(time: str) -> int:
    """Of protobuf's JSON, which has up to nine digits behind the second."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * 10**9 + int(fraction.ljust(9, "0") or 0)


def _of_seconds(seconds: float) -> int:
    return round(seconds * 1e9)
