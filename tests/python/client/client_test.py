"""The Python client and the command line, against a stand-in for the daemon."""

import hashlib
import json
import os
import sys
from dataclasses import fields
from pathlib import Path

import epikv
import fake_epikvd
import grpc
import pytest
from click.testing import CliRunner
from command_line import run
from epikv import (
    Accepted,
    Chat,
    Client,
    DeadlineExceeded,
    Delta,
    EvictionEvent,
    InvalidRequest,
    Kv,
    NotFound,
    Output,
    Progress,
    PromptLogprobs,
    QueueFull,
    RenderedChat,
    RpcError,
    Sampling,
    Scheduling,
    Stop,
    Summary,
    Tls,
    TopLogprobs,
    Unavailable,
    patiently,
)
from epikv.cli import main
from epikv.messages import MESSAGES
from epikv.options import ROLES
from epikv.testing import Daemon, DaemonError
from epikv.v1 import generation_pb2, kv_pb2
from epikv_lab.bench import targets
from epikv_lab.bench.costs import write_costs

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", MESSAGES)
def test_dataclasses_mirror_the_messages(name: str) -> None:
    descriptor = generation_pb2.DESCRIPTOR.pool.FindMessageTypeByName(name)
    assert [f.name for f in fields(MESSAGES[name])] == [f.name for f in descriptor.fields]


def test_all_public_names_load() -> None:
    assert all(getattr(epikv, name) is not None for name in epikv.__all__)


def test_streams_typed_events(client: Client) -> None:
    events = list(client.generate("one two", output=Output(kv_trace=True)))
    assert [type(event) for event in events] == [Accepted, Delta, Delta, EvictionEvent, Summary]
    first, one, _, eviction, last = events
    assert first.kv.policy_params == {"layer_a": 1, "ratio": 0.5}
    assert isinstance(first.kv.policy_params["layer_a"], int)
    assert first.kv.positions == "absolute"
    assert (first.sampling.seed, first.sampling.temperature) == (5, None)
    assert first.sampling.logit_bias == {3: 0.5}
    assert (one.text, one.token_ids, one.logprobs) == ("one ", [0], [-0.5])
    assert (eviction.at_token, eviction.victims[0].layer, eviction.victims[0].head) == (12, 0, None)
    assert eviction.victims[0].index == [4, 9]
    assert (last.finish_reason, last.stop_string, last.stop_token_id) == (
        "stop_string",
        "end",
        None,
    )
    assert (last.timings.time_to_first_token, last.timings.decode) == (0.25, 2.0)
    assert last.timings.queue is None


def test_events_before_the_first_delta(client: Client, fake: fake_epikvd.Fake) -> None:
    output = Output(progress=True, prompt_logprobs=True, top_logprobs=1, coalesce=1.5)
    _, progress, prompt, delta, _ = client.generate("one", output=output)
    top = TopLogprobs(token_ids=[7], logprobs=[-0.25])
    assert progress == Progress(prompt_tokens_done=256, prompt_tokens=300, cached_prompt_tokens=0)
    assert prompt == PromptLogprobs(first=1, token_ids=[4], logprobs=[-1.5], top_logprobs=[top])
    assert delta.top_logprobs == [top]
    sent = fake.requests[-1].output
    assert (sent.coalesce.seconds, sent.coalesce.nanos) == (1, 500_000_000)
    assert not Output().to_proto().HasField("coalesce")
    client.score("a", "b", top_logprobs=3)
    assert fake.requests[-1].top_logprobs == 3


def test_sends_one_constraint(client: Client, fake: fake_epikvd.Fake) -> None:
    asked = (
        Sampling(regex="a+"),
        Sampling(choice=["yes", "é"]),
        Sampling(json_schema={"enum": ["é"]}),
        Sampling(json_schema="{}"),
        Sampling(grammar='root ::= "a"'),
    )
    for sampling in asked:
        list(client.generate("x", sampling=sampling))
    regex, choice, schema, text, grammar = (request.sampling for request in fake.requests)
    assert regex.WhichOneof("constraint") == "regex" and regex.regex == "a+"
    assert list(choice.choice.items) == ["yes", "é"]
    assert schema.json_schema == '{"enum": ["é"]}' and text.json_schema == "{}"
    assert grammar.grammar == 'root ::= "a"'
    with pytest.raises(ValueError, match="one constraint is possible, not regex and grammar"):
        Sampling(regex="a", grammar="b").to_proto()


