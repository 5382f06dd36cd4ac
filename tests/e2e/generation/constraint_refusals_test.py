"""Constraints that are hostile, wrong or long to compile: who sent them is told, and nobody else waits."""

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from byte_model import export_bytes
from click.testing import CliRunner
from epikv import Client, RpcError, Sampling, Stop
from epikv.cli import main
from epikv.testing import Daemon
from epikv.v1 import generation_pb2

HOSTILE = [
    {"regex": "(a{0,1000}){0,1000}"},
    {"regex": "((((((((a?){0,99}){0,99}){0,99}){0,99}){0,99}){0,99}){0,99}){0,99}"},
    {"regex": "(" * 3000},
    {"regex": "a{128}" * 8000},
    {"regex": "(.*a){200}(a|b)*a(a|b){300}"},
    {"regex": "x" * 70_000},
    {"grammar": 'root ::= root root | "a" | ""'},
    {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    {"grammar": "root ::= " + "".join(f'r{i}\nr{i} ::= "a" | ' for i in range(3000)) + '"b"'},
    {"json_schema": "[" * 60_000},
    {"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"type": "string", "minLength": 2_000_000_000}},
    {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"type": ["string", "null"]} for i in range(900)},
        }
    },
    {"choice": [f"{'a' * 60}{i}" for i in range(1000)]},
    {"choice": ["a"] * 2000},
]


def test_hostile_constraints_are_refused_or_harmless(talker: Client) -> None:
    for constraint in HOSTILE:
        begin = time.monotonic()
        try:
            result = talker.generate_once(
                "go", sampling=Sampling(**constraint), stop=Stop(max_output_tokens=30)
            )
            assert result.summary.finish_reason in ("end", "length")
        except RpcError as refused:
            assert refused.code in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
            ), refused
        assert time.monotonic() - begin < 60, constraint  # a hang, not a measurement
        assert talker.generate_once("go", stop=Stop(max_output_tokens=2)).text is not None


def test_whoever_has_no_constraint_waits_for_no_compilation(talker: Client) -> None:
    """More costly ones at once than the server has threads for calls, one of them cancelled while it
    waits."""

    def ask(number: int) -> str:
        regex = f"((((((a?){{0,99}}){{0,99}}){{0,99}}){{0,99}}){{0,99}}){{0,{50 + number}}}"
        with pytest.raises(RpcError) as refused:
            talker.generate_once("go", sampling=Sampling(regex=regex), stop=Stop(1))
        return refused.value.code.name

    with ThreadPoolExecutor(24) as pool:
        costly = [pool.submit(ask, number) for number in range(24)]
        while not any(future.done() for future in costly):  # all of them are there
            time.sleep(0.01)
        left = talker.generate("go", sampling=Sampling(regex="abc"), stop=Stop(1))
        left.cancel()
        plain = talker.generate_once("go", stop=Stop(max_output_tokens=2, ignore_eos=True))
        before = sum(future.done() for future in costly)
        assert plain.summary is not None and plain.summary.finish_reason == "length"
        assert before < len(costly) // 2
        assert {future.result() for future in costly} == {"INVALID_ARGUMENT"}
    result = talker.generate_once("go", sampling=Sampling(regex="abc"), stop=Stop(9))
    assert result.text == "abc"


def costly(number: int) -> dict[str, str]:
    """Some tenth of a second to refuse; another one for each number."""
    return {"regex": f"((((((a?){{0,99}}){{0,99}}){{0,99}}){{0,99}}){{0,99}}){{0,{50 + number}}}"}


