"""What new users stumbled over: values, addresses and tables, in Python and on the command line."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import epikv
import fake_epikvd
import grpc
import pytest
from click.testing import CliRunner, Result
from epikv import Client, Kv, Output, Sampling, Stop
from epikv.cli import main, show
from epikv.messages import Finished, KvUsage


@pytest.fixture(scope="module")
def fake() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as fake:
        yield fake


@pytest.fixture
def client(fake: fake_epikvd.Fake) -> Iterator[Client]:
    with Client(fake.address) as client:
        yield client


def run(*args: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, args, env={"COLUMNS": "80", **environment})


@pytest.mark.parametrize("prompt", [b"abc", None, [{"role": "user", "content": "hi"}], [1.5], 7])
def test_what_is_no_prompt_is_told_what_is_one(client: Client, prompt: Any) -> None:
    with pytest.raises(ValueError, match="a prompt is text, a list of token ids, or a Chat"):
        client.generate(prompt)


@pytest.mark.parametrize("continuation", [None, b"abc", epikv.Chat([])])
def test_what_is_no_continuation_is_told_what_is_one(client: Client, continuation: Any) -> None:
    with pytest.raises(ValueError, match="a continuation is text or a list of token ids; not"):
        client.score("x", continuation)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kv": "sliding"}, "kv is an epikv.Kv; not 'sliding'"),
        ({"stop": 20}, "stop is an epikv.Stop; not 20"),
        ({"kv": Kv("sliding", -5)}, "budget cannot be -5: it is a number of tokens"),
        ({"kv": Kv("sliding", True)}, "budget cannot be True"),
        ({"kv": Kv("sliding", 2**32)}, "budget cannot be 4294967296"),
        ({"kv": Kv("sliding", "half")}, "'half' is not a number of tokens"),
        ({"kv": Kv("sliding", 64, sink_tokens=-1)}, "sink_tokens cannot be -1"),
        ({"sampling": Sampling(temperature="hot")}, "temperature cannot be 'hot'"),
        ({"stop": Stop(max_output_tokens=-1)}, "max_output_tokens cannot be -1"),
        ({"output": Output(top_logprobs=1.5)}, "top_logprobs cannot be 1.5"),
    ],
)
def test_a_value_that_no_field_can_hold_is_named(
    client: Client, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match="^" + told):
        client.generate("x", **given)


@pytest.mark.parametrize("budget", ["50%", "0.5", 0.5])
def test_a_budget_may_be_written_as_on_the_command_line(
    client: Client, fake: fake_epikvd.Fake, budget: str | float
) -> None:
    list(client.generate("x", kv=Kv("epikv_flat", budget)))
    assert fake.requests[-1].kv.keep_ratio == 0.5


def test_a_url_is_no_address() -> None:
    with pytest.raises(ValueError, match="a server is HOST:PORT, not 'http://localhost:50051'"):
        Client("http://localhost:50051")


def test_the_package_tells_its_version_and_names() -> None:
    assert run("--version").stdout.endswith(f", version {epikv.__version__}\n")
    assert {"Client", "Kv", "__version__"} <= set(dir(epikv))


@pytest.mark.parametrize("command", [[], ["generate"], ["admin", "drain"], ["bench", "load"]])
def test_h_is_help(command: list[str]) -> None:
    shown = run(*command, "-h")
    assert shown.exit_code == 0 and shown.stdout == run(*command, "--help").stdout


def test_a_status_is_not_said_twice() -> None:
    error = epikv.RpcError(grpc.StatusCode.NOT_FOUND, "gone", reason="NOT_FOUND")
    assert str(error) == "NOT_FOUND: gone"


def test_a_missing_budget_is_told_as_the_command_line_has_it() -> None:
    said = "policy 'snapkv' needs max_tokens or keep_ratio"
    fault = epikv.FieldViolation("kv.budget", said)
    refused = epikv.RpcError(
        grpc.StatusCode.INVALID_ARGUMENT, said, reason="INVALID_REQUEST", field_violations=(fault,)
    )
    assert "--budget" in refused.advice and "50%" in refused.advice
    other = epikv.RpcError(grpc.StatusCode.INVALID_ARGUMENT, "no", reason="INVALID_REQUEST")
    assert other.advice == ""


def test_options_for_json_are_refused_without_it(fake: fake_epikvd.Fake) -> None:
    for option in ("--logprobs", "--top-logprobs=2", "--token-ids", "--trace"):
        refused = run("generate", "x", option, "--server", fake.address)
        assert refused.exit_code == 2
        assert f"{option.partition('=')[0]} shows with --json alone" in refused.stderr
        assert run("generate", "x", option, "--json", "--server", fake.address).exit_code == 0


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"\xff\xfe")
    refused = run("generate", "--file", str(file))
    assert refused.exit_code == 2 and f"{file} is not text in UTF-8" in refused.stderr


def test_names_of_policies_are_never_cut(fake: fake_epikvd.Fake) -> None:
    with Client(fake.address) as client:
        names = [policy.name for policy in client.policies()]
    shown = run("policies", "--all", "--server", fake.address, COLUMNS="60").stdout
    assert all(f" {name} " in shown for name in names)


def test_a_port_that_does_not_know_a_call_names_the_other(fake: fake_epikvd.Fake) -> None:
    refused = run("admin", "status", "--server", fake.address)
    assert refused.exit_code == 1
    assert "admin_listen" in refused.stderr and "EPIKV_ADMIN_SERVER" in refused.stderr


NOBODY, OTHER = "127.0.0.1:1", "127.0.0.1:2"


@pytest.mark.parametrize(
    ("command", "environment", "asked"),
    [
        (["drain"], {}, "127.0.0.1:50052"),
        (["drain"], {"EPIKV_ADMIN_SERVER": NOBODY}, NOBODY),
        (["drain", "--server", NOBODY], {"EPIKV_ADMIN_SERVER": OTHER}, NOBODY),
        (["--server", NOBODY, "drain"], {"EPIKV_SERVER": OTHER}, NOBODY),
        (["config", "max_running_requests=4", "--server", NOBODY], {}, NOBODY),
        (["load-model", "m.pt", "--server", NOBODY], {}, NOBODY),
        (["unload-model", "m", "--server", NOBODY], {}, NOBODY),
    ],
)
def test_what_changes_a_daemon_names_it_first(
    command: list[str],
    environment: dict[str, str],
    asked: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epikv.admin.connect", refuse)
    for name in ("EPIKV_SERVER", "EPIKV_ADMIN_SERVER"):
        monkeypatch.delenv(name, raising=False)
    done = run("admin", *command, **environment)
    assert done.exit_code == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("epikv: ") and first.endswith(f", at {asked}")
    assert second == f"Error: connects to {asked}"


def refuse(server: str, **_: object) -> None:
    raise ValueError(f"connects to {server}")


def test_the_local_daemon_is_not_meant_by_who_has_named_another() -> None:
    refused = run("admin", "drain", EPIKV_SERVER="gpu7:50051", EPIKV_ADMIN_SERVER=None)
    assert refused.exit_code == 2 and "EPIKV_ADMIN_SERVER" in refused.stderr


@pytest.mark.parametrize(("policy", "told"), [("full", "no budget"), ("h2o", "budget 685 tokens")])
def test_what_has_no_budget_says_so(policy: str, told: str) -> None:
    usage = KvUsage(policy, 685, 600, 600, 0, 0, 0, 0, False, [])
    ended = Finished(0, "end", None, None, 31, usage, False)
    summary = SimpleNamespace(**vars(ended), usage=None, timings=None)
    assert dict(show.facts(summary))["cache"] == f"{told}, peak 600"


def test_every_command_of_an_experiment_takes_a_server(tmp_path: Path) -> None:
    file = tmp_path / "lean.textproto"
    assert run("experiment", "init", str(file), "--server", "nobody:1").exit_code == 0
    assert file.exists()


def test_score_shows_special_tokens(
    fake: fake_epikvd.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def detokenize(self: Client, ids: list[int], **how: bool) -> str:
        asked.append(how)
        return "<unk>"

    monkeypatch.setattr(Client, "detokenize", detokenize)
    assert '"<unk>"' in run("score", "a", "x y", "--server", fake.address).stdout
    assert asked and all(how == {"skip_special_tokens": False} for how in asked)
