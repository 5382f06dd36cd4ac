"""NOTICE names what is built from, linked or required, so that no new dependency is forgotten."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "tools" / "requirements"
BUILD_FILES = [
    path
    for folder in ("cmake", "policies", "proto", "runtime", "server", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.name == "CMakeLists.txt" or path.suffix == ".cmake"
] + [ROOT / "CMakeLists.txt"]
# Words of pkg_check_modules that are no module.
OPTIONS = {"REQUIRED", "QUIET", "IMPORTED_TARGET", "GLOBAL", "NO_CMAKE_PATH"}


def same(name: str) -> str:
    """A Python package's name in one spelling (PEP 503)."""
    return re.sub("[-_.]+", "-", name).lower()


def rows() -> dict[str, str]:
    """Versions by name."""
    columns = [
        re.split(" {2,}", line.strip())
        for line in (ROOT / "NOTICE").read_text().splitlines()
        if re.match("  [^ ]", line)
    ]
    assert all(len(row) == 4 for row in columns), "a row is name, version, licence, use"
    assert len({row[0] for row in columns}) == len(columns), "a name has one row"
    return {row[0]: row[1] for row in columns}


def cmake_packages(text: str) -> set[str]:
    """What a build file looks for on the machine: packages, modules, and headers by their folder."""
    text = re.sub("#.*", "", text)
    found = set(re.findall(r"find_package\(\s*([\w-]+)", text))
    found |= set(re.findall(r"find_path\(\s*\w+\s+(\w+)/", text))
    for words in re.findall(r"pkg_check_modules\(\s*\w+\s+([^)]*)\)", text):
        found |= {re.split(r"[<>=]", word)[0] for word in words.split()} - OPTIONS
    return found


def requirements(project: dict[str, Any]) -> set[str]:
    """Of a pyproject.toml: of the build, of the package, of its extras."""
    lists = [
        project["build-system"]["requires"],
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
    ]
    return {same(re.split(r"[\s<>=!~;\[]", line)[0]) for lines in lists for line in lines}


def test_build_files_are_read() -> None:
    text = (
        "find_package(One 1.2 REQUIRED)  # find_package(NotThis)\n"
        "find_path(X Two/a.h)\n"
        "pkg_check_modules(Y REQUIRED IMPORTED_TARGET three four>=2)\n"
    )
    assert cmake_packages(text) == {"One", "Two", "three", "four"}
    assert {"absl", "libpcre2-8", "Random123", "mimalloc", "GTest"} <= {
        name for path in BUILD_FILES for name in cmake_packages(path.read_text())
    }


def test_every_package_of_the_build_is_named() -> None:
    wanted = {name: path for path in BUILD_FILES for name in cmake_packages(path.read_text())}
    missing = {name: str(path.relative_to(ROOT)) for name, path in wanted.items()}
    for name in rows():
        missing.pop(name, None)
    assert not missing, "NOTICE has no row for these packages of these files"


def test_every_requirement_of_the_python_package_is_named() -> None:
    project = tomllib.loads((ROOT / "tools/pyproject.toml").read_text())
    found = requirements(project)
    assert {"grpcio-tools", "click", "torch", "pytest"} <= found
    missing = found - {same(name) for name in rows()}
    assert not missing, "NOTICE has no row for these"


def test_every_package_of_node_is_named() -> None:
    files = [path for path in ROOT.glob("tests/**/package.json") if "node_modules" not in str(path)]
    assert files
    named = rows()  # one that Python has by the same name is marked
    named |= {
        name.removesuffix(" (npm)"): version
        for name, version in named.items()
        if name.endswith(" (npm)")
    }
    for path in files:
        package = json.loads(path.read_text())
        wanted = package.get("dependencies", {}) | package.get("devDependencies", {})
        assert wanted.items() <= named.items(), f"NOTICE differs from {path.relative_to(ROOT)}"


def test_what_the_hashes_are_made_from_is_named() -> None:
    text = (REQUIREMENTS / "lock.sh").read_text()
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^lock \$(?:folder|work/clients)\S+ (.+)$", text, re.MULTILINE)
    words = [word.strip("'") for line in lines for word in line.split()]
    words = [re.split("[[=]", word)[0] for word in words]
    found = {same(word) for word in words if re.fullmatch(r"[A-Za-z][\w.-]*", word)}
    assert {"auditwheel", "debsbom", "lm-eval", "uv"} <= found
    missing = found - {same(name) for name in rows()}
    assert not missing, "NOTICE has no row for these"


def test_versions_are_those_that_are_installed() -> None:
    named = {same(name): version for name, version in rows().items()}
    # Clients of others that tests ask with are in an environment of their own, in their own versions.
    files = [path for path in REQUIREMENTS.glob("*.txt") if path.name != "clients.txt"]
    texts = [path.read_text() for path in files]
    found = [
        pin for text in texts for pin in re.findall(r"^([\w.-]+)==([^\s+]+)", text, re.MULTILINE)
    ]
    pinned = {same(name): version for name, version in found}
    assert {"torch", "xgrammar"} <= pinned.keys()
    common = named.keys() & pinned.keys()
    assert len(common) > 15
    assert {name: named[name] for name in common} == {name: pinned[name] for name in common}


def test_the_licence_is_named_where_tools_look_for_it() -> None:
    project = tomllib.loads((ROOT / "tools/pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert 'org.opencontainers.image.licenses="Apache-2.0"' in (ROOT / "Dockerfile").read_text()
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "APPENDIX: How to apply" in text
    for name in project["license-files"]:
        assert (ROOT / "tools" / name).read_text() == (ROOT / name).read_text(), name
