"""docs/experiments.md, pasted: each of its commands, one after another in one shell, for real."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv.testing import find_binary
from shell import Shell, free_ports

ROOT = Path(__file__).parents[3]

# The daemon's ports, and what asks it, are others than on the page.
EPIKVD = """\
#!/bin/sh
exec {binary} "$@" --listen=127.0.0.1:{listen} --admin_listen= --metrics_listen=127.0.0.1:{metrics_listen} --threads=1
"""
PROBE = """\
#!/bin/sh
exec {binary} "$@" --listen=127.0.0.1:{listen}
"""
EPIKV = """\
#!/bin/sh
[ "$2" = init ] || set -- "$@" --server=127.0.0.1:{listen}
exec {python} -c 'from epikv.cli import main; main()' "$@"
"""


MARK = "<!-- run by tests/e2e/pages/experimenting_test.py -->"


def blocks() -> tuple[list[str], str, list[str], list[str]]:
    """The page's first commands, its application, a switchback's commands, made-up users'."""
    page = (ROOT / "docs" / "experiments.md").read_text()
    found = re.findall(f"{re.escape(MARK)}\n```(?:python)?\n(.*?)\n```", page, re.DOTALL)
    assert page.count(MARK) == len(found)
    first, application, *more = found
    switchback, made_up = (block.replace("\\\n", "").splitlines() for block in more)
    return first.splitlines(), application, switchback, made_up


@pytest.fixture
def ports() -> dict[str, str]:
    return free_ports("listen", "metrics_listen")


@pytest.fixture
def shell(sample_model: Path, tmp_path: Path, ports: dict[str, str]) -> Iterator[Shell]:
    shutil.copy(sample_model, tmp_path / "model.pt")
    _, application, *_ = blocks()
    assert "127.0.0.1:50051" in application
    application = application.replace("50051", ports["listen"])
    (tmp_path / "app.py").write_text(application.replace('"..."', "[5] * 20"))
    binary = find_binary()
    for name, script, of in (
        ("build/dev/server/epikvd", EPIKVD, binary),
        ("build/dev/server/epikv-probe", PROBE, binary.with_name("epikv-probe")),
        (".venv/bin/epikv", EPIKV, ""),
        (".venv/bin/python", '#!/bin/sh\nexec {python} "$@"\n', ""),
    ):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(script.format(binary=of, python=sys.executable, **ports))
        program.chmod(0o755)
    started = Shell(tmp_path)
    try:
        yield started
    finally:
        started.kill()


def test_pasting_it_leads_from_two_arms_to_a_report(shell: Shell, tmp_path: Path) -> None:
    commands, *_ = blocks()
    looked_at = []
    for command in commands:
        out = shell.ok(command)
        if command.startswith("epikv experiment plan"):
            assert "units" in out
            looked_at.append("plan")
        if command.startswith("python app.py"):
            assert out.splitlines() == [f"{n} users" for n in (100, 200, 300, 400)]
            looked_at.append("app")
        if command.startswith("epikv experiment report"):
            assert "right" in out and "oo early" in out
            found = json.loads(shell.ok("epikv experiment report lean-budget --json"))
            assert sum(arm["requests"] for arm in found["arms"]) == 400
            assert "<html" in (tmp_path / "lean-budget.html").read_text()
            looked_at.append("report")
    assert looked_at == ["plan", "app", "report"]


def test_pasting_more_leads_to_a_switchback(shell: Shell) -> None:
    commands, _, switchback, _ = blocks()
    start = [
        command
        for command in commands
        if not command.startswith(("epikv ", "kill ", "python ", "sed "))
    ]
    for command in start:
        shell.ok(command)
    told = {line.split("#")[0].strip(): shell.ok(line) for line in switchback}
    plan, assign, report = (
        next(out for command, out in told.items() if command.startswith(f"epikv experiment {word}"))
        for word in ("plan", "assign", "report")
    )
    assert "windows of 5 min" in plan
    assert "full" in assign and "half" in assign
    assert "windows of 5 min, the first 30 s of each not analysed" in " ".join(report.split())
    assert "confounded" not in report and "output_tokens_per_second" in report


def test_pasting_made_up_users_leads_to_a_verdict(shell: Shell, tmp_path: Path) -> None:
    commands, *_, made_up = blocks()
    for command in commands[:3]:
        shell.ok(command)
    for command in made_up:
        out = shell.ok(command)
        if "simulate" in command:
            assert "full" in out and "half" in out and "1" in out
        if "report" in command:
            assert "half is worse than full: right is" in " ".join(out.split())
    assert "<html" in (tmp_path / "try.html").read_text()
    found = json.loads(shell.ok("epikv experiment report try --json"))
    (right,) = (each for each in found["metrics"] if each["metric"]["name"] == "right")
    full, half = right["all"]["arms"]
    assert full["units"] + half["units"] == 2000
    assert abs(full["mean"] - 0.9) < 0.04 and abs(half["mean"] - 0.8) < 0.05


def test_what_cannot_be_simulated_is_told(shell: Shell, tmp_path: Path) -> None:
    commands, *_, made_up = blocks()
    for command in [*commands[:3], *made_up[:3]]:
        shell.ok(command)
    simulate = "epikv experiment simulate try"
    assert "does not run: epikv experiment start try" in shell.refused(simulate)
    assert "has no arm 'no'; it has full, half" in shell.refused(f"{simulate} --rate no=0.5")
    assert "a share from 0 to 1" in shell.run(f"{simulate} --rate half=7").err
    file = tmp_path / "try.textproto"
    text = file.read_text().replace("try", "own")
    assert 'primary_metric: "right"' in text
    own = text.replace('primary_metric: "right"', 'primary_metric: "kv_peak_tokens"')
    (tmp_path / "own.textproto").write_text(own)
    shell.ok("epikv experiment create own.textproto")
    assert "nothing to simulate" in shell.refused("epikv experiment simulate own")
