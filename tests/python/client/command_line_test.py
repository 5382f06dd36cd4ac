"""`epikv` as it is typed, against a stand-in for the daemon."""

import json
import shlex
from pathlib import Path

import click
import fake_epikvd
import pytest
from command_line import run
from epikv.cli import main
from epikv.cli.options import KvFields
from epikv.options import ROLES
from epikv.v1 import generation_pb2

ROOT = Path(__file__).parents[3]

SHOWN = [ROOT / "README.md", ROOT / "docs" / "getting-started.md"]


def test_generate_prints_text_and_facts_apart(fake: fake_epikvd.Fake) -> None:
    result = run("generate", "two words", "--server", fake.address, "--budget", "50%")
    assert result.exit_code == 0 and result.stdout == "two words \n"
    assert "stop_string: end" in result.stderr and "3 in, 2 out" in result.stderr
    assert fake.requests[-1].kv.keep_ratio == 0.5


def test_generate_json_is_one_object_an_event(fake: fake_epikvd.Fake) -> None:
    result = run(
        "generate", "a [b]", "--server", fake.address, "--json", "--trace", "--param", "n=3",
        "--param", "scope=head", "--budget", "32", "--protect", "0:4", "--no-protect-prompt",
    )  # fmt: skip
    events = [json.loads(line) for line in result.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["accepted", "delta", "delta", "eviction", "summary"]
    assert events[2]["text"] == "[b] " and events[4]["kv"]["budget_tokens"] == 5
    kv = fake.requests[-1].kv
    assert dict(kv.policy_params) == {"n": 3, "scope": "head"}
    assert kv.max_tokens == 32 and not kv.protect_prompt and kv.HasField("protect_prompt")


def test_priority_and_tenant_are_options_of_both(fake: fake_epikvd.Fake) -> None:
    given = ("--priority", "low", "--tenant", "someone", "--server", fake.address)
    run("generate", "x", *given)
    run("score", "x", "y", *given)
    assert [(r.scheduling.priority, r.scheduling.tenant) for r in fake.requests] == [
        (generation_pb2.PRIORITY_LOW, "someone")
    ] * 2


def test_prompt_from_stdin_file_and_ids(fake: fake_epikvd.Fake, tmp_path: Path) -> None:
    run("generate", "--server", fake.address, input="from stdin")
    (tmp_path / "prompt").write_text("from file")
    run("generate", "--server", fake.address, "--file", str(tmp_path / "prompt"))
    run("generate", "--server", fake.address, "--ids", "3 1 4")
    stdin, file, ids = fake.requests
    assert (stdin.text, file.text, ids.token_ids.ids) == ("from stdin", "from file", [3, 1, 4])


def test_score_takes_its_prompt_as_generate_does(fake: fake_epikvd.Fake, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("from file")
    file = ("--file", str(tmp_path / "prompt"))
    run("score", "argument", "x", "--server", fake.address)
    run("score", "x", *file, "--server", fake.address)
    run("score", "x", "--server", fake.address, input="from stdin")
    prompts = [request.text for request in fake.requests]
    assert prompts == ["argument", "from file", "from stdin"]
    assert {request.continuation_text for request in fake.requests} == {"x"}
    run("score", "--ids", "3 1", "4", "--server", fake.address)
    assert fake.requests[-1].token_ids.ids == [3, 1]
    assert fake.requests[-1].continuation_ids.ids == [4]
    twice = run("score", "argument", "x", *file)
    assert twice.exit_code == 2 and "not both" in twice.stderr
    assert run("score").exit_code == 2
    assert run("score", "words", "without", "quotes").exit_code == 2


def using_it() -> list[str]:
    """The `epikv` lines of the first pages."""
    blocks = [block for page in SHOWN for block in page.read_text().split("```")[1::2]]
    return [line for block in blocks for line in block.splitlines() if line.startswith("epikv ")]


def test_the_first_pages_show_epikv_commands() -> None:
    shown = {shlex.split(line, comments=True)[1] for line in using_it()}
    assert {"export", "generate", "score", "policies", "bench", "eval"} <= shown


@pytest.mark.parametrize("line", using_it())
def test_the_first_pages_show_what_parses(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "DIR").mkdir()
    (tmp_path / "build" / "sample").mkdir(parents=True)
    for name in ("model.pt", "FILE", "build/sample/model.pt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(line, comments=True)
    command: click.Command | None = main
    context: click.Context | None = None
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=name, parent=context, **command.context_settings)
        name, *words = words
        command = command.get_command(context, name)
    assert command is not None, f"there is no command '{name}'"
    command.make_context(name, words, parent=context)


def test_generate_takes_every_sampling_option(fake: fake_epikvd.Fake) -> None:
    options = "--min-p .1 --typical-p .75 --repetition-penalty 1.5 --frequency-penalty -.5"
    more = "--presence-penalty 2 --logit-bias 7=-1.5 --logit-bias 9=3 --min-output-tokens 4"
    words = [*options.split(), *more.split(), "--ignore-eos", "--server", fake.address]
    assert run("generate", "x", *words).exit_code == 0
    sampling, stop = fake.requests[-1].sampling, fake.requests[-1].stop
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.75, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 2)
    assert sampling.HasField("min_p") and dict(sampling.logit_bias) == {7: -1.5, 9: 3}
    assert (stop.min_output_tokens, stop.ignore_eos) == (4, True)
    assert run("generate", "x", "--logit-bias", "7").exit_code == 2


def test_generate_tells_of_a_long_prompt(fake: fake_epikvd.Fake) -> None:
    told = run("generate", "x", "--progress", "--server", fake.address)
    assert "prompt: 256 of 300 tokens" in told.stderr and told.stdout == "x \n"
    options = "--json --progress --prompt-logprobs --top-logprobs 2 --coalesce 0.25"
    shown = run("generate", "x", *options.split(), "--server", fake.address)
    kinds = [json.loads(line)["event"] for line in shown.stdout.splitlines()]
    assert kinds == ["accepted", "progress", "prompt_logprobs", "delta", "summary"]
    sent = fake.requests[-1].output
    assert (sent.top_logprobs, sent.coalesce.nanos) == (2, 250_000_000)
    assert run("score", "a", "b", "--top-logprobs", "2", "--server", fake.address).exit_code == 0
    assert fake.requests[-1].top_logprobs == 2


def test_chat_sends_the_conversation_so_far(fake: fake_epikvd.Fake) -> None:
    told = "one two\n\n  \nthree\n/clear\nfour\n/exit\nfive\n"
    result = run("chat", "--server", fake.address, "--system", "be brief", "-n", "5", input=told)
    assert result.exit_code == 0, result.output
    assert result.stdout == "one two \nthree \nfour \n"
    assert result.stderr.count("tokens: 3 in, 2 out") == 3
    contents = [[message.content for message in sent.chat.messages] for sent in fake.requests]
    assert contents == [
        ["be brief", "one two"],
        ["be brief", "one two", "one two ", "three"],
        ["be brief", "four"],
    ]
    roles = [ROLES[role] for role in ("system", "user", "assistant", "user")]
    assert [m.role for m in fake.requests[1].chat.messages] == roles
    assert fake.requests[0].stop.max_output_tokens == 5


def test_chat_that_is_refused_says_so(fake: fake_epikvd.Fake) -> None:
    result = run("chat", "--server", fake.address, "--policy", "nope", input="hello\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("epikv: INVALID_ARGUMENT (KV_BUDGET): 2 fields are invalid")


def test_failures_are_one_message_and_exit_1(fake: fake_epikvd.Fake) -> None:
    refused = run("generate", "x", "--policy", "nope", "--server", fake.address)
    assert refused.exit_code == 1 and refused.stdout == ""
    assert "epikv: INVALID_ARGUMENT (KV_BUDGET)" in refused.stderr
    assert "kv.max_tokens: too small" in refused.stderr
    absent = run("models", "--server", "127.0.0.1:1")
    assert absent.exit_code == 1 and "--server" in absent.stderr
    negative = run("generate", "x", "--budget", "-3", "--server", fake.address)
    assert negative.exit_code == 1 and "-3" in negative.stderr
    assert run("generate", "x", "--budget", "many").exit_code == 2
    assert run("generate", "x", "--param", "k").exit_code == 2


def test_score_policies_and_models(fake: fake_epikvd.Fake) -> None:
    scored = run("score", "a", "x y", "--server", fake.address)
    assert '"t4"' in scored.stdout and "sum -3.0000, perplexity 4.4817" in scored.stdout
    as_json = run("score", "a", "x y", "--server", fake.address, "--json")
    assert json.loads(as_json.stdout)["logprobs"] == [-1.0, -2.0]
    listed = run("policies", "--all", "--server", fake.address)
    assert "epikv_flat" in listed.stdout and "oracle *" in listed.stdout
    described = run("policies", "epikv_flat", "--server", fake.address)
    assert "window" in described.stdout and "2 .. " in described.stdout
    words = " ".join(described.stdout.split())
    assert "protects the prompt where prompt + 16 <= budget, 4 sinks, the newest 0.5 of" in words
    assert "refuses kv.budget absent: it evicts" in words
    assert "cheap: 9 us of CPU a token, 0.4% of a step, at 4096 cached tokens (x86)" in words
    assert "defaults this model has none" in " ".join(
        run("policies", "oracle", "--server", fake.address).stdout.split()
    )
    assert "fake" in run("models", "--server", fake.address).stdout
    assert run("cancel", "r1", "--server", fake.address).exit_code == 0


def test_fields_that_are_varied_are_read() -> None:
    read = KvFields().convert("tier_tokens=200,tier_fetch=32,tier_doubt=0.001", None, None)
    assert read == {"tier_tokens": 200, "tier_fetch": 32, "tier_doubt": 0.001}


@pytest.mark.parametrize(
    "text",
    ["tier_tokens=-5", "tier_tokens=1_000", "tier_tokens=1.5", "guard=", "tier_tokens"]
    + [f"tier_doubt={number}" for number in ("nan", "inf", "-1", "much")]
    + ["budget=5", ""],
)
def test_fields_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not FIELD=N; fields: tier_tokens"):
        KvFields().convert(text, None, None)
