"""Runs clang-tidy, with the checks of .clang-tidy, over the C++ that a build folder compiles.

    tests/tidy.py                    policies, runtime and server: a part of run.sh
    tests/tidy.py tests              the tests: a part of nightly.sh
    tests/tidy.py server/call        what lies there

Files of one library are read as one, so headers are read once for all of them. The folder has to be built: some
headers are generated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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


def check(tidy: str, options: Sequence[str], files: Sequence[str], folder: Path) -> str:
    """What clang-tidy finds in the files, which it reads as one: "" if nothing.

    A file that does not compile behind the others, since both have a name of their own that is the same, is read
    with those of which that is true as well.
    """
    unit = folder / f"{hashlib.sha256(repr((options, files)).encode()).hexdigest()[:12]}.cc"
    unit.write_text("".join(f'#include "{ROOT / file}"\n' for file in files))
    command = [tidy, "--quiet", f"--config-file={ROOT / '.clang-tidy'}", str(unit)]
    if any(file.startswith("tests/") for file in files):
        command.append(f"--checks={ALLOWED_IN_TESTS}")
    run = subprocess.run(
        [*command, "--", *options, "-ferror-limit=0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return ""
    said = run.stdout or f"{', '.join(files)}: {run.stderr or run.returncode}"
    errors = [line for line in said.splitlines() if line.endswith("[clang-diagnostic-error]")]
    apart = [file for file in files if any(line.startswith(f"{ROOT / file}:") for line in errors)]
    rest = [file for file in files if file not in apart]
    if errors and not apart:  # a header's, which comes behind a name of a file's own
        rest, apart = list(files[: len(files) // 2]), list(files[len(files) // 2 :])
    if not apart or not rest:
        return said
    return check(tidy, options, rest, folder) + check(tidy, options, apart, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "folder", nargs="*", default=ROOMS, help="folders or files of the repository"
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build/dev", help="a built folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()

    asked = tuple(folder.rstrip("/") for folder in options.folder)
    together: dict[tuple[str, ...], list[str]] = {}  # files, by how they are compiled
    for entry in json.loads((options.build / "compile_commands.json").read_text()):
        wanted = [
            file
            for file in sources(Path(entry["file"]))
            if any(file == folder or file.startswith(folder + "/") for folder in asked)
        ]
        if wanted:
            together.setdefault(tuple(arguments(entry["command"])), []).extend(wanted)
    if not together:
        parser.error(f"{options.build} compiles nothing of {', '.join(asked)}")

    begin = time.monotonic()
    tidy = str(Path(sys.executable).parent / "clang-tidy")
    largest_first = sorted(together.items(), key=lambda each: -len(each[1]))
    with (
        ThreadPoolExecutor(options.jobs) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        run = [pool.submit(check, tidy, *each, Path(folder)) for each in largest_first]
        found = [finding for each in run if (finding := each.result())]
    print("\n".join(found), end="\n" if found else "")
    print(
        f"clang-tidy: {len(found)} of {len(together)} libraries have findings,"
        f" {time.monotonic() - begin:.0f} s"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