def test_sends_what_was_asked_and_nothing_else(client: Client, fake: fake_epikvd.Fake) -> None:
    list(client.generate("x"))
    list(
        client.generate(
            [4, 5],
            kv=Kv(
                policy="sliding",
                budget=64,
                params={"n": 3, "flag": True},
                positions="compact",
                protect_prompt=False,
                recent_tokens=0,
                protected_spans=[(2, 5)],
            ),
            sampling=Sampling(temperature=0.5, top_k=3, min_p=0.25, logit_bias={7: -1.5}),
            stop=Stop(
                max_output_tokens=9,
                stop_strings=["a"],
                stop_token_ids=[1],
                min_output_tokens=2,
                ignore_eos=True,
            ),
            output=Output(text=False, logprobs=True),
            scheduling=Scheduling(priority="high", tenant="someone"),
            model="fake",
            request_id="mine",
        )
    )
    list(client.generate("x", kv=Kv(budget=0.25)))
    plain, full, ratio = fake.requests
    assert plain.WhichOneof("prompt") == "text" and plain.kv == kv_pb2.KvOptions()
    assert plain.sampling == generation_pb2.SamplingParams()
    assert plain.stop == generation_pb2.StopParams()
    assert not plain.output.HasField("text")
    assert plain.scheduling == generation_pb2.SchedulingOptions()
    assert full.scheduling.priority == generation_pb2.PRIORITY_HIGH
    assert full.scheduling.tenant == "someone"
    assert full.token_ids.ids == [4, 5] and full.request_id == "mine" and full.model == "fake"
    assert full.kv.WhichOneof("budget") == "max_tokens" and full.kv.max_tokens == 64
    assert dict(full.kv.policy_params) == {"n": 3, "flag": True}
    assert full.kv.positions == kv_pb2.POSITION_MODE_COMPACT
    assert full.kv.HasField("protect_prompt") and not full.kv.protect_prompt
    assert full.kv.HasField("recent_tokens") and not full.kv.HasField("sink_tokens")
    assert [(s.begin, s.end) for s in full.kv.protected_spans] == [(2, 5)]
    assert full.sampling.HasField("top_k") and not full.sampling.HasField("seed")
    assert full.sampling.min_p == 0.25 and not full.sampling.HasField("typical_p")
    assert dict(full.sampling.logit_bias) == {7: -1.5}
    assert full.stop.min_output_tokens == 2 and full.stop.ignore_eos
    assert full.stop.stop_strings == ["a"] and full.output.HasField("text")
    assert ratio.kv.WhichOneof("budget") == "keep_ratio" and ratio.kv.keep_ratio == 0.25


def test_unary_calls(client: Client, fake: fake_epikvd.Fake) -> None:
    assert client.generate_once("abc").text == "ABC"
    score = client.score("a b", [3, 4], chunked=True)
    assert (score.logprobs, score.greedy, score.accepted) == ([-1.0, -2.0], [True, False], None)
    assert fake.requests[-1].cadence == generation_pb2.SCORE_CADENCE_CHUNK
    assert fake.requests[-1].WhichOneof("continuation") == "continuation_ids"
    assert client.tokenize("a bb") == [1, 1, 2]
    assert client.tokenize("a bb", add_special_tokens=False) == [1, 2]
    assert client.detokenize([3, 4]) == "t3 t4"
    assert [m.name for m in client.models()] == ["fake"] and client.model("fake").layers == 2
    assert client.tokenizer_json() == fake_epikvd.TOKENIZER
    assert client.tokenizer(model="fake").encode("w3 w1").ids == [3, 1]
    with pytest.raises(RpcError, match="no model 'gpt'"):
        client.tokenizer(model="gpt")
    assert [p.name for p in client.policies()] == ["epikv_flat", "oracle"]
    assert [p.default_value for p in client.policy("epikv_flat").params] == [None, 64]
    flat = client.policy("epikv_flat")
    assert flat.params_schema == {"properties": {"window": {"minimum": 2}}}
    kept = flat.default_protection
    assert (kept.protect_prompt, kept.recent_tokens, kept.recent_share) == (None, None, 0.5)
    assert flat.incompatible_options[0].field == "kv.budget" and flat.cost.level == "cheap"
    client.cancel("r9")
    assert fake.requests[-1].request_id == "r9"


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "what now"},
]


def test_a_conversation_is_a_prompt(client: Client, fake: fake_epikvd.Fake) -> None:
    list(client.generate(Chat(CONVERSATION, thinking=False)))
    sent = fake.requests[-1]
    assert sent.WhichOneof("prompt") == "chat" and sent.chat.thinking is False
    assert [(m.role, m.content) for m in sent.chat.messages] == [
        (ROLES[message["role"]], message["content"]) for message in CONVERSATION
    ]
    client.score(Chat(CONVERSATION[:2]), "hi")
    sent = fake.requests[-1]
    assert len(sent.chat.messages) == 2 and not sent.chat.HasField("thinking")
    assert client.apply_chat_template(Chat(CONVERSATION[:2])) == RenderedChat(
        "[be brief][hello]", [17]
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "x"},
        {"role": "user", "content": "x", "tool_calls": []},
        {"role": "user"},
        {"role": "user", "content": "x", "name": "y"},
    ],
)
def test_what_is_no_message_is_named(client: Client, message: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match="a message has a role \\(system, user, assistant, tool\\)"
    ):
        client.generate(Chat([message]))


