"""Parts of `epikv bench` that need no daemon."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import ClickException
from click.testing import CliRunner
from epikv import harness, programs
from epikv.cli import main
from epikv.messages import Packet, Policy, PolicyParam
from epikv.scrape import parse
from epikv.testing import DaemonError, find_binary
from epikv_lab.bench import packets, policies
from epikv_lab.bench.costs import write_costs
from epikv_lab.bench.streams import random_prompt

PAGE = """\
# HELP epikv_step_tokens_total Tokens run in steps.
# TYPE epikv_step_tokens_total counter
epikv_step_tokens_total{model="m",phase="decode"} 12
epikv_step_tokens_total{phase="prefill",model="m"} 3e+01
epikv_requests_running{model="m"} 2
process_open_fds 7
"""


def test_pages_are_read_and_subtracted() -> None:
    page = parse(PAGE)
    assert page.value("epikv_step_tokens_total", phase="decode") == 12
    assert page.value("epikv_step_tokens_total", phase="prefill") == 30
    assert page.value("epikv_requests_running") == 2
    assert page.value("process_open_fds") == 7
    assert page.value("epikv_step_tokens_total") == 0
    later = parse(PAGE.replace("} 12", "} 20") + 'epikv_new_total{model="m"} 1\n') - page
    assert later.value("epikv_step_tokens_total", phase="decode") == 8
    assert later.value("epikv_new_total") == 1


def test_prompts_are_repeatable() -> None:
    assert random_prompt(50, 10, 1) == random_prompt(50, 10, 1) != random_prompt(50, 10, 2)
    assert set(random_prompt(500, 10, 1)) == set(range(10))


def test_files_are_made_again_when_what_they_hold_changes() -> None:
    one, same, other = (harness.cached("m", {"layers": n}) for n in (1, 1, 2))
    assert one == same != other and one.name.startswith("m-")


def policy(name: str, slack: int | None, signals: Sequence[str] = ()) -> Policy:
    params = [] if slack is None else [PolicyParam("slack", "int", slack, 0, 65536, [], "")]
    return Policy(
        name=name,
        summary="",
        paper="",
        params=params,
        params_schema=None,
        evaluation_only=False,
        signals=list(signals),
        granularity="token",
        prompt_eviction="refuses",
        slack_tokens=slack or 0,
        default_protection=None,
        incompatible_options=[],
        columns=[],
        state_bytes_per_token=0,
        state_bytes_per_sequence=0,
        cost=None,
        needs_artefact=False,
        has_artefact=False,
    )


def window(page: str) -> policies.Window:
    stream = SimpleNamespace(summary=None, cancel=lambda: None, join=lambda: None)
    served = SimpleNamespace(wait_until_idle=lambda: None)
    return policies._between(served, stream, parse(""), parse(page), "tova")


def test_a_window_of_a_policy_holds_nothing_but_decoding() -> None:
    page = """\
