"""docs/runbook.md: a section for each alert, and what it names is there."""

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from epikv.cli import main

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())[
        "groups"
    ]
    for rule in group["rules"]
]
PARTS = ["For users", "See more", "What to do", "No fault if"]
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE))
CODE = re.findall(
    r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", RUNBOOK, flags=re.DOTALL | re.MULTILINE)
)
PASTED = re.findall(r"^```\n(.*?)^```$", RUNBOOK, re.DOTALL | re.MULTILINE)


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    """In the order of the rules, so that both are read alike."""
    assert list(SECTIONS) == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_alert_names_its_section(rule: dict[str, dict[str, str]]) -> None:
    # As GitHub and the site make anchors of headings of one word.
    assert rule["annotations"]["runbook"] == f"docs/runbook.md#{str(rule['alert']).lower()}"


@pytest.mark.parametrize("alert", SECTIONS)
def test_each_section_says_all_that_one_asks(alert: str) -> None:
    items = re.findall(
        r"^- \*\*([^*]+)\*\*: (.*?)(?=^- |\Z)", SECTIONS[alert], re.DOTALL | re.MULTILINE
    )
    assert [part for part, _ in items] == PARTS
    for part, text in items:
        assert len(text.split()) >= (1 if part == "No fault if" else 5), part


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_section_names_a_series_of_its_alert(rule: dict[str, str]) -> None:
    names = set(re.findall(r"\b(?:epikv|gen_ai|process)_\w+|\bup\b", rule["expr"]))
    shown = re.findall(r"`(\w+)", SECTIONS[rule["alert"]])
    assert names & {f"{name}{suffix}" for name in shown for suffix in ("", "_bucket")}


def test_every_series_is_there() -> None:
    readme = (ROOT / "server" / "README.md").read_text()
    there = set(re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)) | {"up"}
    named = set(re.findall(r"`((?:epikv|gen_ai|process)_\w+)", RUNBOOK))
    assert len(named) > 15 and named <= there, named - there


def commands() -> set[str]:
    """What is to be typed: "epikv admin load"."""
    lines = [line.partition("#")[0].strip() for block in PASTED for line in block.splitlines()]
    return {line for line in [*lines, *CODE] if line.startswith("epikv ")}


@pytest.mark.parametrize("line", sorted(commands()))
def test_every_command_is_there(line: str) -> None:
    command: click.Command = main
    words = shlex.split(line)[1:]
    context = click.Context(main)
    while words and isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None, line
        command = found
    if isinstance(command, click.Group):  # it is spoken of, and not to be typed
        return
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    assert len(words) <= len(arguments) or any(a.nargs == -1 for a in arguments), line


def test_settings_are_there_and_those_that_it_changes_can_be_changed() -> None:
    settings = set(
        re.findall(r"^(\w+):", (ROOT / "deploy" / "epikvd.textproto").read_text(), re.MULTILINE)
    )
    source = (ROOT / "server" / "daemon" / "settings.cc").read_text()
    _, _, rest = source.partition("kChangeable[] = {")
    changeable = set(re.findall(r'"(\w+)"', rest.partition("}")[0]))
    changed = {found[1] for code in CODE if (found := re.match(r"epikv admin config (\w+)=", code))}
    assert changed and changed <= changeable <= settings
    # Of the names in code that end as settings do, each is one.
    like = re.compile(r"\w+_(?:bytes|requests|tokens|seconds|series|file|log|listen|dtype|store)")
    named = {code.partition(":")[0] for code in CODE if like.fullmatch(code.partition(":")[0])}
    # What requests and the access log have.
    others = {"max_output_tokens", "queue_seconds", "peak_tokens", "budget_tokens"}
    series = {name for name in named if name.startswith(("epikv_", "gen_ai_", "process_"))}
    assert named - series - others <= settings
