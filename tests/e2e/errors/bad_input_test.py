"""Everything that can be wrong with a request: a clear status, all violations, nobody disturbed."""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from epikv import Client, Kv, Output, RpcError, Stop, Stream
from epikv.sample import problem
from epikv.scrape import scrape
from epikv.testing import PACED, Daemon
from epikv.v1 import generation_pb2, kv_pb2

CONTEXT, VOCABULARY, PROMPT_TOKENS = 1280, 164, 114
TASK = problem(9)
Request = generation_pb2.GenerateRequest
Options = kv_pb2.KvOptions


@dataclass(frozen=True)
class Bad:
    """A request, and what the answer must name."""

    request: Request
    fields: list[str]
    says: list[str] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    reason: str = "INVALID_REQUEST"


def kv(**options: object) -> Request:
    return Request(text=TASK.prompt, kv=Options(**options))


def with_params(policy: str, **params: object) -> Request:
    request = kv(policy=policy, max_tokens=300)
    request.kv.policy_params.update(params)
    return request


def sampling(**params: float) -> Request:
    return Request(text=TASK.prompt, sampling=generation_pb2.SamplingParams(**params))


BAD = {
    "no prompt": Bad(Request(), ["prompt"]),
    "empty text": Bad(Request(text=""), ["prompt"]),
    "no token ids": Bad(Request(token_ids=generation_pb2.TokenIds()), ["prompt"]),
    "prompt over the context": Bad(
        Request(token_ids=generation_pb2.TokenIds(ids=[5] * (CONTEXT + 1))),
        ["prompt"],
        [str(CONTEXT), str(CONTEXT + 1)],
        reason="CONTEXT_LENGTH",
    ),
    "budget 0": Bad(kv(policy="sliding", max_tokens=0), ["kv.max_tokens"]),
    "ratio over 1": Bad(kv(policy="sliding", keep_ratio=1.5), ["kv.keep_ratio"]),
    "budget too small for its protection": Bad(
        kv(policy="sliding", max_tokens=100, protect_prompt=True),
        ["kv.budget"],
        ["100", str(PROMPT_TOKENS + 1)],
        reason="KV_BUDGET",
    ),
    "unknown policy": Bad(
        kv(policy="slidng", max_tokens=300), ["kv.policy"], ["slidng", "did you mean sliding?"]
    ),
    "unknown parameter": Bad(
        with_params("epikv_flat", layer_c=1), ["kv.policy_params.layer_c"], ["layer_a", "window"]
    ),
    "parameter out of range": Bad(
        with_params("epikv_flat", window=1), ["kv.policy_params.window"], ["2"]
    ),
    "parameter of another type": Bad(
        with_params("h2o", scope=3), ["kv.policy_params.scope"], ["head", "model"]
    ),
    "no such choice": Bad(
        with_params("h2o", scope="all"), ["kv.policy_params.scope"], ["head", "model"]
    ),
    "unknown decorator": Bad(
        with_params("snapkv", decorate=["vatpp"]),
        ["kv.policy_params.decorate"],
        ["caote", "vatp", "'vatpp'"],
    ),
    "decorators in an order without sense": Bad(
        with_params("snapkv", decorate=["critical", "vatp"]),
        ["kv.policy_params.decorate"],
        ["'vatp' takes scores that are masses, and 'critical' gives"],
    ),
    "allocator of scores that it cannot compare": Bad(
        with_params("snapkv", decorate=["critical"], allocator="head_pool"),
        ["kv.policy_params.allocator"],
        ["'head_pool' compares scores within a layer", "only within a lane"],
    ),
    "draw by scores that are no masses": Bad(
        with_params("snapkv", decorate=["critical"], select="sample"),
        ["kv.policy_params.select"],
        ["'sample' takes scores that are masses"],
    ),
    "pooling over an even number of neighbours": Bad(
        with_params("snapkv", kernel=4), ["kv.policy_params.kernel"], ["must be odd", "4"]
    ),
    "temperature not a number": Bad(sampling(temperature=math.nan), ["sampling.temperature"]),
    "top_p 0": Bad(sampling(top_p=0), ["sampling.top_p"]),
    "token id out of range": Bad(
        Request(token_ids=generation_pb2.TokenIds(ids=[5, VOCABULARY, -1])),
        ["token_ids.ids[1]"],
        [str(VOCABULARY)],
        grpc.StatusCode.OUT_OF_RANGE,
        "TOKEN_RANGE",
    ),
    "no output": Bad(
        Request(text=TASK.prompt, stop=generation_pb2.StopParams(max_output_tokens=0)),
        ["stop.max_output_tokens"],
    ),
    "wrong model": Bad(
        Request(text=TASK.prompt, model="other"),
        [],
        ["other", "sample"],
        grpc.StatusCode.NOT_FOUND,
        "NOT_FOUND",
    ),
    "all at once": Bad(
        Request(
            stop=generation_pb2.StopParams(max_output_tokens=0),
            sampling=generation_pb2.SamplingParams(temperature=-1, top_p=2),
            kv=Options(policy="nothing", max_tokens=0),
        ),
        [
            "prompt",
            "sampling.temperature",
            "sampling.top_p",
            "stop.max_output_tokens",
            "kv.policy",
            "kv.max_tokens",
        ],
    ),
}