def test_errors_carry_every_detail(client: Client) -> None:
    with pytest.raises(RpcError) as caught:
        list(client.generate("x", kv=Kv(policy="nope", budget=1)))
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.metadata) == ("KV_BUDGET", {"smallest": "24"})
    assert [v.field for v in error.field_violations] == ["kv.max_tokens", "kv.policy"]
    assert error.retry_delay == 1.5
    assert str(error).splitlines() == [
        "INVALID_ARGUMENT (KV_BUDGET): 2 fields are invalid",
        "  kv.max_tokens: too small",
        "  kv.policy: unknown",
    ]


def test_errors_without_details(client: Client) -> None:
    with pytest.raises(RpcError, match="NOT_FOUND: no model 'other'") as caught:
        client.model("other")
    assert (caught.value.reason, caught.value.retry_delay) == ("", None)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        ("INVALID_ARGUMENT", "KV_BUDGET", InvalidRequest),
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL", QueueFull),
        ("RESOURCE_EXHAUSTED", "SLOW_READER", RpcError),
        ("RESOURCE_EXHAUSTED", "", RpcError),
        ("NOT_FOUND", "", NotFound),
        ("DEADLINE_EXCEEDED", "DEADLINE_INFEASIBLE", DeadlineExceeded),
        ("UNAVAILABLE", "DRAINING", Unavailable),
        ("INTERNAL", "QUEUE_FULL", RpcError),
    ],
)
def test_errors_have_kinds(code: str, reason: str, kind: type[RpcError]) -> None:
    error = RpcError(grpc.StatusCode[code], "told", reason=reason, retry_delay=2)
    assert type(error) is kind and isinstance(error, RpcError)
    assert (error.code.name, error.message, error.reason) == (code, "told", reason)
    assert error.retry_delay == 2


def refused(delay: float | None) -> RpcError:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return RpcError(code, "full", reason="QUEUE_FULL", retry_delay=delay)


class Refusing:
    """Refuses so often, then answers."""

    def __init__(self, *delays: float | None) -> None:
        self.left = list(delays)

    def __call__(self) -> str:
        if self.left:
            raise refused(self.left.pop(0))
        return "answer"


def test_patience_waits_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("epikv.client.time.sleep", slept.append)
    assert patiently(Refusing(0.5, 1.25)) == "answer"
    assert slept == [0.5, 1.25]


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("epikv.client.time.sleep", slept.append)
    for call in (Refusing(1, 1, 1), Refusing(None), Refusing(61)):
        with pytest.raises(RpcError, match="full"):
            patiently(call, attempts=3)
    assert slept == [1, 1]


def test_leaving_a_stream_cancels_it(client: Client, fake: fake_epikvd.Fake) -> None:
    with client.generate("endless") as stream:
        assert isinstance(next(stream), Accepted)
        assert not fake.ended.is_set()
    assert fake.ended.wait(5)


def test_a_cancelled_stream_says_so(client: Client, fake: fake_epikvd.Fake) -> None:
    stream = client.generate("endless")
    next(stream)
    stream.cancel()
    with pytest.raises(RpcError) as caught:
        next(stream)
    assert caught.value.code is grpc.StatusCode.CANCELLED
    assert fake.ended.wait(5)  # and not in the next test


def test_timeout_is_the_deadline(client: Client, fake: fake_epikvd.Fake) -> None:
    with pytest.raises(RpcError) as caught:
        list(client.generate("endless", timeout=0.2))
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert fake.ended.wait(5)


def test_unknown_priority_is_named(client: Client) -> None:
    with pytest.raises(ValueError, match="'urgent'; known: low, normal, high"):
        client.generate("x", scheduling=Scheduling(priority="urgent"))


