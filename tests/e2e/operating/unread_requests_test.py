"""What a daemon reads, and holds in memory, of requests that it will not serve."""

import time
from pathlib import Path

import pytest
from credentials import new_token
from epikv.scrape import scrape
from epikv.testing import Daemon
from raw_http2 import RawHttp2, message_header

GENERATE = "/epikv.v1.GenerationService/GenerateOnce"
MIB = 1 << 20
UNAUTHENTICATED = "16"
GENEROUS_SECONDS = 60


HEADERS, CONTINUATION = 1, 9


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """Of HTTP/2, on stream 1."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + (1).to_bytes(4, "big") + payload


def never_indexed(name: bytes, value_bytes: int) -> bytes:
    """A header in HPACK, of which a part at least is there."""
    length, rest = bytearray(b"\x7f"), value_bytes - 127
    while rest >= 128:
        length.append(rest % 128 | 128)
        rest //= 128
    length.append(rest)
    return b"\x10" + bytes((len(name),)) + name + bytes(length) + bytes(min(value_bytes, MIB))


def resident(daemon: Daemon) -> float:
    return scrape(daemon.metrics).value("process_resident_memory_bytes")


def test_nothing_is_read_before_its_caller_was_admitted(sample_model: Path, tmp_path: Path) -> None:
    """Of a message of 4 MiB that lacks a byte, no more is taken than a stream's first window."""
    _, line = new_token("ann", "user")
    tokens = tmp_path / "tokens"
    tokens.write_text(line)
    with (
        Daemon(sample_model, "--threads=1", f"--auth_tokens_file={tokens}") as daemon,
        RawHttp2(daemon.grpc) as client,
    ):
        streams = [client.call(GENERATE) for _ in range(24)]
        rest = dict.fromkeys(streams, message_header(4 * MIB - 5) + bytes(4 * MIB - 6))
        for _ in range(20):
            for stream in streams:
                rest[stream] = client.send(stream, rest[stream])
            client.receive(0.05)
        assert {client.statuses.get(stream) for stream in streams} == {UNAUTHENTICATED}
        assert max(client.sent.values()) <= 64 << 10
        page = scrape(daemon.metrics)
        assert page.value("epikv_requests_rejected_total", reason="unauthenticated") == 24


def test_a_request_that_never_comes_is_given_up(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as daemon, RawHttp2(daemon.grpc) as client:
        stream = client.call(GENERATE)
        client.send(stream, message_header(100) + b"x")
        assert client.await_status(stream, 90) is not None
        assert not client.closed


@pytest.mark.parametrize("announced", [5 * MIB, 1 << 30])
def test_a_message_that_is_too_long_is_not_kept(sample_model: Path, announced: int) -> None:
    """gRPC keeps it all, however long, before it compares it with max_message_bytes."""
    flags = ("--threads=1", f"--max_unread_bytes={32 * MIB}")  # of one connection, a quarter
    with Daemon(sample_model, *flags) as daemon, RawHttp2(daemon.grpc) as client:
        before = resident(daemon)
        stream = client.call(GENERATE)
        most = min(announced, 256 * MIB)
        data = message_header(announced) + bytes(MIB)
        deadline = time.monotonic() + GENEROUS_SECONDS
        while client.sent[stream] < most and time.monotonic() < deadline:
            if stream in client.statuses or client.closed:
                break
            data = client.send(stream, data) or bytes(MIB)
            client.receive(0.001)
        grown = resident(daemon) - before
        assert grown < 64 * MIB, (client.sent, grown / MIB, client.statuses)
        cut = scrape(daemon.metrics).value(
            "epikv_connections_refused_total", port="clients", reason="unread_bytes"
        )
        told = client.sent, client.statuses, client.closed
        assert cut == (announced > 8 * MIB), told


@pytest.mark.parametrize("announced", [1 << 30, 4000])
def test_headers_without_end_are_cut(sample_model: Path, announced: int) -> None:
    """CVE-2023-33953: gRPC 1.51 keeps a header of any length, and any number of them, before it
    compares them with its limit: one of a gigabyte, or many of four kilobytes."""
    flags = ("--threads=1", f"--max_unread_bytes={32 * MIB}")
    with Daemon(sample_model, *flags) as daemon, RawHttp2(daemon.grpc) as client:
        before = resident(daemon)
        block = never_indexed(b"x", announced)
        frames = frame(HEADERS, 0, block[:16384]) + b"".join(
            frame(CONTINUATION, 0, block[at : at + 16384])
            for at in range(16384, min(len(block), MIB), 16384)
        )
        client.socket.settimeout(20)
        sent, most = 0, 0.0
        try:
            while sent < 256 * MIB:
                client.socket.sendall(frames)
                sent += len(frames)
                most = max(most, resident(daemon) - before)
                # What follows is more of the one header, or another one.
                more = bytes(16384) if announced > MIB else block
                frames = frame(CONTINUATION, 0, more) * 64
        except OSError:  # cut, or refused
            pass
        assert sent < 256 * MIB
        assert most < 96 * MIB, (sent / MIB, most / MIB)
        with daemon.client() as honest:
            assert honest.models()
