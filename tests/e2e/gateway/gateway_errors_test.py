"""Requests that are wrong: each gets a status, a type and a name of what is at fault, in OpenAI's body."""

import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from credentials import new_token
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import Daemon, DaemonError, Gateway
from openai import OpenAI, PermissionDeniedError, RateLimitError
from waiting import eventually

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "sample", "prompt": "1 2 3", "max_tokens": 1}
DEEP: Any = 1
for _ in range(60):
    DEEP = [DEEP]
HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.body) == {"error"}
        assert set(self.body["error"]) == {"message", "type", "param", "code"}
        return self.body["error"]


def ask(
    gateway: Gateway, path: str, body: Any = None, method: str | None = None, **headers: str
) -> Answer:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(gateway.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            status, found, text = reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        status, found, text = error.code, error.headers, error.read()
    return Answer(status, {k.lower(): v for k, v in found.items()}, json.loads(text))


def raw(gateway: Gateway, path: str, body: Any, headers: list[tuple[str, str]]) -> int:
    """The status, of headers that urllib would not send; 0: none."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    host, _, port = gateway.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        try:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
            answer = connection.recv(1 << 16)
        except OSError:
            return 0
    return int(answer.split()[1]) if answer else 0


# What is wrong: path, body, status, param, code, and a word of the message.
WRONG: dict[str, tuple[str, Any, int, str | None, str | None, str]] = {
    "no JSON": (COMPLETIONS, b"{", 400, None, None, "Invalid JSON"),
    "no object": (COMPLETIONS, [1], 400, None, None, "an object"),
    "nothing": (COMPLETIONS, b"", 400, None, None, "Invalid JSON"),
    "no prompt": (COMPLETIONS, {"model": "sample"}, 400, "prompt", None, "Field required"),
    "empty prompt": (COMPLETIONS, {**GOOD, "prompt": ""}, 400, "prompt", "invalid_request", ""),
    "no prompts": (COMPLETIONS, {**GOOD, "prompt": []}, 400, "prompt", None, "must be text"),
    "many prompts": (COMPLETIONS, {**GOOD, "prompt": ["1"] * 129}, 400, "prompt", None, "1 to 128"),
    "prompts of two kinds": (
        COMPLETIONS,
        {**GOOD, "prompt": ["1", 2]},
        400,
        "prompt",
        None,
        "item 1",
    ),
    "no messages": (CHATS, {"model": "sample", "messages": []}, 400, "messages", None, ""),
    "a role": (
        CHATS,
        {"model": "sample", "messages": [{"role": "king", "content": "x"}]},
        400,
        "messages.0.role",
        None,
        "",
    ),
    "an image": (
        CHATS,
        {
            "model": "sample",
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ],
        },
        400,
        "messages.0.content.0.type",
        None,
        "text",
    ),
    "two users": (
        CHATS,
        {"model": "sample", "messages": HELLO * 2},
        400,
        "messages[1].role",
        None,
        "turns",
    ),
    "unknown model": (COMPLETIONS, {**GOOD, "model": "x"}, 404, None, "model_not_found", "'x'"),
    "unknown model, as the daemon says": (
        COMPLETIONS,
        {**GOOD, "model": "x", "temperature": 0},
        404,
        None,
        "model_not_found",
        "'x'",
    ),
    "unknown field": (COMPLETIONS, {**GOOD, "temprature": 1}, 400, "temprature", None, ""),
    "temperature": (COMPLETIONS, {**GOOD, "temperature": -1}, 400, "temperature", None, ""),
    "a temperature in words": (
        COMPLETIONS,
        {**GOOD, "temperature": "hot"},
        400,
        "temperature",
        None,
        "valid number",
    ),
    "NaN": (
        COMPLETIONS,
        b'{"model": "sample", "prompt": "1", "top_p": NaN}',
        400,
        None,
        None,
        "",
    ),
    "top_p": (COMPLETIONS, {**GOOD, "top_p": 2}, 400, "top_p", None, ""),
    "n": (COMPLETIONS, {**GOOD, "n": 0}, 400, "n", None, ""),
    "many": (COMPLETIONS, {**GOOD, "n": 17}, 400, "n", None, ""),
    "no tokens": (COMPLETIONS, {**GOOD, "max_tokens": 0}, 400, "max_tokens", None, "echo"),
    "negative tokens": (COMPLETIONS, {**GOOD, "max_tokens": -1}, 400, "max_tokens", None, ""),
    "more than the context": (
        COMPLETIONS,
        {**GOOD, "max_tokens": 5000},
        400,
        "max_tokens",
        "context_length_exceeded",
        "1280",
    ),
    "a prompt beyond it": (
        COMPLETIONS,
        {**GOOD, "prompt": [5] * 3000},
        400,
        "prompt",
        "context_length_exceeded",
        "1280",
    ),
    "a token": (COMPLETIONS, {**GOOD, "prompt": [10**6]}, 400, "prompt.ids[0]", "token_range", ""),
    "a large token": (COMPLETIONS, {**GOOD, "prompt": [2**40]}, 400, "prompt", None, "item 0"),
    "too many stop strings": (COMPLETIONS, {**GOOD, "stop": ["x"] * 17}, 400, "stop", None, "16"),
    "best of": (COMPLETIONS, {**GOOD, "best_of": 3}, 400, "best_of", None, ""),
    "suffix": (COMPLETIONS, {**GOOD, "suffix": "x"}, 400, "suffix", None, ""),
    "echo of a stream": (
        COMPLETIONS,
        {**GOOD, "echo": True, "stream": True, "logprobs": 1},
        400,
        "echo",
        None,
        "",
    ),
    "bias": (COMPLETIONS, {**GOOD, "logit_bias": {"x": 1}}, 400, None, None, "invalid literal"),
    "policy": (
        COMPLETIONS,
        {**GOOD, "kv": {"policy": "epikv_flt", "budget": 64}},
        400,
        "kv.policy",
        None,
        "epikv_flat",
    ),
    "budget": (
        COMPLETIONS,
        {**GOOD, "kv": {"policy": "epikv_flat", "budget": 1}},
        400,
        "kv.budget",
        "kv_budget",
        "",
    ),
    "an option of kv": (
        COMPLETIONS,
        {**GOOD, "kv": {"polcy": "sliding"}},
        400,
        "kv.polcy",
        None,
        "known",
    ),
    "no schema": (
        CHATS,
        {"model": "sample", "messages": HELLO, "response_format": {"type": "json_schema"}},
        400,
        "response_format.json_schema",
        None,
        "",
    ),
    "a schema that cannot be kept to": (
        CHATS,
        {
            "model": "sample",
            "messages": HELLO,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            },
        },
        400,
        "response_format",
        None,
        "",
    ),
    "two constraints": (
        COMPLETIONS,
        {**GOOD, "structured_outputs": {"regex": "a", "choice": ["a"]}},
        400,
        None,
        None,
        "one constraint",
    ),
    "parameters that are none": (
        COMPLETIONS,
        {**GOOD, "kv": {"policy": "sliding", "budget": 200, "params": "x"}},
        400,
        None,
        None,
        "",
    ),
    "parameters that are deep": (
        COMPLETIONS,
        {**GOOD, "kv": {"policy": "sliding", "budget": 200, "params": {"x": DEEP}}},
        400,
        None,
        None,
        "",
    ),
    "a large truth": (
        COMPLETIONS,
        {**GOOD, "kv": {"policy": "sliding", "budget": 200, "protect_prompt": 2**64}},
        400,
        None,
        None,
        "",
    ),
    "a large covariate": (
        COMPLETIONS,
        {**GOOD, "experiment": {"covariate": 10**400}},
        400,
        None,
        None,
        "",
    ),
    "tools": (
        CHATS,
        {"model": "sample", "messages": HELLO, "tools": [{"type": "function"}]},
        400,
        "tools.0.function",
        None,
        "",
    ),
    "no token is told in a stream": (
        COMPLETIONS,
        {**GOOD, "echo": True, "stream": True, "max_tokens": 0},
        400,
        "echo",
        None,
        "",
    ),
    "half a character": (
        COMPLETIONS,
        b'{"model": "sample", "prompt": "\\ud800"}',
        400,
        None,
        None,
        "",
    ),
    "likeliest of none": (
        CHATS,
        {"model": "sample", "messages": HELLO, "top_logprobs": 2},
        400,
        "top_logprobs",
        None,
        "",
    ),
    "a packet": (
        COMPLETIONS,
        {**GOOD, "packets": ["sha256:" + 64 * "0"]},
        400,
        "packets",
        "packets_off",
        "",
    ),
    "a session": (
        COMPLETIONS,
        {**GOOD, "session": {"budget_tokens": 64}},
        400,
        "session",
        None,
        "id",
    ),
    "neither prompt nor messages": ("/tokenize", {"model": "sample"}, 400, "prompt", None, ""),
    "an outcome": ("/v1/outcomes", {"metric": "x", "value": 1}, 400, None, None, "request_id"),
    "what is not there": (
        "/v1/embeddings",
        {"model": "sample", "input": "x"},
        404,
        None,
        "unsupported_endpoint",
        "no model for this",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_request(gateway: Gateway, name: str) -> None:
    path, body, status, param, code, word = WRONG[name]
    answer = ask(gateway, path, body)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error"), answer
    assert answer.error["param"] == param, answer
    assert code is None or answer.error["code"] == code
    assert word in answer.error["message"]
    if path in (COMPLETIONS, CHATS) and isinstance(body, dict):
        streamed = ask(gateway, path, {**body, "stream": True})
        assert (streamed.status, streamed.error) == (status, answer.error)


def test_paths_and_methods(gateway: Gateway) -> None:
    assert ask(gateway, "/v1/nothing").status == 404
    answer = ask(gateway, COMPLETIONS)
    assert answer.status == 405 and answer.error["type"] == "invalid_request_error"
    assert ask(gateway, "/v1/models", {}, "POST").status == 405


def test_headers(gateway: Gateway) -> None:
    for timeout in ("0", "-1", "nan", "soon", "inf"):
        answer = ask(gateway, COMPLETIONS, GOOD, timeout=timeout)
        assert answer.status == 400 and "timeout" in answer.error["message"]
    answer = ask(gateway, COMPLETIONS, GOOD, authorization="Bearer \u00e9")
    assert answer.status == 400 and "authorization" in answer.error["message"]
    named = ask(gateway, COMPLETIONS, GOOD, **{"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert re.fullmatch("mine-[0-9a-f]{8}", named.body["epikv"]["request_id"])
    twice = [("Authorization", "Bearer a"), ("authorization", "Bearer b")]
    assert raw(gateway, COMPLETIONS, GOOD, twice) == 400, "a proxy may have judged the other"
    assert raw(gateway, COMPLETIONS, GOOD, [("tracestate", "x" * 5000)]) == 400
    assert raw(gateway, COMPLETIONS, GOOD, [(f"x{i}", "y" * 1000) for i in range(200)]) in (
        0,
        400,
        431,
    )
    odd = ask(gateway, COMPLETIONS, GOOD, **{"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b" and odd.status == 200


def test_a_body_has_a_size_and_a_time(daemon: Daemon) -> None:
    with Gateway(daemon.grpc, flags=("--max-body-bytes=1000", "--body-seconds=1")) as gateway:
        assert ask(gateway, COMPLETIONS, GOOD).status == 200
        answer = ask(gateway, COMPLETIONS, {**GOOD, "prompt": "1 " * 1000})
        assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
        host, _, port = gateway.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"
            )
            begin = time.monotonic()
            assert b" 408 " in slow.recv(1 << 16).split(b"\r\n")[0]
            assert time.monotonic() - begin < 20


def test_a_page_elsewhere_may_not_ask(daemon: Daemon) -> None:
    """A browser says where the page is from whose script asks."""
    with Gateway(daemon.grpc, flags=("--cors-origin=https://chat.example",)) as gateway:
        port = gateway.address.rpartition(":")[2]
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
            answer = ask(gateway, COMPLETIONS, GOOD, origin=origin)
            assert (answer.status, answer.error["code"]) == (403, "origin")
        # By a name of its own that points here, and so is the host, too.
        rebound = {"origin": f"http://evil.example:{port}", "host": f"evil.example:{port}"}
        assert ask(gateway, COMPLETIONS, GOOD, **rebound).status == 403
        for origin in (f"http://127.0.0.1:{port}", "https://chat.example"):
            assert ask(gateway, COMPLETIONS, GOOD, origin=origin).status == 200
        answer = ask(gateway, COMPLETIONS, GOOD, origin="https://chat.example")
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"


def test_a_bad_body_takes_no_longer_than_a_good_one(gateway: Gateway) -> None:
    """Whatever is wrong with each of a million items."""
    bodies: list[tuple[str, Any]] = [
        (COMPLETIONS, {**GOOD, "prompt": ["a", *[1] * 1_000_000]}),
        (COMPLETIONS, {**GOOD, "prompt": [[1], *["x"] * 500_000]}),
        (COMPLETIONS, {**GOOD, "stop": [1] * 1_000_000}),
        (COMPLETIONS, {**GOOD, **{f"k{i}": 1 for i in range(200_000)}}),
        (CHATS, {"messages": [1] * 1_000_000}),
        (CHATS, {"messages": [{"role": "user", "content": [1] * 1_000_000}]}),
        ("/detokenize", {"tokens": ["x"] * 500_000}),
    ]
    before = resident(gateway)
    for path, body in bodies:
        begin = time.monotonic()
        assert ask(gateway, path, body).status == 400
        assert time.monotonic() - begin < 5, path
    told = ask(gateway, COMPLETIONS, {**GOOD, "k" * 3_000_000: 1})
    assert int(told.headers["content-length"]) < 3000
    assert resident(gateway) < before + 300e6


def resident(gateway: Gateway) -> int:
    pages = int(Path(f"/proc/{gateway.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_daemon_that_hangs_takes_nobody_along(sample_model: Path) -> None:
    """Lookups have a time of their own, and a client that leaves is noticed wherever it waits."""
    flags = ("--threads=1", "--watchdog_seconds=0")
    with Daemon(sample_model, *flags) as first, Daemon(sample_model, *flags) as second:
        with Gateway(first.grpc, second.grpc, flags=("--max-requests=8",)) as gateway:
            os.kill(first.pid, signal.SIGSTOP)
            try:
                assert ask(gateway, "/v1/models").body["data"][0]["id"] == "sample"
                time.sleep(1.2)  # it is no longer passed over
                hung = 0
                for _ in range(16):  # twice as many as it may have at once
                    hung += leaves_soon(gateway)
                assert hung > 0
                assert ask(gateway, "/health").status == 200
                answers = [ask(gateway, COMPLETIONS, GOOD, timeout="5") for _ in range(4)]
                assert 200 in {answer.status for answer in answers}
                eventually(lambda: ask(gateway, COMPLETIONS, GOOD, timeout="5").status != 429)
            finally:
                os.kill(first.pid, signal.SIGCONT)


def leaves_soon(gateway: Gateway) -> bool:
    """Whether a client has left before its stream began."""
    data = json.dumps({**GOOD, "temperature": 0, "stream": True}).encode()
    request = urllib.request.Request(gateway.url + COMPLETIONS, data)
    try:
        with urllib.request.urlopen(request, timeout=0.3) as reply:
            reply.read()
    except (TimeoutError, urllib.error.URLError):
        return True
    return False


def test_a_request_that_has_begun_is_not_run_again(sample_model: Path) -> None:
    with Daemon(sample_model, "--threads=1") as other:
        with (
            pytest.raises(DaemonError, match="status -9"),
            Daemon(sample_model, "--threads=1") as one,
        ):
            with Gateway(one.grpc) as alone:
                kv = {"policy": "sliding", "budget": 100, "positions": "compact"}
                body = {
                    **GOOD,
                    "prompt": [5] * 40,
                    "max_tokens": 5000,
                    "ignore_eos": True,
                    "kv": kv,
                }
                assert ask(alone, COMPLETIONS, {**body, "max_tokens": 1}).status == 200
            with Gateway(one.grpc, other.grpc) as gateway, ThreadPoolExecutor() as pool:
                asked = [pool.submit(ask, gateway, COMPLETIONS, body) for _ in range(2)]
                for daemon in (one, other):
                    eventually(
                        lambda d=daemon: scrape(d.metrics).total("epikv_requests_running") == 1
                    )
                one.kill()
                assert sorted(each.result().status for each in asked) == [200, 503]
            assert scrape(other.metrics).total("epikv_requests_finished_total") == 1


def test_a_name_that_points_here_is_no_name_of_this_machine(gateway: Gateway) -> None:
    """A page of a name that its owner moved here could read what it asks for."""
    answer = ask(gateway, "/v1/models", host="evil.example:8000")
    assert (answer.status, answer.error["code"]) == (403, "host")


def test_who_reads_nothing_is_gone(daemon: Daemon) -> None:
    with Gateway(daemon.grpc, flags=("--stall-seconds=1",)) as gateway:
        host, _, port = gateway.address.partition(":")
        body = json.dumps(
            {
                "prompt": [5] * 40,
                "max_tokens": 1200,
                "logprobs": 20,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            deaf.sendall(head.encode() + body)
            gone = 'epikv_gateway_requests_total{route="/v1/completions",status="200"} 1.0'

            def page() -> str:
                with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=30) as reply:
                    return reply.read().decode()

            eventually(lambda: "epikv_gateway_requests_in_flight 2.0" in page())
            eventually(lambda: gone in page())


def test_whose_token_it_is(sample_model: Path, tmp_path: Path) -> None:
    """It goes on to the daemon as it is; the gateway has none."""
    user, line = new_token("ann", "user")
    (tmp_path / "tokens").write_text(line)
    flags = ("--threads=1", f"--auth_tokens_file={tmp_path / 'tokens'}")
    with Daemon(sample_model, *flags, token=user) as daemon:
        with Gateway(daemon.grpc, EPIKV_TOKEN=user) as gateway:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                for path, body in ((COMPLETIONS, GOOD), ("/v1/models", None)):
                    answer = ask(gateway, path, body, **headers)
                    assert answer.status == 401, "not the gateway's own, were it told one"
                    assert answer.error["type"] == "authentication_error"
                    assert answer.error["code"] == "invalid_api_key"
            assert ask(gateway, "/health").status == 200
            with OpenAI(base_url=f"{gateway.url}/v1", api_key=user, max_retries=0) as client:
                assert client.completions.create(**GOOD).usage.completion_tokens == 1
                with pytest.raises(PermissionDeniedError, match="operator"):
                    client.completions.create(**GOOD, extra_body={"tenant": "bob"})
            # What one client may learn is no other's: models are asked for anew.
            assert ask(gateway, "/v1/models").status == 401
            assert ask(gateway, "/tokenizer_info").status == 401


def test_a_full_queue_says_when_to_come_again(sample_model: Path) -> None:
    flags = ("--threads=1", "--max_running_requests=1", "--max_queued_requests=1")
    with Daemon(sample_model, *flags) as daemon, Gateway(daemon.grpc) as gateway:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            held = [
                client.completions.create(
                    model="sample",
                    prompt=[5] * 40,
                    max_tokens=1200,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(2)
            ]
            with pytest.raises(RateLimitError) as caught:
                client.completions.create(**GOOD)
            assert caught.value.code == "queue_full"
            headers = caught.value.response.headers
            assert int(headers["retry-after"]) >= 1 and float(headers["retry-after-ms"]) > 0
            for stream in held:
                stream.close()


def test_one_worker_takes_so_many(daemon: Daemon) -> None:
    with Gateway(daemon.grpc, flags=("--max-requests=1",)) as gateway:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="sample",
                prompt=[5] * 40,
                max_tokens=700,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            answer = ask(gateway, COMPLETIONS, GOOD)
            assert (answer.status, answer.error["code"]) == (429, "queue_full")
            assert answer.headers["retry-after"] == "1"
            stream.close()
            eventually(lambda: ask(gateway, COMPLETIONS, GOOD).status == 200)


def test_another_daemon_answers_where_one_is_away(sample_model: Path) -> None:
    with (
        Daemon(sample_model, "--threads=1") as first,
        Daemon(sample_model, "--threads=1") as second,
    ):
        with Gateway(first.grpc, second.grpc) as gateway:
            for _ in range(4):
                assert ask(gateway, COMPLETIONS, GOOD).status == 200
            assert first.stop() == 0
            for _ in range(8):
                assert ask(gateway, COMPLETIONS, GOOD).status == 200
            health = ask(gateway, "/health")
            assert health.status == 200
            assert health.body == {"serving": 1, "servers": 2}, "and not where they are"
            assert second.stop() == 0
            assert ask(gateway, "/health").status == 503
            answer = ask(gateway, COMPLETIONS, GOOD)
            assert (answer.status, answer.error["type"]) == (503, "server_error")


def test_several_workers_share_their_series(daemon: Daemon) -> None:
    with Gateway(daemon.grpc, flags=("--workers=2",)) as gateway:
        for _ in range(20):
            assert ask(gateway, COMPLETIONS, GOOD).status == 200
        with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        assert 'epikv_gateway_requests_total{route="/v1/completions",status="200"} 20.0' in page


def test_the_openapi_page_has_all_routes(gateway: Gateway) -> None:
    document = ask(gateway, "/openapi.json").body
    assert {COMPLETIONS, CHATS, "/v1/models", "/tokenize", "/health"} <= set(document["paths"])
    fields = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "kv", "experiment", "cache_salt", "logit_bias"} <= set(fields)
    body = problem(9).prompt
    assert ask(gateway, "/tokenize", {"prompt": body}).body["count"] == 114