def test_costs_are_the_table_of_the_daemon(tmp_path: Path) -> None:
    def cost(at_512: float, at_4096: float) -> dict[str, dict[str, float]]:
        share = {"512": at_512, "4096": at_4096}
        return {"cpu_us_per_token": {"512": 5.0, "4096": 7.125}, "share_of_step": share}

    measured = {"tova": cost(0.03, 0.02), "full": cost(0, 0), "h2o": cost(0.01, 0.1234567)}
    write_costs({"made_with": 'a "machine"', "policies": measured}, tmp_path / "costs.inc")
    assert (tmp_path / "costs.inc").read_text().splitlines()[1:] == [
        r'constexpr absl::string_view kMadeWith = "a \"machine\"";',
        "constexpr std::initializer_list<PolicyCost> kCosts = {",
        '    {"full", 4096, 7.125, 0},',
        '    {"h2o", 4096, 7.125, 0.123},',
        '    {"tova", 512, 5, 0.03},',
        "};",
    ]
    # One measured anew, and a new one: the others stay.
    again = {"h2o": cost(0.01, 0.02), "cur": cost(0.5, 0.4)}
    write_costs({"made_with": "another", "policies": again}, tmp_path / "costs.inc")
    assert (tmp_path / "costs.inc").read_text().splitlines()[1:] == [
        r'constexpr absl::string_view kMadeWith = "a \"machine\"; cur, h2o: another";',
        "constexpr std::initializer_list<PolicyCost> kCosts = {",
        '    {"cur", 512, 5, 0.5},',
        '    {"full", 4096, 7.125, 0},',
        '    {"h2o", 4096, 7.125, 0.02},',
        '    {"tova", 512, 5, 0.03},',
        "};",
    ]


def test_bench_group_and_help_load_nothing_heavy() -> None:
    assert run("bench", "--help").exit_code == 0
    assert run("bench", "nothing").exit_code == 2
    assert "Commands:" in run("--help").stdout


def test_targets_want_the_whole_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    met = targets.Target("cost", targets.Estimate(0.01, 0.009, 0.019), 0.02)
    exact = targets.Target("streams", targets.Estimate.exact(7), 7, at_least=True)
    targets.finish("demo", [met, exact], {"samples": [1]}, tmp_path / "out.json")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["demo.cost 0.01 [0.009,0.019] <=0.02 ok", "demo.streams 7 [7,7] >=7 ok"]
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["samples"] == [1] and content["targets"][1]["ok"] is True
    short = targets.Target("cost", targets.Estimate(0.01, 0.009, 0.021), 0.02)
    with pytest.raises(SystemExit) as stopped:
        targets.finish("demo", [short, exact], {})
    assert stopped.value.code == 1
    assert capsys.readouterr().out.splitlines()[0].endswith("<=0.02 short")


def test_holding_nothing_to_a_target_takes_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="demo: there must be targets"):
        targets.finish("demo", [], {})
    target = targets.Target("cost", targets.Estimate.exact(1), 2)
    with pytest.raises(ValueError, match="demo: there must be targets"):
        targets.finish("demo", [target], {}, untargeted="it has one")
    targets.finish("demo", [], {}, untargeted="none was asked for")
    out, err = capsys.readouterr()
    assert not out and err == "demo: nothing was held to a target: none was asked for\n"


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    """The stand-in as a program."""
    path = tmp_path / "epikvd"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_epikvd.__file__} "$@"\n')
    path.chmod(0o755)
    return path


def test_daemon_serves_and_stops(binary: Path) -> None:
    with Daemon("m.pt", binary=binary) as daemon:
        with daemon.client() as client:
            assert client.generate_once("hi").text == "HI"
        assert daemon.metrics == "127.0.0.1:1"
        assert "loading m.pt" in daemon.log
        pid = daemon.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_daemon_failures_show_its_log(binary: Path) -> None:
    early = pytest.raises(DaemonError, match=r"(?s)status 1 before it served.*made up")
    with early, Daemon("m.pt", "--fail", binary=binary):
        pass
    late = pytest.raises(DaemonError, match=r"(?s)status 3.*loading")
    with late, Daemon("m.pt", "--exit_status=3", binary=binary):
        pass


def test_token_goes_with_every_call(
    fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPIKV_TOKEN", "from the environment")
    with Client(fake.address, token="given") as client:
        client.models()
        list(client.generate("x"))
    with Client(fake.address) as client:
        client.models()
    with Client(fake.address, token="") as client:
        client.models()
    given, found = "Bearer given", "Bearer from the environment"
    assert fake.tokens == [given, given, found, None]


def test_tls_files_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Tls.from_environment() is None
    monkeypatch.setenv("EPIKV_TLS_CA", str(tmp_path / "absent.pem"))
    assert Tls.from_environment() == Tls(ca=str(tmp_path / "absent.pem"))
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 1 and "absent.pem" in result.output
    with pytest.raises(ValueError, match="together"):
        Client("127.0.0.1:1", tls=Tls(key="only.key"))


def test_token_is_printed_once_and_its_line_has_its_digest() -> None:
    result = CliRunner().invoke(main, ["token", "ann@x", "operator"])
    assert result.exit_code == 0
    token = result.stderr.split()[-1]
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert result.stdout == f"operator ann@x {digest}\n"
    assert CliRunner().invoke(main, ["token", "ann", "operator"]).stdout.split()[2] != digest
    for bad in (["token", "a b", "user"], ["token", "ann", "root"], ["token", "", "user"]):
        assert CliRunner().invoke(main, bad).exit_code != 0
