"""The compiled programs: those that a wheel brings in `bin`, or those of the checkout that this package is installed
from."""

import os
import sys
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).resolve().parent


def find(name: str) -> Path | None:
    """`epikvd` or `epikv-probe`. None: neither is there."""
    places = (
        PACKAGE.parents[1] / "build" / "dev" / "server" / name,  # as deploy/setup.sh builds it
        PACKAGE / "bin" / name,
    )
    return next((place for place in places if place.exists()), None)


def _become(name: str) -> NoReturn:
    program = find(name)
    if program is None:
        sys.exit(f"{name}: this epikv brings none; a wheel of deploy/wheel.sh does, or build it")
    os.execv(program, [name, *sys.argv[1:]])  # so signals are the program's own


def epikvd() -> NoReturn:
    _become("epikvd")


def epikv_probe() -> NoReturn:
    _become("epikv-probe")