@pytest.fixture(scope="module")
def neighbour(client: Client) -> Iterator[None]:
    """A stream that runs all the while and must notice nothing."""
    completions: list[str] = []
    leaving = threading.Event()

    def solve() -> None:
        while not leaving.is_set():
            completions.append(client.generate_once(TASK.prompt, kv=Kv("full")).text)

    thread = threading.Thread(target=solve)
    thread.start()
    yield
    leaving.set()
    thread.join()
    assert completions and all(all(TASK.correct(text)) for text in completions)


def send(daemon: Daemon, request: bytes) -> None:
    """Sends what may be no valid message, and reads to the end."""
    with grpc.insecure_channel(daemon.grpc) as channel:
        call = channel.unary_stream("/epikv.v1.GenerationService/Generate")
        try:
            for _ in call(request, timeout=30):
                pass
        except grpc.RpcError as error:
            raise RpcError.from_grpc(error) from None


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_refused_with_everything_that_is_wrong(neighbour: None, daemon: Daemon, bad: Bad) -> None:
    with pytest.raises(RpcError) as caught:
        send(daemon, bad.request.SerializeToString())
    error = caught.value
    assert (error.code, error.reason) == (bad.code, bad.reason), error
    assert sorted(v.field for v in error.field_violations) == sorted(bad.fields)
    for word in bad.says:
        assert word in str(error)


def test_text_that_is_not_utf8(neighbour: None, daemon: Daemon) -> None:
    valid = Request(text="??").SerializeToString()
    with pytest.raises(RpcError) as caught:
        send(daemon, valid.replace(b"??", b"\xff\xfe"))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason in ("NOT_UTF8", "MALFORMED")


def test_what_is_no_message(neighbour: None, daemon: Daemon) -> None:
    with pytest.raises(RpcError) as caught:
        send(daemon, b"\x0a\xff\xff")
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_the_smallest_budget_it_names_is_accepted(neighbour: None, client: Client) -> None:
    def generate(budget: int) -> None:
        wanted = Kv("epikv_flat", budget)
        client.generate_once(TASK.prompt, kv=wanted, stop=Stop(max_output_tokens=200))

    with pytest.raises(RpcError) as caught:
        generate(100)
    smallest = int(caught.value.metadata["min"])
    generate(smallest)
    with pytest.raises(RpcError, match=f"smallest budget is {smallest}"):
        generate(smallest - 1)


def test_scoring_is_refused_alike(neighbour: None, client: Client) -> None:
    with pytest.raises(RpcError) as caught:
        client.score("", "", kv=Kv("sliding", 0))
    fields = {violation.field for violation in caught.value.field_violations}
    assert fields == {"prompt", "continuation", "kv.max_tokens"}
    with pytest.raises(RpcError) as caught:
        client.score(TASK.prompt, TASK.trace, kv=Kv("sliding", 300), chunked=True)
    assert [violation.field for violation in caught.value.field_violations] == ["cadence"]


def test_names_that_do_not_exist(neighbour: None, client: Client) -> None:
    for ask in (client.model, client.policy, client.cancel):
        with pytest.raises(RpcError, match="NOT_FOUND.*nothing"):
            ask("nothing")


def test_pool_and_queue_that_are_full(sample_model: Path) -> None:
    """A request that can never fit is told so at once; one too many waits for nobody."""
    flags = [
        "--threads=1",
        "--kv_pool_bytes=1300000",
        "--max_running_requests=1",
        "--max_queued_requests=1",
        "--outbox_messages=8",  # what fills is paused
    ]
    with Daemon(sample_model, *flags) as daemon, Client(daemon.grpc, PACED) as client:
        with pytest.raises(RpcError) as caught:
            client.generate_once(TASK.prompt, stop=Stop(max_output_tokens=900))
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.reason == "KV_POOL_TOO_SMALL"
        assert caught.value.metadata["capacity_bytes"] in str(caught.value)

        # Not read on, it stays where it is.
        def hold() -> Stream:
            kv, output = Kv("epikv_flat", 130), Output(kv_trace=True)
            stream = client.generate(TASK.prompt, kv=kv, output=output)
            next(stream)
            return stream

        def counted(name: str, **labels: str) -> None:
            deadline = time.monotonic() + 5
            while scrape(daemon.metrics).total(name, **labels) != 1:
                assert time.monotonic() < deadline, name

        with hold():
            counted("epikv_requests_running")
            with hold():
                counted("epikv_requests_waiting", reason="running")
                with pytest.raises(RpcError) as caught:
                    hold()
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.reason == "QUEUE_FULL" and 0 < caught.value.retry_delay <= 300
