"""What tells a balancer which requests begin alike: x-epikv-prefix, of all that we have as clients."""

import asyncio
import json
import re
import urllib.request
from typing import Any

import fake_epikvd
import grpc
import pytest
from epikv import AsyncClient, Chat, Client, Kv, RpcError, Scheduling, Session
from epikv.calls import generate_request
from epikv.options import Experiment, Output, Sampling, Stop
from epikv.prefix import CHARACTERS, TOKENS, prefix_metadata
from epikv.testing import Gateway
from epikv.v1 import generation_pb2, model_pb2, packet_pb2

SYSTEM = {"role": "system", "content": "You are terse."}
HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
MORE = {"role": "user", "content": "and now?"}


def request_of(
    prompt: Any, *, salt: str = "", session: str = "", tenant: str = "", model: str = ""
):
    return generate_request(
        prompt,
        Kv(cache_salt=salt),
        Sampling(),
        Stop(),
        Output(),
        Scheduling(tenant=tenant),
        Experiment(),
        None,
        (),
        Session(session, 64) if session else None,
        model,
        "",
    )


def prefix(prompt: Any, *, key: str = "", **more: str) -> str:
    [(name, value)] = prefix_metadata(request_of(prompt, **more), key)
    assert name == "x-epikv-prefix"
    return value


def test_it_is_a_short_digest_that_has_no_text() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", prefix("secret"))


def test_turns_of_a_conversation_have_one() -> None:
    first = prefix(Chat([SYSTEM, HELLO]))
    assert prefix(Chat([SYSTEM, HELLO, ANSWER, MORE])) == first
    assert prefix(Chat([SYSTEM, HELLO], thinking=True)) == first


@pytest.mark.parametrize(
    "other",
    [
        [HELLO],
        [SYSTEM, MORE],
        [{**SYSTEM, "content": "You are terse.hello"}, {**HELLO, "content": ""}],
        [{**SYSTEM, "role": "assistant"}, HELLO],
    ],
    ids=["system", "user", "border", "role"],
)
def test_conversations_that_begin_otherwise_have_others(other: list[dict[str, str]]) -> None:
    assert prefix(Chat(other)) != prefix(Chat([SYSTEM, HELLO]))


def test_a_text_that_grows_keeps_its_own() -> None:
    text = "word " * CHARACTERS
    first = prefix(text[:CHARACTERS])
    assert prefix(text) == first
    assert prefix("x" + text) != first
    ids = list(range(2 * TOKENS))
    assert prefix(ids) == prefix(ids[:TOKENS]) != prefix(ids[1:])
    assert prefix(ids) != first


def test_a_session_is_one_whatever_its_prompts() -> None:
    first = prefix("one", session="s")
    assert prefix(Chat([HELLO]), session="s") == first
    assert first not in (prefix("one", session="t"), prefix("one", session="s", tenant="t"))


def test_who_salts_the_cache_or_asks_another_model_has_others() -> None:
    all_of = [prefix("a"), prefix("a", salt="s"), prefix("a", model="s"), prefix("a", key="s")]
    assert len({*all_of, prefix("b", key="s", salt="s")}) == 5
    assert prefix("b", key="s") == prefix("a", key="s")


def test_calls_with_no_prompt_have_none() -> None:
    assert prefix_metadata(model_pb2.ListModelsRequest()) == ()
    assert prefix_metadata(generation_pb2.CancelRequestRequest(request_id="r")) == ()


def test_scores_and_packets_have_that_of_their_prompt() -> None:
    given = request_of("text")
    score = generation_pb2.ScoreRequest(text="text", continuation_text="more")
    packet = packet_pb2.CreatePacketRequest(request=given)
    assert prefix_metadata(score) == prefix_metadata(packet) == prefix_metadata(given)


def test_both_clients_send_it_with_each_prompt() -> None:
    async def ask(address: str) -> None:
        async with AsyncClient(address) as client:
            assert [event async for event in client.generate("text")]
            await client.generate_once("text")
            await client.score("text", "more")

    with fake_epikvd.serve() as fake, Client(fake.address) as client:
        assert list(client.generate("text"))
        client.generate_once("text")
        client.score("text", "more")
        client.create_packet("text")
        client.models()
        told = [(name, prefix("text")) for name in ("Generate", "GenerateOnce", "Score")]
        assert fake.prefixes == [*told, ("CreatePacket", prefix("text"))]
        fake.prefixes.clear()
        asyncio.run(ask(fake.address))
        assert fake.prefixes == told


def test_the_gateway_sends_it_too_and_takes_a_clients_own_word() -> None:
    def post(path: str, **body: Any) -> None:
        data = json.dumps({"temperature": 0, **body}).encode()
        with urllib.request.urlopen(f"{gateway.url}{path}", data, timeout=30) as reply:
            reply.read()

    with fake_epikvd.serve() as fake, Gateway(fake.address) as gateway:
        post("/v1/completions", prompt="text")
        post("/v1/completions", prompt="text", stream=True, cache_salt="s")
        post("/v1/chat/completions", messages=[SYSTEM, HELLO, ANSWER, MORE])
        post("/v1/completions", prompt="text", prompt_cache_key="mine")
        post("/v1/chat/completions", messages=[HELLO], prompt_cache_key="mine")
        assert fake.prefixes == [
            ("GenerateOnce", prefix("text")),
            ("Generate", prefix("text", salt="s")),
            ("GenerateOnce", prefix(Chat([SYSTEM, HELLO]))),
            ("GenerateOnce", prefix("", key="mine")),
            ("GenerateOnce", prefix("", key="mine")),
        ]


class Broken(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = (lambda: code), (lambda: details)
        self.trailing_metadata = lambda: ()


LOST = "is unavailable: The actor is temporarily unavailable"  # Ray's words
CUT = "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        ("INTERNAL", CUT, "UNAVAILABLE"),
        ("INTERNAL", CUT.replace("2", "8"), "INTERNAL"),
        (
            "INTERNAL",
            f"The actor 0a1b {LOST}: RPC error: Socket closed rpc_code: 14.",
            "UNAVAILABLE",
        ),
        ("INTERNAL", "The actor died unexpectedly before finishing this task.", "UNAVAILABLE"),
        ("INTERNAL", f"the model says: The actor 0a1b {LOST}", "INTERNAL"),
        ("INTERNAL", "the model failed", "INTERNAL"),
        ("CANCELLED", CUT, "CANCELLED"),
    ],
)
def test_a_stream_that_a_proxy_cuts_is_unavailable(code: str, details: str, expected: str) -> None:
    """Behind a proxy gRPC calls it INTERNAL; of a daemon alone, as here, UNAVAILABLE."""
    error = RpcError.from_grpc(Broken(grpc.StatusCode[code], details))
    assert error.code.name == expected
