"""What a new user types first: what it shows, and what it says where it cannot go on."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import epikv
import fake_epikvd
import grpc
import pytest
from click.testing import CliRunner, Result
from epikv import installing, recommended
from epikv.cli import main, options
from epikv.v1 import generation_pb2, model_pb2, policy_pb2
from fake_experiments import reason, refuse

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def fake() -> Iterator[fake_epikvd.Fake]:
    with fake_epikvd.serve() as fake:
        yield fake


def run(*args: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, args, env={"COLUMNS": "80", **environment})


# Policies.


def policy(name: str, share: float, **more: Any) -> policy_pb2.Policy:
    cost = policy_pb2.PolicyCost(level="cheap", share_of_step=share)
    return policy_pb2.Policy(name=name, summary=f"drops what {name} drops", cost=cost, **more)


OFFERED = [
    policy("a_name_that_is_rather_long_yes", 0.5),
    policy("cur", 0.008),
    policy("epikv_flat", 0.001, prompt_eviction="refuses"),
    policy("epikv_probe", 0.001, prompt_eviction="refuses", needs_artefact=True),
    policy("expected_attention", 0.037),
    policy_pb2.Policy(name="full", prompt_eviction="refuses"),
    policy("random", 0.002),
    policy("sliding", 0.002),
]


@pytest.fixture(scope="module")
def offering() -> Iterator[str]:
    with fake_epikvd.serve(policies=OFFERED) as fake:
        yield fake.address


def names(shown: str) -> list[str]:
    """Of the first column, where a row begins."""
    rows = re.split(r"[├┡].*\n", shown)[1:]
    return [row.split("│")[1].strip() for row in rows]


def test_policies_begins_with_the_recommended_and_says_how_to_see_the_rest(offering: str) -> None:
    shown = run("policies", "--server", offering).stdout
    assert names(shown) == list(recommended.RECOMMENDED)
    words = " ".join(shown.replace("│", " ").split())
    for why in recommended.RECOMMENDED.values():
        assert why in words
    assert "The other 3: epikv policies --all" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("columns", ["80", "60"])
def test_all_lists_every_policy_by_its_whole_name(offering: str, columns: str) -> None:
    shown = run("policies", "--all", "--server", offering, COLUMNS=columns).stdout
    assert names(shown) == [each.name for each in OFFERED]


def test_a_policy_is_listed_with_what_it_drops_needs_and_costs(offering: str) -> None:
    shown = run("policies", "--all", "--server", offering, COLUMNS="200").stdout
    words = " ".join(shown.replace("│", " ").split())
    assert "sliding drops what sliding drops cheap, 0.2 % needs nothing" in words
    assert "needs epikv calibrate epikv_probe; a prompt within the budget" in words
    assert "epikv calibrate epikv_flat, or it may be worse than chance" in words, "no calibration"
    assert "full none needs room for every token" in words


def test_json_lists_every_policy(offering: str) -> None:
    assert len(run("policies", "--json", "--server", offering).stdout.splitlines()) == len(OFFERED)


def test_a_name_and_all_contradict(offering: str) -> None:
    refused = run("policies", "cur", "--all", "--server", offering)
    assert refused.exit_code == 2 and "--all" in refused.stderr


def solved() -> dict[str, list[float]]:
    """What each policy solved, of docs/what-policies-keep.md: reasoning, then recall."""
    page = (ROOT / "docs" / "what-policies-keep.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) > 30
    return {name: [float(cell) for cell in cells.split("|")] for name, cells in rows}


def shares_of_a_step() -> dict[str, float]:
    costs = (ROOT / "policies" / "costs.inc").read_text()
    return {name: float(share) for name, share in re.findall(r'\{"(\w+)", .*, (\S+)\}', costs)}


def test_what_is_recommended_is_what_was_measured() -> None:
    found, costs = solved(), shares_of_a_step()
    assert len(recommended.RECOMMENDED) == 5
    for name, why in recommended.RECOMMENDED.items():
        (share,) = re.findall(r"(\d+) %", why)
        assert int(share) == round(100 * found[name][1]), why  # reasoning, 50 %

    def mean(name: str) -> float:
        return sum(found[name]) / len(found[name])

    ranked = sorted(set(found) - {"full", "oracle"}, key=mean, reverse=True)
    calibrated = {"epikv_probe", "epikv_flat", "thinkv_tbe", "triattention"}
    trained = {"dbtrimkv", "dms", "epikv_forecast", "kvzap", "trimkv"}
    as_it_is = [name for name in ranked if name not in calibrated | trained]
    assert as_it_is[0] == "expected_attention"
    assert next(name for name in as_it_is if costs[name] < 0.02) == "cur"
    assert costs["epikv_flat"] < 0.001


# How long an answer is.


def test_generate_asks_for_256_tokens_unless_it_is_told(fake: fake_epikvd.Fake) -> None:
    assert options.OUTPUT_TOKENS == 256
    assert "256" in run("generate", "--help").stdout and "256" in run("chat", "--help").stdout
    for given, expected in (((), 256), (("-n", "7"), 7), (("--min-output-tokens=300",), 300)):
        assert run("generate", "x", *given, "--server", fake.address).exit_code == 0
        assert fake.requests[-1].stop.max_output_tokens == expected
    asked = CliRunner().invoke(main, ["chat", "--server", fake.address], input="hi\n")
    assert asked.exit_code == 0 and fake.requests[-1].stop.max_output_tokens == 256


class Small(fake_epikvd._Generation):
    """A context that has no room for 256 tokens behind the prompt, but for some."""

    def Generate(self, request, context):
        if request.stop.max_output_tokens >= 100:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "over", reason("CONTEXT_LENGTH"))
        yield from super().Generate(request, context)


def test_a_small_context_gets_what_it_leaves_unless_a_number_was_given() -> None:
    noted = fake_epikvd.Fake()
    with fake_epikvd.serve(generation=Small(noted)) as served:
        assert run("generate", "one two", "--server", served.address).stdout == "one two \n"
        assert not noted.requests[-1].stop.HasField("max_output_tokens")
        refused = run("generate", "one two", "-n", "256", "--server", served.address)
    assert refused.exit_code == 1 and "CONTEXT_LENGTH" in refused.stderr


class Long(fake_epikvd._Generation):
    """Its answers end at their limit. Rounds of its policy are of 64 tokens."""

    def Generate(self, request, context):
        for event in super().Generate(request, context):
            if event.HasField("accepted"):
                event.accepted.kv.policy_params.update({"slack": 63})
            if event.HasField("summary"):
                event.summary.finish_reason = generation_pb2.FINISH_REASON_LENGTH
                event.summary.kv.policy = "snapkv"
            yield event


def test_who_is_cut_off_is_told_how_to_get_more() -> None:
    with fake_epikvd.serve(generation=Long(fake_epikvd.Fake())) as served:
        told = run("generate", "x", "--server", served.address).stderr
        assert "ended at 256 tokens: -n asks for more" in told
        assert "-n asks" not in run("generate", "x", "-n", "9", "--server", served.address).stderr


def test_a_budget_is_told_with_its_slack() -> None:
    with fake_epikvd.serve(generation=Long(fake_epikvd.Fake())) as served:
        told = run("generate", "x", "--server", served.address).stderr
        assert "budget 5 tokens (+63 slack), peak 5" in told
        chat = CliRunner().invoke(main, ["chat", "--server", served.address], input="hi\n")
        assert "(+63 slack)" in chat.stderr


# Conversations.


def test_chat_refuses_before_anything_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_pb2.Model(name="plain")
    monkeypatch.setattr(fake_epikvd, "MODEL", model)
    with fake_epikvd.serve() as served:
        model.chat.refusal = "the checkpoint has no chat template"
        refused = CliRunner().invoke(main, ["chat", "--server", served.address], input="hi\n")
        assert refused.exit_code == 1 and "plain takes no conversations" in refused.stderr
        assert "no chat template" in refused.stderr and "epikv generate" in refused.stderr
        model.chat.refusal, model.chat.system_refusal = "", "System role not supported"
        words = ["chat", "--system", "x", "--server", served.address]
        refused = CliRunner().invoke(main, words, input="hi\n")
        assert refused.exit_code == 1 and "System role not supported" in refused.stderr
        assert served.requests == []
        assert CliRunner().invoke(main, ["chat", "--server", served.address]).exit_code == 0


# Completion in the shell.


def completed(shell: str, **words: str) -> str:
    """What the command offers to that shell's script."""
    command = [sys.executable, "-c", "from epikv.cli import main; main(prog_name='epikv')"]
    environment = {**os.environ, "_EPIKV_COMPLETE": f"{shell}_complete", **words}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_asks_epikv(shell: str) -> None:
    script = run("completion", shell).stdout
    assert f"_EPIKV_COMPLETE={shell}_complete" in script and "epikv" in script
    offered = completed(shell, COMP_WORDS="epikv pol", COMP_CWORD="pol" if shell == "fish" else "1")
    assert "policies" in offered and "generate" not in offered
    assert f"epikv completion {shell}" in run("completion", "--help").stdout


