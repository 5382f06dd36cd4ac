"""Lists the libraries that a program links, whose they are, and where their security status is told:
`python3 deploy/linked.py build/dev/server/epikvd`, on the Debian system that runs the program."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TRACKER = "https://security-tracker.debian.org/tracker/source-package/"
SHOWN = 4  # libraries of a package; Abseil has 40
OF_PYTORCH = "https://github.com/pytorch/pytorch/security/advisories"


@dataclass(frozen=True)
class Package:
    """Of Debian."""

    name: str
    architecture: str
    version: str
    source: str


def libraries(program: Path) -> dict[str, Path]:
    """Paths by name, as the loader finds them: of the program, and of what it links in turn."""
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    assert "not found" not in said, said
    return {
        name: Path(path) for name, path in re.findall(r"^\s*(\S+) => (\S+)", said, re.MULTILINE)
    }


def names(path: Path) -> set[str]:
    """A file's, as dpkg may know it: /lib is /usr/lib."""
    found = {str(path), str(path.parent.resolve() / path.name), str(path.resolve())}
    return found | {name.removeprefix("/usr") for name in found if name.startswith("/usr/lib")}


def owners(paths: list[Path], root: Path = Path("/")) -> dict[Path, str]:
    """Packages' names by path, of the system whose root is given; what no package has is left out."""
    of_name = {name: path for path in paths for name in names(path)}
    command = ["dpkg-query", f"--admindir={root / 'var/lib/dpkg'}", "--search", *of_name]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    told = [line.rsplit(": ", 1) for line in lines if not line.startswith("diversion ")]
    return {of_name[name]: package.split(":")[0] for package, name in told if name in of_name}


def of_torch(path: Path) -> bool:
    """Whether a library is LibTorch's, of an installed wheel or of the image."""
    return not {"torch", "libtorch"}.isdisjoint(path.parts)


def installed(root: Path = Path("/")) -> dict[str, Package]:
    """By name."""
    fields = ("Package", "Architecture", "Version", "source:Package")
    form = "\t".join(f"${{{field}}}" for field in fields)
    lines = subprocess.run(
        ["dpkg-query", f"--admindir={root / 'var/lib/dpkg'}", "-W", f"-f={form}\n"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    found = (Package(*line.split("\t")) for line in lines)
    return {package.name: package for package in found}


def table(program: Path) -> list[tuple[str, str, str, str]]:
    """A row for each package: its name, its version, where its status is told, and its libraries."""
    found = libraries(program)
    known = owners(list(found.values()))
    packages = installed()
    rows: dict[tuple[str, str, str], list[str]] = {}
    for library, path in sorted(found.items()):
        if path in known:
            package = packages[known[path]]
            row = (package.name, package.version, TRACKER + package.source)
        elif of_torch(path):
            row = ("torch", "of its wheel", OF_PYTORCH)
        else:
            row = ("none", "unknown", str(path.parent))
        rows.setdefault(row, []).append(library)
    return [(*row, shortened(rows[row])) for row in sorted(rows)]


def shortened(names: list[str]) -> str:
    shown, more = names[:SHOWN], len(names) - SHOWN
    return " ".join(shown) + (f" and {more} more" if more > 0 else "")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python3 {sys.argv[0]} PROGRAM")
    rows = table(Path(sys.argv[1]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    main()
