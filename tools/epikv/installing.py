"""How to install what a part of this package needs beside the client: no index has `epikv` itself."""

import re
from importlib.metadata import requires
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[1]  # of a checkout
_EXTRA = re.compile(r"""extra == ['"]([^'"]+)['"]""")


def pip_install(*extras: str) -> str:
    """A command that works here: of a checkout by its folder, of a wheel by what it asks for."""
    if (_SOURCE / "pyproject.toml").exists():
        return f"pip install '{_SOURCE}[{','.join(extras)}]'"
    wanted = []
    for requirement in requires("epikv") or ():
        what, _, marker = requirement.partition(";")
        if set(_EXTRA.findall(marker)) & set(extras):
            wanted.append(f"'{what.strip()}'")
    return f"pip install {' '.join(dict.fromkeys(wanted))}"
