"""deploy/epikvd.service: systemd takes it whole, and it agrees with the daemon's settings."""

import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy" / "epikvd.service"
ANALYZE = shutil.which("systemd-analyze")
SETTING = re.compile(r"^(\w+): (.*)$", re.MULTILINE)
# After the last stream the port refuses for so long at most (docs/operating.md, "The end").
TURNING_AWAY_SECONDS = 10


def unit() -> ConfigParser:
    parsed = ConfigParser(interpolation=None, strict=True)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(UNIT.read_text())
    return parsed


def settings() -> dict[str, str]:
    """Of the daemon, with their defaults."""
    return dict(SETTING.findall((ROOT / "deploy" / "epikvd.textproto").read_text()))


def complaints(text: str, folder: Path) -> str:
    """What systemd says of a unit whose program is there."""
    path = folder / UNIT.name
    path.write_text(text.replace("ExecStart=/usr/local/bin/epikvd", "ExecStart=/bin/true"))
    assert ANALYZE is not None
    told = subprocess.run(
        [ANALYZE, "verify", path], capture_output=True, text=True, check=False, timeout=60
    )
    return told.stdout + told.stderr + ("" if told.returncode == 0 else str(told.returncode))


@pytest.mark.skipif(ANALYZE is None, reason="there is no systemd-analyze here")
def test_systemd_takes_every_line(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert complaints(text, tmp_path) == ""
    assert "ProtectHom" in complaints(text.replace("ProtectHome=", "ProtectHom="), tmp_path)


@pytest.mark.skipif(ANALYZE is None, reason="there is no systemd-analyze here")
def test_little_is_exposed(tmp_path: Path) -> None:
    """In tenths, of ten; a unit that says nothing has 9.6."""
    assert ANALYZE is not None
    command = [ANALYZE, "security", "--offline=true", "--threshold=20", str(UNIT)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode == 0, told.stdout + told.stderr


def test_it_starts_the_daemon_with_its_configuration() -> None:
    program, *flags = unit()["Service"]["ExecStart"].split()
    assert Path(program).name == "epikvd"
    names = [flag.removeprefix("--").partition("=")[0] for flag in flags]
    assert "config" in names
    assert set(names) - {"config"} <= set(settings())


def test_what_its_comments_name_are_settings() -> None:
    comments = " ".join(line for line in UNIT.read_text().splitlines() if line.startswith("#"))
    named = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", comments))
    assert {"drain_seconds", "access_log", "experiment_store"} <= named <= set(settings())


def test_it_has_the_time_to_drain() -> None:
    stop = float(unit()["Service"]["TimeoutStopSec"])
    assert stop > float(settings()["drain_seconds"]) + TURNING_AWAY_SECONDS


def test_it_is_hardened_and_comes_back() -> None:
    service = unit()["Service"]
    assert service["User"] not in ("", "root")
    for name, wanted in (
        ("ProtectSystem", "strict"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("Restart", "on-failure"),
    ):
        assert service[name] == wanted
    assert int(service["LimitNOFILE"]) >= 65536


def test_the_page_says_how_to_install_it() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    assert "deploy/epikvd.service" in page and "systemctl enable --now epikvd" in page
    assert (
        f"useradd --system --user-group --home-dir {unit()['Service']['WorkingDirectory']}" in page
    )