def test_bash_takes_the_script(tmp_path: Path) -> None:
    epikv = tmp_path / "epikv"
    epikv.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c"
        """ "from epikv.cli import main; main(prog_name='epikv')" "$@"\n"""
    )
    epikv.chmod(0o755)
    asked = (
        'eval "$(epikv completion bash)" && complete -p epikv'
        " && COMP_WORDS=(epikv generate --top) COMP_CWORD=2 && _epikv_completion epikv"
        ' && printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", asked],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *offered = done.stdout.splitlines()
    assert "_epikv_completion" in first
    assert set(offered) == {"--top-p", "--top-k", "--top-logprobs"}


def test_an_unknown_shell_is_told_which_are_known() -> None:
    refused = run("completion", "csh")
    assert refused.exit_code == 2 and "'bash', 'zsh', 'fish'" in refused.stderr


# What is missing.


def test_of_a_checkout_the_advice_names_its_folder() -> None:
    assert installing.pip_install("eval") == f"pip install '{ROOT / 'tools'}[eval]'"


def test_of_a_wheel_the_advice_names_packages_that_an_index_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = ["click<9,>=8.1", 'torch==2; extra == "export"', 'numpy==1; extra == "calibrate"']
    monkeypatch.setattr(installing, "_SOURCE", tmp_path)
    monkeypatch.setattr(installing, "requires", lambda _: asked)
    assert installing.pip_install("export") == "pip install 'torch==2'"
    assert installing.pip_install("calibrate", "export") == "pip install 'torch==2' 'numpy==1'"


def test_the_advice_takes_what_this_package_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installing, "_SOURCE", tmp_path)
    command = installing.pip_install("export")
    assert "'torch==" in command and "'transformers==" in command and "ruff" not in command


def test_no_message_names_an_index_that_has_no_epikv() -> None:
    sources = [*ROOT.glob("tools/epikv/**/*.py"), *ROOT.glob("tools/epikv/**/*.md")]
    sources += [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    wrong = re.compile(r"pip install '?epikv\b")
    assert [path for path in sources if wrong.search(path.read_text())] == []


def test_export_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "epikv.export.exporter", None)
    refused = run("export", str(tmp_path), str(tmp_path / "m.pt"))
    assert refused.exit_code == 1 and installing.pip_install("export") in refused.stderr


def test_every_public_name_is_listed_once() -> None:
    assert len(set(epikv.__all__)) == len(epikv.__all__) and "Admin" in epikv.__all__
