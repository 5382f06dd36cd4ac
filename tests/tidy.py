"""Runs clang-tidy, with the checks of .clang-tidy, over the C++ that a build folder compiles.

    tests/tidy.py                    policies, runtime and server: a part of run.sh
    tests/tidy.py tests              the tests: a part of nightly.sh
    tests/tidy.py server/call        what lies there, with what is compiled as one with it

It takes files together as the build does, so headers are read once for several files. The folder has to be built:
some headers are generated.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("policies", "runtime", "server")
# What clang does not know, or cannot read of GCC's.
DROPPED = {"-Winvalid-pch", "-Werror", "-fopenmp", "-fno-tree-pre"}
# What tests may do: be slow, draw from a fixed seed, throw anything, ask a shell, write a sum as by hand.
ALLOWED_IN_TESTS = (
    "-performance-*,-bugprone-random-generator-seed,-bugprone-std-exception-baseclass,"
    "-bugprone-command-processor,-bugprone-integer-division,-bugprone-signed-char-misuse,"
    "-bugprone-unused-return-value,-google-build-using-namespace,-misc-redundant-expression"
)


def sources(unit: Path) -> list[str]:
    """The files that a unit compiles, relative to the repository."""
    files = [unit]
    if "Unity" in unit.parts:
        lines = unit.read_text().splitlines()
        files = [Path(line.split('"')[1]) for line in lines if line.startswith("#include")]
    return [str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)]


def arguments(command: str) -> list[str]:
    """Of a compiler's command, what clang-tidy needs: no compiler, precompiled header, input or output."""
    words = shlex.split(command)
    first = 1 + max(
        i for i, word in enumerate(words) if Path(word).name in ("c++", "g++", "clang++")
    )
    kept: list[str] = []
    rest = iter(words[first:])
    for word in rest:
        if word in ("-include", "-o", "-c", "-MF", "-MT"):
            next(rest)
        elif word not in DROPPED and word != "-MD":
            kept.append(word)
    return kept


def check(tidy: str, entry: dict[str, str]) -> str:
    """What clang-tidy finds in one unit: "" if nothing."""
    command = [tidy, "--quiet", entry["file"]]
    if any(file.startswith("tests/") for file in sources(Path(entry["file"]))):
        command.append(f"--checks={ALLOWED_IN_TESTS}")
    run = subprocess.run(
        [*command, "--", *arguments(entry["command"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return ""
    return run.stdout or f"{entry['file']}: {run.stderr or run.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "folder", nargs="*", default=ROOMS, help="folders or files of the repository"
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build/dev", help="a built folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()

    asked = tuple(folder.rstrip("/") for folder in options.folder)
    units = []
    for entry in json.loads((options.build / "compile_commands.json").read_text()):
        files = sources(Path(entry["file"]))
        if any(
            file == folder or file.startswith(folder + "/") for file in files for folder in asked
        ):
            units.append(entry)
    if not units:
        parser.error(f"{options.build} compiles nothing of {', '.join(asked)}")

    begin = time.monotonic()
    tidy = str(Path(sys.executable).parent / "clang-tidy")
    with ThreadPoolExecutor(options.jobs) as pool:
        found = [finding for finding in pool.map(lambda unit: check(tidy, unit), units) if finding]
    print("\n".join(found), end="\n" if found else "")
    print(
        f"clang-tidy: {len(found)} of {len(units)} units have findings, {time.monotonic() - begin:.0f} s"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
