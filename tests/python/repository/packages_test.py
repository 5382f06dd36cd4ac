"""Python's packages: users' own never needs this project's, and each sub-package imports only those above it."""

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from epikv import extensions
from epikv.cli import main
from setuptools import find_namespace_packages

TOOLS = Path(__file__).resolve().parents[3] / "tools"
LAB = TOOLS / "lab"


def modules(package: str, within: Path) -> dict[str, Path]:
    """By dotted name; what protoc writes is left out."""
    found = {}
    for path in sorted((within / package).rglob("*.py")):
        *folders, name = path.relative_to(within).with_suffix("").parts
        if "v1" not in folders:
            found[".".join(folders if name == "__init__" else [*folders, name])] = path
    return found


OURS = modules("epikv", TOOLS)


def imported(path: Path) -> set[str]:
    """Modules of epikv that a file imports, be it inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{path}: name the whole module"
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                found.add(inner if inner in OURS else node.module)
    return found & OURS.keys()


def sub_packages() -> list[str]:
    """The table's, those first that all others may import."""
    text = (TOOLS / "README.md").read_text()
    table = text[
        text.index("## Sub-packages of epikv\n") : text.index("## Sub-packages of epikv_lab")
    ]
    return re.findall(r"^\| \[(\w+)\]\(epikv/\1/(?:README\.md)?\) \|", table, re.MULTILINE)


def place(module: str, of: list[str]) -> int:
    """In the table; 0 is above all: the modules that lie in epikv itself."""
    parts = module.split(".")
    return of.index(parts[1]) + 1 if len(parts) > 1 and parts[1] in of else 0


def test_epikv_does_not_know_the_lab() -> None:
    assert [name for name, path in OURS.items() if "epikv_lab" in path.read_text()] == []


def test_every_sub_package_is_in_the_table() -> None:
    folders = {path.parent.name for path in TOOLS.glob("epikv/*/__init__.py")} - {"v1"}
    assert set(sub_packages()) == folders


def test_arrows_between_sub_packages_go_one_way() -> None:
    of = sub_packages()
    wrong = [
        f"{name} imports {other}"
        for name, path in OURS.items()
        for other in imported(path)
        if place(other, of) > place(name, of)
    ]
    assert wrong == []


def test_what_users_install_has_no_part_of_the_lab() -> None:
    settings = tomllib.loads((TOOLS / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_namespace_packages(str(TOOLS), include=settings["packages"]["find"]["include"])
    assert {"epikv", "epikv.cli", "epikv.export.chat"} <= set(packages)
    assert [name for name in packages if "lab" in name] == []


def entries(group: str) -> dict[str, str]:
    project = tomllib.loads((LAB / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = project["entry-points"][group]
    return found


@pytest.mark.parametrize("group", ["epikv.bench", "epikv.sample"])
def test_commands_of_the_lab_are_commands(group: str) -> None:
    for name, where in entries(group).items():
        module, _, attribute = where.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command) and command.name == name


def test_every_bench_is_a_command() -> None:
    benches = {
        f"{name}:command"
        for name, path in modules("epikv_lab", LAB).items()
        if name.startswith("epikv_lab.bench.") and "\ndef command(" in path.read_text()
    }
    assert benches == set(entries("epikv.bench").values())


def test_benches_are_found_where_the_lab_is_installed() -> None:
    shown = CliRunner().invoke(main, ["bench", "overhead", "--help"])
    assert shown.exit_code == 0 and "CPU time of eviction" in shown.stdout


def test_without_the_lab_there_is_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: Any) -> Any:
        return extensions.EntryPoints(())

    monkeypatch.setattr(extensions, "entry_points", none)
    shown = CliRunner().invoke(main, ["bench", "--help"])
    commands = shown.stdout.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in commands if line.strip()] == ["load"]
    refused = CliRunner().invoke(main, ["bench", "overhead"])
    assert refused.exit_code == 2 and "No such command 'overhead'" in refused.stderr
