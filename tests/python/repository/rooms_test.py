"""Rooms: each folder of runtime and server is in its README's table, and includes only what stands above it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# The door of a library is above all its rooms, and no room may use it.
DOORS = {"runtime": {"runtime.h", "runtime.cc"}, "server": set[str]()}


def rooms(library: str) -> list[str]:
    """The table's rooms, those first that all others may use."""
    text = (ROOT / library / "README.md").read_text()
    table = text[text.index("## Rooms") : text.index("## Threads")]
    return re.findall(r"^\| \[([^\]]+)\]\(\1\) \|", table, re.MULTILINE)


def room_of(path: str, of: list[str]) -> str | None:
    """The innermost room that a file lies in; `path` is of the library."""
    inside = [room for room in of if path.startswith(room + "/")]
    return max(inside, key=len, default=None)


def sources(library: str) -> list[Path]:
    found = [*(ROOT / library).rglob("*.h"), *(ROOT / library).rglob("*.cc")]
    return sorted(path.relative_to(ROOT / library) for path in found)


@pytest.mark.parametrize("library", DOORS)
def test_every_file_is_in_a_room(library: str) -> None:
    of = rooms(library)
    outside = {str(path) for path in sources(library) if room_of(str(path), of) is None}
    assert outside == DOORS[library]
    assert {room for room in of if not (ROOT / library / room).is_dir()} == set()


@pytest.mark.parametrize("library", DOORS)
def test_arrows_go_one_way(library: str) -> None:
    of = rooms(library)
    include = re.compile(rf'^#include "{library}/([^"]+)"', re.MULTILINE)
    wrong = []
    for path in sources(library):
        room = room_of(str(path), of)
        if room is None:
            continue
        for included in include.findall((ROOT / library / path).read_text()):
            other = room_of(included, of)
            if other is None or of.index(other) > of.index(room):
                wrong.append(f"{library}/{path} includes {included}")
    assert wrong == []


def test_libraries_do_not_point_back() -> None:
    """policies <- runtime <- server: proto's headers are the server's alone."""
    barred = {"policies": r'"(runtime|server|epikv/v1)/', "runtime": r'"(server|epikv/v1)/'}
    wrong = [
        str(path)
        for library, pattern in barred.items()
        for path in sources(library)
        if re.search(rf"^#include {pattern}", (ROOT / library / path).read_text(), re.MULTILINE)
    ]
    assert wrong == []


def test_torch_stays_out_of_the_server() -> None:
    barred = re.compile(r"^#include [<\"](torch|ATen|c10)/", re.MULTILINE)
    assert [p for p in sources("server") if barred.search((ROOT / "server" / p).read_text())] == []


def test_every_folder_of_e2e_is_in_the_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, table = text.partition("| folder of `tests/e2e` |")
    named = re.findall(r"^\| `(\w+)` \|", table.split("\n\n")[0], re.MULTILINE)
    folder = ROOT / "tests" / "e2e"
    there = {str(test.parent.relative_to(folder)) for test in folder.rglob("*_test.py")}
    assert set(named) == there


def test_no_test_imports_from_another() -> None:
    """What several need lies in tests/fixtures/python: a folder of tests can be run by itself."""
    imports = re.compile(r"^(?:from|import) (\w+_test|conftest)\b", re.MULTILINE)
    files = [*(ROOT / "tests").rglob("*_test.py"), *(ROOT / "tests").rglob("conftest.py")]
    assert [file for file in files if imports.search(file.read_text())] == []
