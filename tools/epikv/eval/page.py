"""An evaluation as one HTML page that needs nothing else: pictures are in it."""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from epikv.eval import table
from epikv.experiment.markup import Html, element
from epikv.experiment.page import style

# Beside the style of an experiment's page: these tables are wider.
_STYLE = """
body { max-width: 84rem }
img { max-width: 100%; background: #fff; border-radius: .4rem }
.arms th, .arms td { padding: .3rem .45rem; font-size: .85rem }
.arms td:first-child { max-width: 15rem; overflow-wrap: anywhere; white-space: normal }
"""
# Columns that are read together: a difference and its p.
_JOINED = (("solved - full", "p"), ("solved - random", "p"))
_VALUE_AND_MORE = re.compile(r"(\S+?),? ((?:\[|\(|n = |[\d.]+ MiB).*)")


def html(summary: dict[str, Any], pictures: Sequence[Path]) -> str:
    """The whole page."""
    title = f"{summary['plan']['model']['name']}: what policies keep"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(style() + _STYLE)),
    )
    body = element(
        "body",
        element("h1", title),
        *(element("p", line) for line in table.made(summary["plan"])),
        *map(_picture, pictures),
        *_tables(summary),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _picture(file: Path) -> Html:
    data = base64.b64encode(file.read_bytes()).decode()
    image = Html(f'<img alt="{file.stem}" src="data:image/png;base64,{data}">')
    return element("p", image)


def _tables(summary: dict[str, Any]) -> Iterator[Html]:
    said = table.protection(summary["plan"])
    for task in summary["plan"]["tasks"]:
        for budget in summary["plan"]["budgets"]:
            yield element("h2", f"{task['name']}, budget {budget}")
            yield element("p", f"{said}.", class_="soft")
            rows = [
                element("tr", *map(_cell, _joined(table.cells(row))))
                for row in summary["rows"]
                if (row["task"], row["budget"]) == (task["name"], budget)
            ]
            titles = element("tr", *(element("th", title) for title in _joined(table.COLUMNS)))
            made = element("table", element("thead", titles), element("tbody", *rows))
            yield element("div", made, class_="wide arms")


def _joined(cells: Sequence[str]) -> Iterator[str]:
    """With what is read together in one, a line for each."""
    columns = iter(zip(table.COLUMNS, cells, strict=True))
    pairs = dict(_JOINED)
    for column, text in columns:
        if column in pairs:
            _, p = next(columns)
            yield text if p in ("", "p") else f"{text}\np = {p}"
        else:
            yield text


def _cell(text: str) -> Html:
    """A value, and smaller and below it what is said of it."""
    first, *rest = text.replace("`", "").split("\n")
    if found := _VALUE_AND_MORE.fullmatch(first):
        first, more = found.groups()
        rest = [more, *rest]
    return element("td", first, *(element("small", line) for line in rest))
