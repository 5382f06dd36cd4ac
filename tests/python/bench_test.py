"""Parts of `epikv bench` that need no daemon."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from epikv.bench import harness, sample
from epikv.bench.load import random_prompt
from epikv.bench.scrape import parse
from epikv.cli import main
from epikv.sample.simulate import Outcome
from epikv.testing import DaemonError, find_binary

PAGE = """\
# HELP epikv_step_tokens_total Tokens run, step by step.
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


def test_the_sample_bench_says_that_nothing_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = nullcontext(SimpleNamespace(client=None))
    outcomes = dict.fromkeys(sample.POLICIES, Outcome([[True]]))
    monkeypatch.setattr(harness, "serving", lambda *_, **__: served)
    monkeypatch.setattr(sample, "_run", lambda *_: outcomes)
    command = ["bench", "sample", "--model-dir", str(tmp_path), "--fraction", "0.35"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0 and not result.stdout
    assert "nothing was held to a target: the gates are those at" in result.stderr


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
    monkeypatch.setattr("epikv.testing.__file__", str(tmp_path / "lib" / "epikv" / "testing.py"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DaemonError, match="no epikvd found"):
        find_binary()
    installed = tmp_path / "epikvd"
    installed.touch(mode=0o755)
    assert harness.fresh_binary(tmp_path) == installed


@pytest.mark.usefixtures("no_epikvd")
def test_a_failed_build_is_not_taken_for_a_short_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_ROOT", checkout(tmp_path, "exit 1"))
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
