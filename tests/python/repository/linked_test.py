"""SECURITY.md: what a daemon links, whose it is, and where its status is told."""

import subprocess
import sys
from pathlib import Path

import pytest
from epikv.testing import find_binary

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "python3 deploy/linked.py build/dev/server/epikvd"


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """The others of a row by the package's name; the last is its libraries."""
    _, script, _ = COMMAND.split()
    done = subprocess.run(
        [sys.executable, str(ROOT / script), str(find_binary())],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [
        line.replace("of its wheel", "of-its-wheel").split() for line in done.stdout.splitlines()
    ]
    return {name: [version, where, " ".join(more)] for name, version, where, *more in lines}


def test_the_page_shows_the_command() -> None:
    assert f"\n{COMMAND}\n" in (ROOT / "SECURITY.md").read_text()


def test_every_library_has_an_owner(rows: dict[str, list[str]]) -> None:
    assert len(rows) > 30 and "none" not in rows
    version, where, libraries = rows["libssl3"]
    assert version.startswith("3.0.") and libraries == "libcrypto.so.3 libssl.so.3"
    assert where == "https://security-tracker.debian.org/tracker/source-package/openssl"


def test_a_package_is_looked_up_by_its_source(rows: dict[str, list[str]]) -> None:
    assert rows["libgrpc++1.51"][1].endswith("/grpc")
    assert rows["libpq5"][1].endswith("/postgresql-15")
    assert rows["libabsl20220623"][2].endswith(" more")


def test_libtorch_is_pytorchs(rows: dict[str, list[str]]) -> None:
    _, where, libraries = rows["torch"]
    assert "github.com/pytorch/pytorch" in where and "libtorch_cpu.so" in libraries
