"""README's "Experiments", pasted: each of its commands, one after another in one shell, for real."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from epikv.testing import find_binary
from operating_test import ROOT, Shell, free_ports

# The daemon's ports, and what asks it, are others than in the README.
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


def blocks() -> tuple[list[str], str]:
    """The section's commands, and its application."""
    _, _, section = (ROOT / "README.md").read_text().partition("\n## Experiments\n")
    parts = section.split("```")
    return parts[1].strip().splitlines(), parts[3].removeprefix("python")


@pytest.fixture
def ports() -> dict[str, str]:
    return free_ports("listen", "metrics_listen")


@pytest.fixture
def shell(sample_model: Path, tmp_path: Path, ports: dict[str, str]) -> Iterator[Shell]:
    shutil.copy(sample_model, tmp_path / "model.pt")
    _, application = blocks()
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
    commands, _ = blocks()
    looked_at = []
    for command in commands:
        out = shell.ok(command)
        if command.startswith("epikv experiment plan"):
            assert "units" in out
            looked_at.append("plan")
        if command.startswith("epikv experiment start"):
            # All units: the section's sixty users must not be six.
            definition = tmp_path / "lean-budget.textproto"
            whole = definition.read_text().replace(
                "traffic_permille: 100", "traffic_permille: 1000"
            )
            definition.write_text(whole)
            shell.ok("epikv experiment update lean-budget.textproto --allow-rebucket")
            looked_at.append("start")
        if command.startswith("epikv experiment report"):
            assert "right" in out and "oo early" in out
            found = json.loads(shell.ok("epikv experiment report lean-budget --json"))
            assert sum(arm["requests"] for arm in found["arms"]) == 60
            assert "<html" in (tmp_path / "lean-budget.html").read_text()
            looked_at.append("report")
    assert looked_at == ["plan", "start", "report"]
