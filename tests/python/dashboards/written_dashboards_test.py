"""deploy/grafana is what the code writes, and what Grafana's own types read; tests/e2e/metrics asks its queries."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv_lab.dashboards.__main__ import main
from epikv_lab.dashboards.picture import amount
from epikv_lab.dashboards.reading import Drawn, File
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"
FILES = sorted(FOLDER.glob("*.json"))


def test_they_are_what_the_code_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["write", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    there = {path.name: path.read_text() for path in FILES}
    assert written == there, "python -m epikv_lab.dashboards write deploy/grafana"


def test_there_is_one_for_each_subject() -> None:
    assert [path.stem for path in FILES] == [
        f"epikv-{of}" for of in ("experiments", "fleet", "kv", "policies", "serving")
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_types_of_grafana_lose_nothing(path: Path) -> None:
    there = json.loads(path.read_text())
    again = json.loads(json.dumps(Dashboard.from_json(there), cls=JSONEncoder))
    assert again == there


def overlap(one: Drawn, other: Drawn) -> bool:
    (x, y, width, height), (left, top, wide, high) = one.place, other.place
    return x < left + wide and left < x + width and y < top + high and top < y + height


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_lie_side_by_side(path: Path) -> None:
    panels = list(File(path).panels())
    assert len(panels) > 10
    assert [(a.title, b.title) for a, b in combinations(panels, 2) if overlap(a, b)] == []
    assert all(x + width <= 24 for x, _, width, _ in (panel.place for panel in panels))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_panel_says_what_it_shows(path: Path) -> None:
    panels = list(File(path).panels())
    assert all(panel.tells.endswith(".") and panel.queries for panel in panels)
    names = [(panel.row, panel.title) for panel in panels]
    assert len(set(names)) == len(names)
    ids = [
        panel["id"] for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"
    ]
    assert len(set(ids)) == len(panels)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"),
        (0.0123, "s", "12.3 ms"),
        (90, "s", "1.5 min"),
        (3 * 2**20, "bytes", "3 MiB"),
        (0.125, "percentunit", "12.5 %"),
        (1234, "cps", "1.23 k/s"),
        (-0.5, "short", "-0.5"),
        (0.001, "short", "0.001"),
    ],
)
def test_an_amount_has_its_unit(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text
