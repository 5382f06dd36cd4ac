"""Compiled programs that benches run beside a daemon."""

import os
from functools import cache
from pathlib import Path

from epikv import harness
from epikv.testing import find_binary


@cache
def measuring_program(name: str, binary: Path | None = None) -> Path | None:
    """A program of tests/ that measures what no request shows: of the build tree that the epikvd is
    of, or of the checkout, built once. None: there is none. binary: as of `serving`."""
    if (
        binary is None
        and not os.environ.get("EPIKVD")
        and (harness.ROOT / "deploy/setup.sh").exists()
    ):
        return harness.build(harness.ROOT, name) / "tests" / name
    path = (binary or find_binary()).resolve().parents[1] / "tests" / name
    return path if path.exists() else None
