"""An evaluation as one HTML page that needs nothing else: pictures are in it."""

import base64
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from epikv.eval import table

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em }
img { max-width: 100% }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
th { vertical-align: bottom; white-space: normal }
code { background: #f2f2f2 }
"""


def html(summary: dict[str, Any], pictures: Sequence[Path]) -> str:
    """The whole page."""
    title = f"{summary['plan']['model']['name']}: what policies keep"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(line)}</p>" for line in table.made(summary["plan"])),
            *map(_picture, pictures),
            *_tables(summary),
            "</body></html>\n",
        ]
    )


def _picture(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<p><img alt="{escape(file.stem)}" src="data:image/png;base64,{data}"></p>'


def _tables(summary: dict[str, Any]) -> Iterator[str]:
    said = escape(table.protection(summary["plan"]))
    for task in summary["plan"]["tasks"]:
        for budget in summary["plan"]["budgets"]:
            yield f"<h2>{escape(task['name'])}, budget {escape(budget)}</h2><p>{said}.</p>"
            yield '<div class="wide"><table><tr>'
            yield "".join(f"<th>{escape(column)}</th>" for column in table.COLUMNS) + "</tr>"
            for row in summary["rows"]:
                if (row["task"], row["budget"]) == (task["name"], budget):
                    yield f"<tr>{''.join(map(_cell, table.cells(row)))}</tr>"
            yield "</table></div>"


def _cell(text: str) -> str:
    return f"<td>{escape(text.replace('`', ''))}</td>"
