"""AsyncClient, beside Client: the same calls, answers and errors, against a stand-in daemon."""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fake_epikvd
import grpc
import pytest
from async_calls import ENDLESS, NOBODY, connected, finish
from epikv import (
    Accepted,
    Admin,
    AsyncClient,
    AsyncStream,
    Chat,
    Client,
    DeadlineExceeded,
    Experiment,
    InvalidRequest,
    Kv,
    NotFound,
    Outcome,
    Output,
    Patience,
    QueueFull,
    RpcError,
    Sampling,
    Scheduling,
    Stop,
    Stream,
    Tls,
    Unavailable,
)
from epikv.outcome import MAX_BATCH
from epikv.v1 import experiment_pb2


@pytest.fixture
def fake() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as running:
        yield running


def public(kind: type) -> dict[str, Any]:
    return {name: each for name, each in vars(kind).items() if not name.startswith("_")}


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


# What is the same


def test_both_clients_have_the_same_methods() -> None:
    ours, others = public(Client), public(AsyncClient)
    assert ours.keys() == others.keys() and len(ours) > 20
    for name, method in ours.items():
        assert parameters(method) == parameters(others[name]), name
        assert method.__doc__ == others[name].__doc__, name
        assert inspect.iscoroutinefunction(others[name]) == (name != "generate"), name
        assert not inspect.iscoroutinefunction(method), name
        returned = [inspect.signature(each).return_annotation for each in (method, others[name])]
        wanted = [Stream, AsyncStream] if name == "generate" else returned[:1] * 2
        assert returned == wanted, name
    assert parameters(Client.__init__) == parameters(AsyncClient.__init__)


def test_both_streams_have_the_same_methods() -> None:
    ours, others = public(Stream), public(AsyncStream)
    assert ours.keys() == others.keys() == {"text", "cancel"}
    assert [parameters(each) for each in ours.values()] == [
        parameters(each) for each in others.values()
    ]


def test_methods_are_described_as_they_are_called() -> None:
    assert str(inspect.signature(Client.tokenize)) == (
        "(self, text: str, *, add_special_tokens: bool = True, model: str = '') -> list[int]"
    )
    assert Client.score.__name__ == AsyncClient.score.__name__ == "score"
    assert Client.tokenize.__annotations__ == {
        "text": str,
        "add_special_tokens": bool,
        "model": str,
        "return": list[int],
    }


@pytest.mark.parametrize("kind", [Client, AsyncClient, Admin], ids=lambda kind: kind.__name__)
def test_help_says_what_each_method_does(kind: type) -> None:
    assert [name for name, each in public(kind).items() if not each.__doc__] == []


@pytest.mark.parametrize("name", ["generate", "score"])
def test_help_has_a_line_of_every_argument(name: str) -> None:
    method = getattr(Client, name)
    said = inspect.getdoc(method)
    _, *taken = inspect.signature(method).parameters
    assert said is not None
    assert [each for each in taken if not re.search(rf"\b{each}\b[\w, ]*:", said)] == []


def test_signatures_are_short() -> None:
    """What is left out of an option is not told."""
    shown = str(inspect.signature(Client.generate))
    assert "kv: epikv.options.Kv = Kv()," in shown and "Sampling()" in shown
    assert repr(Kv("h2o", 0.5, params={"a": 1})) == "Kv(policy='h2o', budget=0.5, params={'a': 1})"
    assert eval(repr(Kv("h2o", sink_tokens=4))) == Kv("h2o", sink_tokens=4)


def lean() -> experiment_pb2.Experiment:
    return experiment_pb2.Experiment(
        name="lean",
        arms=[
            experiment_pb2.Arm(name="a", weight_permille=500),
            experiment_pb2.Arm(name="b", weight_permille=500),
        ],
        metrics=[experiment_pb2.Metric(name="right")],
    )


