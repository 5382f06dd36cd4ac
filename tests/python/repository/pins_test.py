"""What tools/constraints.txt pins can be installed where README says that the quickstart runs."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]
DEBIAN_12 = "3.11.2"  # its python3; a machine with a later 3.11 does not notice
PINS = [
    line.split("==")
    for line in (ROOT / "tools/constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
]


@pytest.mark.parametrize(("name", "version"), PINS, ids=[name for name, _ in PINS])
def test_a_pin_takes_the_python_of_debian_12(name: str, version: str) -> None:
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        pytest.skip("not of the set-up: deploy/wheel.sh builds with it")
    assert installed.version.partition("+")[0] == version
    wanted = SpecifierSet(installed.metadata.get("Requires-Python", ""))
    assert wanted.contains(DEBIAN_12), f"{name} {version} needs Python {wanted}"