def test_deadlines_and_models_pass_while_constraints_compile(tmp_path: Path) -> None:
    """A request at its deadline has got nothing; one whose model is replaced meanwhile is the new
    model's, and one whose model has gone is told so."""
    path = export_bytes(tmp_path, "one", eos_token_id=3)
    flags = ("--threads=1", "--deterministic=true", "--kv_pool_bytes=33554432")
    with Daemon(path, *flags) as daemon, daemon.client() as client, ThreadPoolExecutor(64) as pool:

        def admin(*words: str) -> None:
            done = CliRunner().invoke(main, ["admin", f"--server={daemon.admin}", *words])
            assert done.exit_code == 0, done.output

        def ask(regex: str, timeout: float | None = None) -> str:
            sampling = Sampling(regex=regex, temperature=1, seed=4)
            try:
                return client.generate_once(
                    "go", sampling=sampling, stop=Stop(max_output_tokens=9), timeout=timeout
                ).text
            except RpcError as error:
                return error.code.name

        def occupy(first: int) -> list[Future[str]]:
            busy = [pool.submit(ask, **costly(first + number)) for number in range(48)]
            while not any(future.done() for future in busy):
                time.sleep(0.01)
            return busy

        expected = ask("[a-p]{8}")
        busy = occupy(0)
        late = pool.submit(ask, "[b-p]{8}", 0.2)
        left = pool.submit(ask, "[c-p]{8}")
        admin("load-model", str(path), "--name=one", "--replace", "--kv-pool-bytes=33554432")
        assert late.result() == "DEADLINE_EXCEEDED"
        assert {future.result() for future in busy} == {"INVALID_ARGUMENT"}
        assert re.fullmatch("[c-p]{8}", left.result())
        assert ask("[a-p]{8}") == expected

        busy = occupy(48)
        left = pool.submit(ask, "[d-p]{8}")
        admin("unload-model", "one")
        assert {future.result() for future in busy} <= {"INVALID_ARGUMENT", "NOT_FOUND"}
        assert left.result() in ("NOT_FOUND", "UNAVAILABLE")


def test_who_waits_for_too_many_constraints_is_told(talking: Daemon, talker: Client) -> None:
    """Beyond 1024 of one client's; and all of them go when they are cancelled."""
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection each, which carries 512 calls
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(talking.grpc, own)) for _ in range(3)]
        are_told(talker, clients)


def are_told(talker: Client, clients: list[Client]) -> None:
    """Asks until somebody was refused: which calls are beyond the 1024 is a matter of arrival,
    and a slow sender's first ones are compiled before its last are sent."""
    asked: list[grpc.Future] = []
    refused: list[grpc.RpcError] = []

    def note(call: grpc.Future) -> None:
        if not call.cancelled() and call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            refused.append(call.exception())

    deadline = time.monotonic() + 60
    while not refused:
        assert time.monotonic() < deadline, "nobody was refused"
        if sum(not call.done() for call in asked) >= 1400:  # of the 1536 that three carry
            time.sleep(0.01)
            continue
        for _ in range(100):
            number = len(asked)
            request = generation_pb2.GenerateRequest(text="go")
            request.sampling.regex = costly(number)["regex"]
            client = clients[number % len(clients)]
            asked.append(client._connection.generation.GenerateOnce.future(request))
            asked[-1].add_done_callback(note)
    assert "1024 may" in refused[0].details()
    for call in asked:
        call.cancel()
    while True:
        try:
            result = talker.generate_once("go", sampling=Sampling(regex="xyz"), stop=Stop(9))
            break
        except RpcError as full:
            assert full.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            time.sleep(0.01)
    assert result.text == "xyz"


def test_a_constraint_that_is_none_is_told_with_its_field(talker: Client) -> None:
    for field, constraint, why in (
        ("regex", {"regex": "(?=a)b"}, "Lookahead"),
        ("choice", {"choice": []}, "empty"),
        ("json_schema", {"json_schema": {"type": "array", "uniqueItems": True}}, "'uniqueItems'"),
        ("grammar", {"grammar": "root ::= b"}, "b"),
    ):
        with pytest.raises(RpcError, match=why) as refused:
            talker.generate_once("go", sampling=Sampling(temperature=-1, **constraint))
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert {v.field for v in refused.value.field_violations} == {
            f"sampling.constraint.{field}",
            "sampling.temperature",
        }