epikv_step_seconds_count{phase="decode"} 4
epikv_step_tokens_total{phase="decode"} 4
epikv_engine_cpu_seconds_total 0.8
epikv_kv_eviction_seconds_count{policy="tova"} 2
epikv_step_cpu_seconds_total{stage="taps"} 0.04
epikv_step_cpu_seconds_total{stage="evict"} 0.2
"""
    found = window(page)
    assert (found.steps, found.rounds, found.step) == (4, 2, 0.2)
    assert found.stage(*policies.STAGES) == pytest.approx(0.06)
    for other in ('{phase="prefill"} 1', '{phase="decode"} 6'):
        with pytest.raises(ClickException, match="something else"):
            window(page + f"epikv_step_tokens_total{other}\n")


def test_a_policy_without_attention_is_to_cost_next_to_nothing() -> None:
    share = {512: policies.Cost([1e-3], [], [], 700, 256)}
    for signals, told in (((), "(over)"), (("keys",), "(over)"), (("keys", "queries"), "| 700")):
        table = policies._table([policy("it", 0, signals)], {"it": share}, {}, {512: 0.02})
        assert f"5.0% {told}" in table


def test_costs_are_told_in_shares_of_a_step() -> None:
    costs = {
        "tova": {
            512: policies.Cost([1e-3, 3e-3, 2e-3], [], [], 700, 256),
            4096: policies.Cost([8e-3], [], [], 900, 256),
        }
    }
    whole = {512: 0.02, 4096: 0.04}
    chosen = [policy("tova", 0), policy("vase", 63)]
    table = policies._table(chosen, costs, {"vase": "no calibration"}, whole)
    assert "| `tova` | 0 | 2000 / 8000 | 10.0% / 20.0% (over) | 700 / 900 | 256 |" in table
    assert "| `vase` | | not measured: no calibration |" in table
    results = policies._results(costs, whole, "this machine")
    assert results == {
        "made_with": "this machine",
        "policies": {
            "tova": {
                "cpu_us_per_token": {"512": pytest.approx(2000), "4096": pytest.approx(8000)},
                "share_of_step": {"512": pytest.approx(0.1), "4096": pytest.approx(0.2)},
                "bytes_per_sequence": {"512": 700, "4096": 900},
            }
        },
    }
    filled = f"before\n{policies.BEGIN}{table}{policies.END}after\n"
    assert policies._with_rows(filled.replace(table, ""), table) == filled
    # Of one measured alone, its own row.
    older = table.replace("| `tova` | 0", "| `tova` | 7").replace("| `vase`", "| `raas`")
    both = policies._with_rows(filled.replace(table, older), table)
    assert [line.split("`")[1] for line in both.splitlines() if line.startswith("| `")] == [
        "raas",
        "tova",
        "vase",
    ]
    assert "| `tova` | 0" in both and "| `tova` | 7" not in both


def test_costs_that_stay_keep_what_they_were_made_with(tmp_path: Path) -> None:
    def results(machine: str, *names: str) -> dict[str, Any]:
        cost = {"cpu_us_per_token": {"512": 1.0}, "share_of_step": {"512": 0.01}}
        return {"made_with": machine, "policies": dict.fromkeys(names, cost)}

    file = tmp_path / "costs.inc"
    write_costs(results("one", "tova", "vase"), file)
    assert 'kMadeWith = "one";' in file.read_text()
    write_costs(results("other", "raas"), file)
    assert 'kMadeWith = "one; raas: other";' in file.read_text()
    write_costs(results("new", "raas", "tova", "vase"), file)
    assert 'kMadeWith = "new";' in file.read_text()


def test_packets_are_told_beside_the_prefill_of_the_same_round() -> None:
    made = [
        packets.Made(Packet("it", "m", "", 512, 512, False, 2_000_000, None), seconds)
        for seconds in (0.25, 0.75, 0.5)
    ]
    rounds = [
        {"packets": packets.First(0.01 * slow, 0.03), "prefill": packets.First(0.1 * slow, 0.12)}
        for slow in (1, 7, 2)  # the machine is, and both are
    ]
    figures = {3: packets.told(rounds, made)}
    row = "| 3 | 6.0 | 0.50 | 20.0 | 200.0 | 0.100 [0.100, 0.100] | 0.250 [0.250, 0.250] |"
    assert packets.table(figures, 512).splitlines()[-1] == row


def test_numbers_of_documents_are_numbers() -> None:
    for wrong in ("", "1,,4", "0", "two", "-1"):
        result = CliRunner().invoke(packets.command, ["--documents", wrong])
        assert result.exit_code == 2 and "numbers with commas" in result.output


def checkout(root: Path, build: str) -> Path:
    """A checkout whose set-up builds with these commands, in which $1 is the target."""
    (root / "deploy").mkdir()
    (root / "deploy" / "setup.sh").write_text(
        f"set -euo pipefail\nROOT={root}\nsetup() {{ echo set up; }}\nbuild() {{\n{build}\n}}\n"
    )
    return root


@pytest.fixture
def no_epikvd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPIKVD", raising=False)


@pytest.mark.usefixtures("no_epikvd")
def test_a_checkout_builds_its_daemon_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build = 'mkdir -p "$ROOT/build/dev/server"; echo "$1" >> "$ROOT/build/dev/server/epikvd"'
    root = checkout(tmp_path, build)
    stale = root / "build" / "release" / "server" / "epikvd"
    stale.parent.mkdir(parents=True)
    stale.touch()
    binary = harness.fresh_binary(root)
    assert binary == harness.fresh_binary(root) == root / "build" / "dev" / "server" / "epikvd"
    assert binary.read_text() == "epikvd\n"
    out, err = capfd.readouterr()
    assert "set up" in err and not out


def test_a_named_daemon_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIKVD", "/named/epikvd")
    assert harness.fresh_binary(checkout(tmp_path, "exit 9")) == Path("/named/epikvd")


@pytest.mark.usefixtures("no_epikvd")
def test_outside_a_checkout_the_daemon_is_that_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epikv.programs.PACKAGE", tmp_path / "lib" / "epikv")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DaemonError, match="no epikvd found"):
        find_binary()
    installed = tmp_path / "epikvd"
    installed.touch(mode=0o755)
    assert harness.fresh_binary(tmp_path) == installed


@pytest.mark.usefixtures("no_epikvd")
def test_what_measures_a_model_builds_no_daemon_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`epikv eval` and `epikv calibrate`: a checkout's daemon as it was built last."""
    root = checkout(tmp_path, 'mkdir -p "$ROOT/build/dev/server"; touch "$ROOT/made"')
    built = root / "build" / "dev" / "server" / "epikvd"
    monkeypatch.setattr(harness, "ROOT", root)
    monkeypatch.setattr(programs, "PACKAGE", root / "tools" / "epikv")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert harness.built_binary(Path("/given/epikvd")) == Path("/given/epikvd")
    built.parent.mkdir(parents=True)
    built.touch(mode=0o755)
    assert harness.built_binary(None) == built and not (root / "made").exists()
    built.unlink()
    assert harness.built_binary(None) == built and (root / "made").exists()


@pytest.mark.usefixtures("no_epikvd")
def test_a_failed_build_is_not_taken_for_a_short_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "ROOT", checkout(tmp_path, "exit 1"))
    result = CliRunner().invoke(main, ["bench", "position"])
    assert result.exit_code == 2 and "could not be built" in result.stderr and not result.stdout


def test_a_daemon_that_does_not_start_is_not_taken_for_a_short_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "random_model", lambda *_, **__: tmp_path / "model.pt")
    broken = tmp_path / "epikvd"
    broken.write_text("#!/bin/sh\necho no model >&2\nexit 1\n")
    for mode, said in ((0o755, "no model"), (0o644, "Permission denied")):
        broken.chmod(mode)
        result = CliRunner().invoke(main, ["bench", "position", "--binary", str(broken)])
        assert result.exit_code == 2 and said in result.stderr and not result.stdout
