"""The faults of tests/mutants.py still have their places in the code."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = "".join(
    (ROOT / "tests" / name).read_text() for name in ("CMakeLists.txt", "server.cmake")
)
spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants.py")
assert spec is not None and spec.loader is not None
mutants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_has_its_place(mutant: Any) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert f"epikv_test({mutant.binary} " in PROGRAMS
