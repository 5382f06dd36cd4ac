"""What an evaluation leaves in its folder for people and programs."""

import json
from pathlib import Path
from typing import Any

from epikv.eval import page, plots, results, table
from epikv.eval.summary import summarise


def write(folder: Path) -> dict[str, Any]:
    """Writes summary.json, summary.md, report.html and the pictures; gives the summary."""
    summary = summarise(*results.read(folder))
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    (folder / "summary.md").write_text(table.markdown(summary), "utf-8")
    pictures = plots.draw(folder, summary)
    (folder / "report.html").write_text(page.html(summary, pictures), "utf-8")
    return summary
