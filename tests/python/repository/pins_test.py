"""What tools/requirements/tools.txt pins can be installed where README says that the quickstart runs."""

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]
DEBIAN_12 = "3.11.2"  # its python3; a machine with a later 3.11 does not notice
TEXT = (ROOT / "tools/requirements/tools.txt").read_text()
PINS = re.findall(r"^([\w.-]+)==(\S+)", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("name", "version"), PINS, ids=[name for name, _ in PINS])
def test_a_pin_takes_the_python_of_debian_12(name: str, version: str) -> None:
    installed = distribution(name)
    assert installed.version == version
    wanted = SpecifierSet(installed.metadata.get("Requires-Python", ""))
    assert wanted.contains(DEBIAN_12), f"{name} {version} needs Python {wanted}"
