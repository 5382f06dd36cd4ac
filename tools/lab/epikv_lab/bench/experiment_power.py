"""`python -m epikv_lab.bench.experiment_power`: how many users experiments need.

Each number is planned as `epikv experiment plan` plans it, and the power at that number is counted in
simulated experiments, by the code that reports use (tests/bench/experiment_power.cc).
"""

import json
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import click
from epikv.experiment import figures, reading

from epikv_lab.bench.programs import measuring_program

BEGIN, END = "<!-- power: begin -->\n", "<!-- power: end -->\n"
WINDOW = 300  # seconds
Row = dict[str, Any]


@click.command()
@click.option(
    "--experiments",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Simulated ones for each number.",
)
@click.option(
    "--write",
    "page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the tables between the marks of this page.",
)
@click.option(
    "--program",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="experiment_power; default: of the build tree, built first.",
)
def main(experiments: int, page: Path | None, program: Path | None) -> None:
    """Print or write tables of the users that experiments need."""
    told = tables(simulated(experiments, program), experiments)
    if page is None:
        click.echo(told, nl=False)
        return
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise click.ClickException(f"{page} has no marks {BEGIN.strip()} and {END.strip()}")
    page.write_text(f"{before}{begin}{told}{end}{after}", "utf-8")


def simulated(experiments: int, program: Path | None = None) -> list[Row]:
    """A row a design."""
    found = program or measuring_program("experiment_power")
    if found is None:
        raise click.ClickException("experiment_power is not there: it is built in a checkout")
    done = subprocess.run([found, str(experiments)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def tables(rows: Sequence[Row], experiments: int) -> str:
    """Of users and of windows, and what they rest on; in Markdown."""
    users = [row for row in rows if row["what"] != "window"]
    windows = [row for row in rows if row["what"] == "window"]
    error = 196 * sqrt(0.8 * 0.2 / experiments)
    lines = [
        "| to find | one look | 20 looks | and tau of the plan | and a covariate |",
        "|---|--:|--:|--:|--:|",
        *(_line([_effect(row), *_cells(row), _adjusted(row)]) for row in users),
        "",
        "| windows of 5 minutes | one look | 20 looks | and tau of the plan | time |",
        "|---|--:|--:|--:|--:|",
        *(_line([_effect(row), *_cells(row), _time(row)]) for row in windows),
        "",
        f"*In brackets: the power counted in {experiments:,} simulated experiments of that size, \u00b1"
        f" {error:.1f} points.*",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _effect(row: Row) -> str:
    rate, effect = row["rate"], row["effect"]
    if rate:
        return f"{100 * rate:g} % fall to {100 * (rate + effect):g} %"
    return f"a difference of {effect:g} standard deviations"


def _cells(row: Row) -> list[str]:
    return [_cell(row[looking]) for looking in ("once", "sequential", "tuned")]


def _cell(found: Row) -> str:
    """Of each arm."""
    return f"{figures.count(ceil(found['units'] / 2))} ({100 * found['power']:.0f} %)"


def _adjusted(row: Row) -> str:
    return f"r\u00b2 {row['r2']:g}: {_cell(row['adjusted'])}"


def _time(row: Row) -> str:
    """Of both arms, one after the other."""
    seconds = timedelta(seconds=WINDOW * row["tuned"]["units"]).total_seconds()
    return reading.lapse(seconds)


if __name__ == "__main__":
    main()
