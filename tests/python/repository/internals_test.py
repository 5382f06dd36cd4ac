"""docs/internals.md: the rooms, files and functions that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "internals.md").read_text()
CODE = set(
    re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE))
)
PICTURES = "".join(re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
SOURCES = {
    path: path.read_text()
    for library in ("policies", "runtime", "server")
    for path in (ROOT / library).rglob("*")
    if path.suffix in (".h", ".cc")
}
EVERYTHING = "\n".join(SOURCES.values())
LIBRARIES = ("policies", "runtime", "server", "proto", "tests")


def rooms(library: str) -> set[str]:
    table = (ROOT / library / "README.md").read_text()
    return {
        f"{library}/{room}"
        for room in re.findall(r"^\| \[([\w/]+)\]\(\1\) \|", table, re.MULTILINE)
    }


PATHS = {code for code in CODE if code.split("/")[0] in LIBRARIES and "/" in code}
ROOMS_IN_PICTURES = set(re.findall(r"\b(?:runtime|server)/\w+", PICTURES))


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_path_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_room_is_one() -> None:
    assert len(ROOMS_IN_PICTURES) > 8
    assert rooms("runtime") | rooms("server") >= ROOMS_IN_PICTURES


NAMES = {code for code in CODE if re.fullmatch(r"[A-Z]\w+(?:::[A-Z]\w+)?", code)} - {"README"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_in_the_sources(name: str) -> None:
    owner, _, member = name.partition("::")
    if member:
        assert any(
            re.search(rf"\b(?:class|struct) {owner}\b", text) and re.search(rf"\b{member}\b", text)
            for text in SOURCES.values()
        )
    else:
        assert re.search(rf"\b{owner}\b", EVERYTHING) or owner == "CancelRequest"


def test_what_is_named_beside_a_room_lies_in_it() -> None:
    """As in `CallScope::Open` (`server/call`)."""
    pairs = re.findall(r"`([A-Z]\w+)(?:::(\w+))?`\s+\(`((?:runtime|server|policies)/\w+)`\)", PAGE)
    assert len(pairs) >= 8
    for owner, member, room in pairs:
        inside = "\n".join(
            text for path, text in SOURCES.items() if path.is_relative_to(ROOT / room)
        )
        assert re.search(rf"\b{member or owner}\(", inside) or re.search(
            rf"\bclass {owner}\b", inside
        ), (owner, room)


def test_libraries_are_those_of_cmake() -> None:
    named = {code for code in CODE if code.startswith("epikv_") and "*" not in code}
    made = set()
    for library in ("policies", "runtime", "server"):
        text = (ROOT / library / "CMakeLists.txt").read_text()
        made |= set(re.findall(r"add_library\((\w+) STATIC", text))
    assert named - {"epikv_flat", "epikv_evicted_attention_mass_ratio"} == made
