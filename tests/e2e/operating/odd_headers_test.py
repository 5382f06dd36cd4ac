"""Headers that no client of gRPC sends."""

from pathlib import Path

import pytest
from epikv.testing import Daemon
from raw_http2 import RawHttp2

LIST_MODELS = "/epikv.v1.ModelService/ListModels"


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
