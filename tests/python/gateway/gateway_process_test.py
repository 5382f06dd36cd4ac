"""The gateway's process before stand-ins of the daemon: how it ends, and what it notices."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import fake_epikvd
import grpc
import pytest
from epikv.cli.gateway import at
from epikv.testing import Gateway
from epikv.v1 import generation_pb2_grpc
from waiting import eventually

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "endless", "temperature": 0}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.text)["error"]


def ask(gateway: Gateway, path: str, body: Any = None) -> Answer:
    connection = http.client.HTTPConnection(gateway.address, timeout=30)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body))
        reply = connection.getresponse()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        return Answer(reply.status, headers, reply.read().decode())
    finally:
        connection.close()


def test_what_is_cut_at_the_end_is_told_so() -> None:
    with (
        fake_epikvd.serve() as fake,
        Gateway(fake.address, flags=("--drain-seconds=1",)) as gateway,
        ThreadPoolExecutor() as pool,
    ):
        whole = pool.submit(ask, gateway, COMPLETIONS, ENDLESS)
        stream = pool.submit(ask, gateway, COMPLETIONS, {**ENDLESS, "stream": True})
        eventually(lambda: len(fake.requests) == 2)
        gateway.terminate()
        answer = whole.result()
        assert (answer.status, answer.error["type"]) == (503, "server_error")
        assert answer.error["code"] == "draining" and answer.headers["retry-after"] == "1"
        *_, error, done, end = stream.result().text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"] == answer.error
        assert (done, end) == ("data: [DONE]", "")


def test_who_leaves_is_noticed_with_a_second_request_behind_the_first() -> None:
    with fake_epikvd.serve() as fake, Gateway(fake.address) as gateway:
        host, _, port = gateway.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(posted(ENDLESS))
            eventually(lambda: len(fake.requests) == 1)
            client.sendall(posted(ENDLESS))
        assert fake.ended.wait(5), "it would end by itself after ten seconds"
        assert len(fake.requests) == 1


def posted(body: Any) -> bytes:
    data = json.dumps(body)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return (head + data).encode()


def test_what_a_killed_worker_had_in_flight_is_no_longer() -> None:
    with (
        fake_epikvd.serve() as fake,
        Gateway(fake.address, flags=("--workers=2",)) as gateway,
        ThreadPoolExecutor() as pool,
    ):
        asked = pool.submit(ask, gateway, COMPLETIONS, ENDLESS)
        eventually(lambda: "epikv_gateway_requests_in_flight 2.0" in page_of(gateway))
        for worker in workers_of(gateway):
            os.kill(worker, signal.SIGKILL)
        with pytest.raises(OSError):
            asked.result()
        eventually(lambda: "epikv_gateway_requests_in_flight 1.0" in page_of(gateway), seconds=20)


def test_an_address_is_taken_before_it_is_served() -> None:
    """A gateway waits for its models: nobody else gets its address meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "127.0.0.1:{1}".format(*free.getsockname())
    waits = at(address)
    with pytest.raises(
        click.ClickException, match=f"cannot listen at {address}: Address already in use"
    ):
        at(address)
    del waits


def page_of(gateway: Gateway) -> str:
    """Of its series; empty: the worker that was to tell them has been killed."""
    try:
        return ask(gateway, "/metrics").text
    except OSError:
        return ""


def workers_of(gateway: Gateway) -> list[int]:
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"spawn_main" in cmdline(pid)]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_as_soon_as_the_address_is_told_ends_it_in_order(workers: int) -> None:
    code = f"""
import builtins, os, signal
from epikv.cli import main
def told(line, **_):
    os.write(1, line.encode())
    os.kill(os.getpid(), signal.SIGTERM)
builtins.print = told
main(["gateway", "--listen=127.0.0.1:0", "--workers={workers}"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert b"http" in done.stdout
    assert done.returncode == 0, done.stderr


class KnowsNoModel(generation_pb2_grpc.GenerationServiceServicer):
    def GenerateOnce(self, request, context):
        context.abort(grpc.StatusCode.NOT_FOUND, f"no model '{request.model}'")


def test_a_daemon_that_is_away_may_have_the_model() -> None:
    with fake_epikvd.serve(generation=KnowsNoModel()) as fake, socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # nothing listens there
        away = f"127.0.0.1:{other.getsockname()[1]}"
        body = {"model": "x", "prompt": "1"}
        # The model is looked for to learn its temperature, or by the request itself.
        bodies = (body, {**body, "temperature": 0})
        with Gateway(fake.address, away) as gateway:
            for asked in bodies * 2:
                answer = ask(gateway, COMPLETIONS, asked)
                assert (answer.status, answer.error["code"]) == (503, "unavailable")
                assert "'x'" in answer.error["message"]
                assert answer.headers["retry-after"] == "1"
        with Gateway(fake.address) as gateway:
            assert [ask(gateway, COMPLETIONS, asked).status for asked in bodies] == [404, 404]
        with Gateway(away) as gateway:
            answer = ask(gateway, COMPLETIONS, body)
            assert (answer.status, answer.error["message"]) == (503, "no daemon can be reached")
            assert answer.headers["retry-after"] == "1"
