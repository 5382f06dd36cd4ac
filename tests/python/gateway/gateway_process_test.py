"""The gateway's process before stand-ins of the daemon: how it ends, and what it notices."""

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fake_epikvd
from epikv.testing import Gateway
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
