"""Headers that no client of gRPC sends."""

from pathlib import Path

import pytest
from credentials import new_token
from epikv.testing import Daemon
from hpack import NeverIndexedHeaderTuple
from raw_http2 import RawHttp2, message_header
from waiting import eventually

LIST_MODELS = "/epikv.v1.ModelService/ListModels"
OK, RESOURCE_EXHAUSTED = "0", "8"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("te", "x"),
        (":scheme", "x"),
        ("grpclb_client_stats", "x"),
        ("grpc-timeout", "x"),
        ("content-type", "x"),
        ("grpc-encoding", "x"),
        ("grpc-tags-bin", "!"),
        ("x-bin", "!"),
        ("user-agent", "\xff"),
    ],
)
def test_odd_headers_end_their_call_alone(sample_model: Path, name: str, value: str) -> None:
    """CVE-2023-1428, CVE-2023-32732: with more headers than 8 KiB behind them, and without."""
    with Daemon(sample_model, "--threads=1") as daemon:
        for more in (0, 20000):
            with RawHttp2(daemon.grpc) as client:
                client.h2.config.validate_outbound_headers = False
                client.h2.config.normalize_outbound_headers = False
                headers = [(":method", "POST"), (":scheme", "http"), (":path", LIST_MODELS)]
                headers = [h for h in headers if h[0] != name] + [(name, value)]
                if more:
                    headers.append(("padding", "x" * more))
                stream = client.h2.get_next_available_stream_id()
                client.h2.send_headers(stream, headers)
                client.socket.sendall(client.h2.data_to_send())
                client.await_status(stream, 2)
            with daemon.client() as honest:
                assert honest.models()


@pytest.mark.parametrize("padding", [[9000], [500] * 20], ids=["long", "many"])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_headers_beyond_the_limit_end_their_connection(
    sample_model: Path, tmp_path: Path, padding: list[int], place: str
) -> None:
    """CVE-2023-32731, CVE-2024-7246: what of them is to go into the table of compressed headers may
    be left out by one end. Then eve's call, which sends a place in it, would be read as ann's."""
    ann, line = new_token("ann", "user")
    (tmp_path / "tokens").write_text(line)
    ann_says, eve_says = (("authorization", f"Bearer {token}") for token in (ann, "eve"))
    long = [NeverIndexedHeaderTuple(f"x-{i}", "x" * size) for i, size in enumerate(padding)]
    tokens = f"--auth_tokens_file={tmp_path / 'tokens'}"
    with (
        Daemon(sample_model, "--threads=1", tokens, token=ann) as daemon,
        daemon.client() as honest,
        RawHttp2(daemon.grpc) as client,
    ):
        assert honest.models()
        first = client.call(LIST_MODELS, ann_says)
        client.send(first, message_header(0), end=True)
        assert client.await_status(first, 10) == OK
        beside = client.call(LIST_MODELS, ann_says)
        over = client.call(
            LIST_MODELS, *([eve_says, *long] if place == "before" else [*long, eve_says])
        )
        eventually(lambda: client.receive(0.05) or client.closed)
        assert client.statuses[over] == client.statuses[beside] == RESOURCE_EXHAUSTED
        after = client.call(LIST_MODELS, eve_says)
        client.send(after, message_header(0), end=True)
        assert client.await_status(after, 1) is None
        assert honest.models()
