"""Draws README's picture of a terminal from a real run: `python tools/recording.py MODEL.pt`.

Starts the daemon over the sample model, runs the commands below in bash, and writes them with what
they print to docs/terminal.svg.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from epikv.testing import Daemon
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "terminal.svg"
PROBLEM = (
    'problem="$(python -m epikv.sample problem | head -n 1)"   # its answer: $l = 1, $y = 8, $p = 1'
)
COMMANDS = (
    'epikv generate -n 999 "$problem" | tail -c 22                                        # whole cache',
    'epikv generate -n 999 --policy epikv_flat --budget 400 "$problem" | tail -c 22       # half of it',
    # A seed, so that it is the same again: with 27 of the first 30 the answer is wrong.
    'epikv generate -n 999 --policy random --seed 0 --budget 400 "$problem" | tail -c 22  # half of it',
)
COLUMNS = 100


def printed(command: str, server: str) -> str:
    """On the terminal, by a command after PROBLEM."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail\n{PROBLEM}\n{command}"],
        check=True,
        env={**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "EPIKV_SERVER": server},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout


def main() -> None:
    terminal = Console(record=True, width=COLUMNS)
    with Daemon(sys.argv[1], "--threads=1") as daemon:
        terminal.print(Text(f"$ {PROBLEM}", style="bold"))
        for command in COMMANDS:
            terminal.print(Text(f"\n$ {command}", style="bold"))
            terminal.print(Text(printed(command, daemon.grpc).strip()))
    svg = terminal.export_svg(title="epikv")
    # In the reader's own font: nothing is loaded from elsewhere.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
