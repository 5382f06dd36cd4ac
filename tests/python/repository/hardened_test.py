"""SECURITY.md: with which flags what is installed was compiled and linked, as its files show."""

import platform
import re
import subprocess
from pathlib import Path

import pytest
from epikv.testing import find_binary

ENDBR64 = b"\xf3\x0f\x1e\xfa"  # where an indirect jump may land


@pytest.fixture(params=["epikvd", "epikv-probe"])
def program(request: pytest.FixtureRequest) -> Path:
    return find_binary().with_name(request.param)


def readelf(program: Path, *options: str) -> str:
    command = ["readelf", "--wide", *options, str(program)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_its_addresses_are_random_and_its_tables_read_only(program: Path) -> None:
    told = readelf(program, "--file-header", "--dynamic", "--segments")
    assert re.search(r"Type:\s+DYN", told)
    assert re.search(r"FLAGS_1.*\bNOW\b.*\bPIE\b", told)
    assert "GNU_RELRO" in told
    (stack,) = re.findall(r"GNU_STACK(?:\s+0x\w+){5}\s+(\w+)", told)
    assert stack == "RW"


def test_its_stack_and_copies_are_checked(program: Path) -> None:
    symbols = readelf(program, "--dyn-syms")
    assert "__stack_chk_fail" in symbols
    assert re.search(r"__(?!stack)\w+_chk@", symbols)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 alone has it")
def test_its_jumps_land_where_they_may(program: Path) -> None:
    assert program.read_bytes().count(ENDBR64) > 300
