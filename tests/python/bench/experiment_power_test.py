"""The tables of how many users experiments need: what they hold, and that the page's are of today."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from epikv_lab.bench import experiment_power

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "experiments.md"


@pytest.fixture(scope="module")
def rows() -> list[experiment_power.Row]:
    return experiment_power.simulated(40)


def test_the_power_that_is_counted_is_that_which_was_planned(
    rows: list[experiment_power.Row],
) -> None:
    for row in rows:
        for looking in ("once", "sequential", "tuned", "adjusted"):
            if found := row.get(looking):
                slack = 4 * (0.8 * 0.2 / 40) ** 0.5
                assert found["power"] > found["planned"] - slack, (row, looking)
                assert found["power"] < found["planned"] + slack or row["what"] == "window"


def test_looking_often_costs_users_and_a_covariate_saves_some(
    rows: list[experiment_power.Row],
) -> None:
    for row in rows:
        assert row["once"]["units"] < row["tuned"]["units"] <= row["sequential"]["units"]
        if "adjusted" in row:
            saved = 1 - row["adjusted"]["units"] / row["tuned"]["units"]
            assert 0 < saved < 1.1 * row["r2"], row


def test_a_sequential_experiment_ends_early_where_there_is_something_to_find(
    rows: list[experiment_power.Row],
) -> None:
    for row in rows:
        if row["what"] == "mean":
            assert row["tuned"]["mean_units"] < 0.8 * row["tuned"]["units"], row


def test_the_numbers_of_the_page_are_those_that_are_planned_now(
    rows: list[experiment_power.Row],
) -> None:
    without_power = re.compile(r" \(\d+ %\)")
    text = PAGE.read_text("utf-8")
    table = text.partition(experiment_power.BEGIN)[2].partition(experiment_power.END)[0]
    told = [without_power.sub("", line) for line in table.splitlines() if line.startswith("|")]
    now = experiment_power.tables(rows, 40).splitlines()
    assert told == [without_power.sub("", line) for line in now if line.startswith("|")]


def test_tables_are_written_between_the_marks(
    rows: list[experiment_power.Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_power, "simulated", lambda *_: rows)
    page = tmp_path / "page.md"
    page.write_text(f"a\n{experiment_power.BEGIN}old\n{experiment_power.END}b\n")
    done = CliRunner().invoke(experiment_power.main, ["--write", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.startswith("a\n") and text.endswith("b\n") and "old" not in text
    page.write_text("nothing")
    done = CliRunner().invoke(experiment_power.main, ["--write", str(page)])
    assert done.exit_code == 1 and "has no marks" in done.output