def changed(**fields: Any) -> experiment_pb2.Experiment:
    """The definition as the stand-in has it after it was made."""
    definition = lean()
    for name, value in {"etag": "etag-1", **fields}.items():
        setattr(definition, name, value)
    return definition


CHAT = Chat([{"role": "user", "content": "one two"}], thinking=True)
PATIENCE = Patience(busy=1, unknown=0)
EVERYTHING: dict[str, Any] = {
    "kv": Kv("h2o", 0.5, {"scope": "head"}, sink_tokens=3),
    "sampling": Sampling(temperature=0.5, seed=3),
    "stop": Stop(max_output_tokens=7),
    "output": Output(kv_trace=True, progress=True),
    "scheduling": Scheduling("high", tenant="ann"),
    "experiment": Experiment("user", covariate=0.25),
    "labels": {"team": "blue"},
    "model": "fake",
    "request_id": "mine",
    "timeout": 20,
}
# Calls in order: name, arguments, and arguments by name.
SCRIPT: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("wait_ready", (), {"timeout": 20}),
    ("generate", ("one two",), EVERYTHING),
    ("generate", ([4, 5],), {}),
    ("generate_once", ("one two",), EVERYTHING),
    ("generate_once", (CHAT,), {}),
    (
        "score",
        ("a b", [3, 4]),
        {"kv": Kv("full"), "chunked": True, "kv_trace": True, "kept": True, "seed": 9}
        | {"residual_steps": True, "top_logprobs": 2, "scheduling": Scheduling("low")}
        | {"model": "fake", "request_id": "s", "timeout": 20},
    ),
    ("score", (CHAT, "text"), {}),
    (
        "create_packet",
        ("one two",),
        {"soft_tokens": True, "packets": ["sha256:0"], "kv": Kv("full"), "model": "fake"},
    ),
    ("packets", (), {"model": "fake", "tenant": "t"}),
    ("delete_packet", ("sha256:1f",), {"tenant": "t"}),
    ("cancel", ("r9",), {}),
    ("tokenize", ("a bb",), {}),
    ("tokenize", ("a bb",), {"add_special_tokens": False, "model": "fake"}),
    ("detokenize", ([3, 4],), {"skip_special_tokens": False, "model": "fake"}),
    ("apply_chat_template", (CHAT,), {"model": "fake"}),
    ("models", (), {}),
    ("model", ("fake",), {}),
    ("tokenizer_json", (), {"model": "fake"}),
    ("tokenizer", (), {}),
    ("policies", (), {"model": "fake"}),
    ("policy", ("epikv_flat",), {"model": "fake"}),
    ("create_experiment", (lean(),), {"validate_only": True}),
    ("create_experiment", (lean(),), {}),
    ("experiments", (), {}),
    ("update_experiment", (changed(hypothesis="more"),), {"mask": ["hypothesis"]}),
    (
        "update_experiment",
        (changed(etag="etag-2"),),
        {"allow_rebucket": True, "validate_only": True},
    ),
    ("start_experiment", ("lean",), {"etag": "etag-2"}),
    ("record_outcome", ("r-1", "right", 1), {"key": "k", "tenant": "t", "patience": PATIENCE}),
    (
        "record_outcomes",
        ([Outcome("r-1", "right", 1), Outcome("r-2", "right", 0)],),
        {"patience": PATIENCE},
    ),
    ("stop_experiment", ("lean",), {"reason": "enough"}),
    ("experiment", ("lean",), {}),
    ("experiment_report", ("lean",), {"points": 3}),
    ("plan_experiment", (), {"rate": 0.5, "effect": 0.1, "arms": 3, "looks": 2}),
]


@contextmanager
def prepared() -> Iterator[fake_epikvd.Fake]:
    """A stand-in that has an answer to all of SCRIPT."""
    with fake_epikvd.serve() as fake:
        fake.experiments.took_part = {"r-1"}
        fake.experiments.reports["lean"] = [experiment_pb2.ExperimentReport(blocked="uneven")]
        fake.experiments.plan.units = 400
        yield fake


