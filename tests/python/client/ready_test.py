"""Waiting until a server is ready, with Client and with AsyncClient."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import fake_epikvd
import grpc
import pytest
from async_calls import GENEROUS_SECONDS, NOBODY, connected
from epikv import AsyncClient, Client, DeadlineExceeded, RpcError
from grpc_health.v1 import health_pb2

# A channel that tries again after a minute, if a client does not say otherwise.
SLOW = [("grpc.initial_reconnect_backoff_ms", 60_000)]


@pytest.fixture
def fake() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as running:
        yield running


def wait_blocking(address: str, timeout: float) -> None:
    """Then asks it something."""
    with Client(address, SLOW) as client:
        client.wait_ready(timeout)
        assert client.models()


def wait_async(address: str, timeout: float) -> None:
    """Then asks it something."""

    async def work(client: AsyncClient) -> None:
        await client.wait_ready(timeout)
        assert await client.models()

    connected(address, work, options=SLOW)


Wait = Callable[[str, float], None]
EITHER = pytest.mark.parametrize("wait", [wait_blocking, wait_async])


@EITHER
def test_ready_is_when_it_serves(fake: fake_epikvd.Fake, wait: Wait) -> None:
    serves = threading.Event()

    def serve() -> None:
        serves.set()
        fake.status.set("", health_pb2.HealthCheckResponse.SERVING)

    fake.status.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    timer = threading.Timer(0.3, serve)
    timer.start()
    wait(fake.address, GENEROUS_SECONDS)
    assert serves.is_set()
    timer.join()


@EITHER
def test_ready_is_when_it_is_there(wait: Wait) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        address = f"127.0.0.1:{place.getsockname()[1]}"
    ended = threading.Event()

    def serve() -> None:
        time.sleep(0.3)
        with fake_epikvd.serve(address):
            ended.wait(GENEROUS_SECONDS)

    server = threading.Thread(target=serve)
    server.start()
    try:
        wait(address, GENEROUS_SECONDS)
    finally:
        ended.set()
        server.join()


@EITHER
def test_one_that_does_not_serve_is_named(fake: fake_epikvd.Fake, wait: Wait) -> None:
    fake.status.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    message = f"{fake.address} is not ready after 2 s: its health is NOT_SERVING"
    with pytest.raises(DeadlineExceeded, match=message):
        wait(fake.address, 2)  # time for its answer


@EITHER
def test_one_that_is_not_there_is_named(wait: Wait) -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"{NOBODY} is not ready after 0.3 s: .*refused"):
        wait(NOBODY, 0.3)
    assert 0.25 < time.monotonic() - begin < GENEROUS_SECONDS / 2


@EITHER
def test_one_that_says_nothing_is_named(wait: Wait) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match=f"{address} is not ready after 0.3 s"):
            wait(address, 0.3)


@EITHER
def test_waiting_does_not_mend_a_port_without_health(wait: Wait) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with pytest.raises(RpcError) as caught:
            wait(address, GENEROUS_SECONDS)
    finally:
        server.stop(None).wait()
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
