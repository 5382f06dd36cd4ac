"""A dashboard as a picture: its panels where Grafana puts them, with the lines that it would draw."""

import io
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epikv_lab.dashboards.reading import Drawn, File, Line, Reader

GRID = 24
INCHES_WIDE, INCHES_A_ROW = 13.0, 0.27  # of the picture; of a row of the grid
DOTS = 75  # an inch
MOST_LINES = 12  # in a panel: more cannot be told apart
PALETTE = 96  # colours of the file
TICKS = 4  # of the time
COLOURS = ("#3274d9", "#e0752d", "#299c46", "#a352cc", "#c4162a", "#19a2a0", "#8a6d3b", "#e24d9b")
RED, GREY = "#c4162a", "#6b7280"


def draw(file: File, reader: Reader, path: Path, rows: Sequence[str] = ()) -> None:
    """Writes a PNG; of all rows, or of those that are named."""
    from matplotlib.figure import Figure
    from PIL import Image

    panels = [panel for panel in file.panels() if not rows or panel.row in rows]
    tops: dict[int, float] = {}  # of each line of panels: where it begins, in rows of the picture
    headings: dict[str, float] = {}
    height = 2.5
    for panel in panels:
        if panel.row not in headings:
            headings[panel.row] = height
            height += 1.5
        if panel.place[1] not in tops:
            tops[panel.place[1]] = height
            height += panel.place[3]
    figure = Figure(figsize=(INCHES_WIDE, height * INCHES_A_ROW))
    figure.text(0.008, 1 - 1.2 / height, file.title, fontsize=15, weight="bold", va="center")
    for title, top in headings.items():
        figure.text(0.008, 1 - (top + 0.9) / height, title, fontsize=11, weight="bold", va="center")
    for panel in panels:
        x, y, width, rows_high = panel.place
        box = (x / GRID, 1 - (tops[y] + rows_high) / height, width / GRID, rows_high / height)
        _panel(figure, box, height, panel, reader)
    whole = io.BytesIO()
    figure.savefig(whole, dpi=DOTS)
    Image.open(whole).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def _panel(
    figure: Any, box: tuple[float, float, float, float], height: float, panel: Drawn, reader: Reader
) -> None:
    left, bottom, width, high = box
    row = 1 / height
    top = bottom + high
    figure.text(left + 0.008, top - 0.6 * row, panel.title, fontsize=9, va="center")
    if panel.kind == "table":
        answers = [each for query in panel.queries for each in reader.rows(query)]
        axes = figure.add_axes((left + 0.008, bottom, width - 0.016, high - 1.4 * row))
        _table(axes, panel, answers)
        return
    lines = [line for query in panel.queries for line in reader.lines(query)]
    if panel.kind == "stat":
        axes = figure.add_axes((left, bottom, width, high - row))
        _number(axes, panel, lines)
        return
    axes = figure.add_axes((left + 0.04, bottom + 2.2 * row, width - 0.048, high - 3.6 * row))
    if lines:
        _lines(axes, panel, lines)
        _axes(axes, panel, reader.start, reader.end)
    else:
        axes.set_axis_off()
        axes.text(0, 0.5, "no data", fontsize=9, color=GREY, transform=axes.transAxes)


def _number(axes: Any, panel: Drawn, lines: Sequence[Line]) -> None:
    axes.set_axis_off()
    last = next((v for line in lines for v in reversed(line.values) if not math.isnan(v)), None)
    text = "no data" if last is None else amount(last, panel.unit)
    axes.text(0.06, 0.5, text, fontsize=17, va="center", transform=axes.transAxes)


def _table(axes: Any, panel: Drawn, answers: Sequence[tuple[dict[str, str], float]]) -> None:
    axes.set_axis_off()
    names = sorted({name for labels, _ in answers for name in labels} - panel.hidden)
    cells = [[labels.get(name, "") for name in names] for labels, _ in answers]
    if "Value" not in panel.hidden:
        names = [*names, "value"]
        cells = [[*row, amount(of[1], panel.unit)] for row, of in zip(cells, answers, strict=True)]
    if not cells:
        return
    width = max(1, round(150 * axes.get_position().width / len(names)))
    cut = [
        [text if len(text) <= width else f"{text[: width - 1]}…" for text in row] for row in cells
    ]
    shown = axes.table(
        cut[:8], colLabels=names, loc="upper left", cellLoc="left", edges="horizontal"
    )
    shown.auto_set_font_size(False)
    shown.set_fontsize(7)


def _lines(axes: Any, panel: Drawn, lines: Sequence[Line]) -> None:
    most = sorted(lines, key=lambda line: -max(_numbers(line), default=-math.inf))[:MOST_LINES]
    kept = [line for line in lines if line in most]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(kept))]
    times = sorted({at for line in kept for at in line.times})
    rows = []
    for line in kept:
        values = dict(zip(line.times, line.values, strict=True))
        rows.append([values.get(at, math.nan) for at in times])
    if panel.stacked and rows:
        axes.stackplot(
            times,
            [[0 if math.isnan(value) else value for value in row] for row in rows],
            colors=colours,
            alpha=0.75,
            labels=[line.name for line in kept],
            linewidth=0,
        )
    else:
        for line, row, colour in zip(kept, rows, colours, strict=True):
            axes.plot(times, row, color=colour, linewidth=1.1, label=line.name)
    if panel.limit is not None:
        axes.axhline(panel.limit, color=RED, linewidth=0.8, linestyle="--")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.01, -0.13),
        ncols=4,
        fontsize=6,
        frameon=False,
        handlelength=1,
        columnspacing=1,
        borderpad=0,
    )


def _axes(axes: Any, panel: Drawn, start: float, end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    if panel.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: amount(value, panel.unit))
    axes.set_xlim(start, end)
    shown = [start + (end - start) * tick / TICKS for tick in range(1, TICKS)]
    axes.set_xticks(shown, [time.strftime("%H:%M", time.gmtime(each)) for each in shown])
    axes.tick_params(labelsize=6.5, colors=GREY, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d9dde4")
    axes.grid(color="#e9ecf0", linewidth=0.6)
    axes.set_axisbelow(True)


def _numbers(line: Line) -> list[float]:
    return [value for value in line.values if math.isfinite(value)]


def amount(value: float, unit: str) -> str:
    """As Grafana writes it, or nearly."""
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "s":
            return _scaled(
                value, ((3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs"))
            )
        case "bytes":
            return _scaled(value, ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")))
        case "cps" | "reqps":
            return f"{_scaled(value, _THOUSANDS)}/s"
        case _:
            return _scaled(value, _THOUSANDS)


_THOUSANDS = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1, ""))


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, name = next(((size, name) for size, name in units if abs(value) >= size), min(units))
    if value == 0:
        size, name = next(((size, name) for size, name in units if size == 1))
    return f"{value / size:.3g}{name}"