def told(answer: Any) -> Any:
    return answer.to_str() if type(answer).__name__ == "Tokenizer" else answer


def test_every_call_asks_and_answers_the_same() -> None:
    with prepared() as fake, Client(fake.address, token="secret") as client:
        answers = []
        for name, arguments, named in SCRIPT:
            answer = getattr(client, name)(*arguments, **named)
            answers.append(list(answer) if name == "generate" else told(answer))
        asked, tokens = fake.requests, fake.tokens

    async def work(client: AsyncClient) -> list[Any]:
        others = []
        for name, arguments, named in SCRIPT:
            answer = getattr(client, name)(*arguments, **named)
            if name == "generate":
                others.append([event async for event in answer])
            else:
                others.append(told(await answer))
        return others

    with prepared() as fake:
        others = connected(fake.address, work, token="secret")
        assert fake.requests == asked and len(asked) > 15
        assert fake.tokens == tokens == ["Bearer secret"] * len(SCRIPT)
    for (name, _, _), answer, other in zip(SCRIPT, answers, others, strict=True):
        assert answer == other, name
        assert answer or name in ("wait_ready", "cancel", "delete_packet"), name
    assert {name for name, _, _ in SCRIPT} | {"close"} == public(Client).keys()


def test_a_token_may_come_from_the_environment(
    fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPIKV_TOKEN", "found")
    connected(fake.address, lambda client: client.models())
    connected(fake.address, lambda client: client.models(), token="")
    assert fake.tokens == ["Bearer found", None]


def test_arguments_are_checked_as_in_client(fake: fake_epikvd.Fake) -> None:
    async def work(client: AsyncClient) -> None:
        with pytest.raises(ValueError, match="kv is an epikv.Kv; not 'sliding'"):
            client.generate("x", kv="sliding")
        with pytest.raises(ValueError, match="a prompt is text, a list of token ids, or a Chat"):
            await client.generate_once(b"abc")
        with pytest.raises(ValueError, match="one of them"):
            await client.plan_experiment(effect=0.1)
        with pytest.raises(ValueError, match="a server is HOST:PORT"):
            AsyncClient("http://localhost:50051")
        with pytest.raises(ValueError, match="together"):
            AsyncClient(NOBODY, tls=Tls(key="only.key"))

    connected(fake.address, work)
    assert fake.requests == []


def test_an_event_loop_has_to_run() -> None:
    with pytest.raises(RuntimeError, match="no event loop runs"):
        AsyncClient(NOBODY)


# Errors


REFUSED: list[tuple[type[RpcError], str, tuple[Any, ...], dict[str, Any]]] = [
    (InvalidRequest, "score", ("x", "y"), {"kv": Kv("nope")}),
    (QueueFull, "generate_once", ("x",), {"kv": Kv("crowded")}),
    (NotFound, "model", ("other",), {}),
    (NotFound, "tokenizer_json", (), {"model": "other"}),
    (NotFound, "record_outcome", ("r", "m", 1), {"patience": PATIENCE}),
    (DeadlineExceeded, "generate_once", ("endless",), {"timeout": 0.2}),
]


@pytest.mark.parametrize(("kind", "name", "arguments", "named"), REFUSED)
def test_refusals_are_of_their_kind(
    kind: type[RpcError], name: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with fake_epikvd.serve() as fake, Client(fake.address) as client:
        with pytest.raises(RpcError) as ours:
            getattr(client, name)(*arguments, **named)

    async def work(client: AsyncClient) -> RpcError:
        with pytest.raises(RpcError) as caught:
            await getattr(client, name)(*arguments, **named)
        return caught.value

    with fake_epikvd.serve() as fake:
        other = connected(fake.address, work)
    assert type(ours.value) is type(other) is kind
    assert vars(other) == vars(ours.value)


def test_a_refused_stream_tells_every_detail(fake: fake_epikvd.Fake) -> None:
    async def work(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await anext(client.generate("x", kv=Kv("nope")))
        error = caught.value
        assert (error.reason, error.metadata) == ("KV_BUDGET", {"smallest": "24"})
        assert [v.field for v in error.field_violations] == ["kv.max_tokens", "kv.policy"]
        assert error.retry_delay == 1.5

    connected(fake.address, work)


def test_a_stream_has_a_deadline(fake: fake_epikvd.Fake) -> None:
    async def work(client: AsyncClient) -> None:
        stream = client.generate("endless", timeout=0.2)
        assert isinstance(await anext(stream), Accepted)
        with pytest.raises(DeadlineExceeded):
            await anext(stream)

    connected(fake.address, work)


def test_nobody_there_is_unavailable() -> None:
    with Client(NOBODY) as client, pytest.raises(Unavailable):
        client.models()
    with pytest.raises(Unavailable):
        connected(NOBODY, lambda client: client.models())


# Outcomes


def test_waiting_with_an_outcome_leaves_the_loop_free(fake: fake_epikvd.Fake) -> None:
    fake.experiments.definitions["lean"] = lean()
    fake.experiments.took_part = {"r-1"}
    fake.experiments.refusals = [(grpc.StatusCode.UNAVAILABLE, 0.3)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def work(client: AsyncClient) -> Any:
        ticking = asyncio.create_task(tick())
        recorded = await client.record_outcome("r-1", "right", 1)
        ticking.cancel()
        return recorded

    assert not connected(fake.address, work).duplicate
    assert ticks > 3 and fake.experiments.refusals == []
    assert len(fake.requests) == 2, "one was refused, the other kept"


def test_outcomes_go_in_batches_and_are_tried_again(fake: fake_epikvd.Fake) -> None:
    fake.experiments.definitions["lean"] = lean()
    fake.experiments.took_part = {"r-1"}
    fake.experiments.delays = [0.1]
    outcomes = [Outcome("r-1", "right", 1, key=str(i)) for i in range(MAX_BATCH)]
    given = [*outcomes, Outcome("r-2", "right", 1)]

    async def work(client: AsyncClient) -> Any:
        return await client.record_outcomes(given, patience=PATIENCE)

    results = connected(fake.address, work)
    assert [result.error for result in results[:-1]] == [None] * MAX_BATCH
    assert type(results[-1].error) is NotFound
    assert fake.experiments.batches == [MAX_BATCH, 1, 1]


# Closing


def test_a_call_after_close_is_told_why(fake: fake_epikvd.Fake) -> None:
    ours = Client(fake.address)
    ours.close()
    ours.close()

    async def work(client: AsyncClient) -> None:
        await client.close()
        await client.close()
        for name, arguments, named in SCRIPT:
            with pytest.raises(ValueError, match="^the client is closed$"):
                getattr(ours, name)(*arguments, **named)
            with pytest.raises(ValueError, match="^the client is closed$"):
                answer = getattr(client, name)(*arguments, **named)
                await answer  # generate has raised

    connected(fake.address, work)
    assert fake.requests == []


def test_leaving_the_block_closes(fake: fake_epikvd.Fake) -> None:
    with Client(fake.address) as ours:
        pass
    with pytest.raises(ValueError, match="closed"):
        ours.models()

    async def work() -> None:
        async with AsyncClient(fake.address) as client:
            await client.models()
        with pytest.raises(ValueError, match="closed"):
            await client.models()

    finish(work())


@ENDLESS
def test_closing_ends_what_runs(
    fake: fake_epikvd.Fake, endless: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    async def work(client: AsyncClient) -> None:
        running = asyncio.ensure_future(endless(client))
        while not fake.requests:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(RpcError) as caught:
            await running
        assert caught.value.code is grpc.StatusCode.CANCELLED
        assert await asyncio.to_thread(fake.ended.wait, 5)

    connected(fake.address, work)
