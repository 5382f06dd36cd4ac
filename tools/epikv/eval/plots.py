"""An evaluation's pictures: solved against budget, axis against axis, and lengths of outputs."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from epikv.eval.plan import FULL, ORACLE, RANDOM
from epikv.eval.table import protection
from epikv.installing import pip_install

_COLUMNS = 3
# How arms look, here and in the lab's picture of the sample models: the colours of the page of an
# experiment.
COLOURS = ("#2563eb", "#c2620a", "#c02672", "#7c3aed", "#0b7fae", "#5a8a0a")
MARKERS = ("o", "s", "^", "D", "v", "P")
OTHERS: dict[str, Any] = {"color": "0.82", "linewidth": 0.8, "zorder": 1}
ANCHORS: dict[str, dict[str, Any]] = {
    FULL: {"color": "black", "linestyle": "--"},
    ORACLE: {"color": "#0f7a3d", "linestyle": "--"},
    RANDOM: {"color": "0.35", "linestyle": "-"},
}
FROZEN_RANDOM: dict[str, Any] = {"color": "0.35", "linestyle": ":"}
_LINE, _SOFT = "#d9dde4", "#5b6472"
_APART = 0.008  # of a panel's width, by which lines of one height are kept from hiding each other
_INCH_OF_ROW, _LETTERS_OF_INCH = 0.2, 14
_HANDLE_INCHES, _LETTER_INCHES = 0.65, 0.075  # of a legend's entry

Figures = tuple[float, float, float]  # value, low, high
Point = tuple[float, float, float, float]  # x, value, low, high


def check() -> None:
    """Before anything is run for a report that cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError(
            f"{error}; install what plots need: {pip_install('eval')}"
        ) from error


def draw(folder: Path, summary: dict[str, Any]) -> list[Path]:
    """Writes accuracy.png, length.png and, of tasks of several axes, recall.png."""
    styles = _styles(summary)
    by_task = _curves if len(summary["plan"]["budgets"]) > 1 else _ranked
    files = [
        by_task(folder / "accuracy.png", summary, styles, "problems solved", 1.0, _solved),
        by_task(folder / "length.png", summary, styles, "output tokens, of full's", None, _length),
    ]
    axes = list(dict.fromkeys(task["axis"] for task in summary["plan"]["tasks"]))
    if len(axes) > 1:
        files.append(_scatter(folder / "recall.png", summary, styles, axes))
    return files


def _styles(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the arms that are told apart: anchors, and the best of the others."""
    rows = [row for row in summary["rows"] if "solved" in row]
    styles, others = {}, {}
    for arm in summary["plan"]["arms"]:
        label, policy = arm["label"], arm["policy"]
        if policy in ANCHORS and "steering" not in arm and "kv" not in arm:
            styles[label] = FROZEN_RANDOM if arm["params"].get("frozen") else ANCHORS[policy]
        elif values := [row["solved"]["value"] for row in rows if row["arm"] == label]:
            others[label] = fmean(values)
    best = sorted(others, key=lambda label: -others[label])
    looks = [
        {"color": colour, "marker": marker} for colour, marker in zip(COLOURS, MARKERS, strict=True)
    ]
    return styles | dict(zip(best, looks, strict=False))


def _solved(row: dict[str, Any]) -> Figures:
    return _of(row["solved"])


def _length(row: dict[str, Any]) -> Figures | None:
    return None if row["length"] is None else _of(row["length"])


def _of(estimate: dict[str, float]) -> Figures:
    return estimate["value"], estimate["low"], estimate["high"]


def _found(
    summary: dict[str, Any],
    task: dict[str, Any],
    label: str,
    value: Callable[[dict[str, Any]], Figures | None],
) -> Iterator[tuple[dict[str, Any], Figures]]:
    """An arm's rows of a task, with what is shown of them."""
    for row in summary["rows"]:
        mine = (row["task"], row["arm"]) == (task["name"], label) and "solved" in row
        if mine and (shown := value(row)) is not None:
            yield row, shown


def _curves(
    path: Path,
    summary: dict[str, Any],
    styles: dict[str, dict[str, Any]],
    what: str,
    most: float | None,
    value: Callable[[dict[str, Any]], Figures | None],
) -> Path:
    """A panel a task, a line an arm, over budgets; bands are intervals. most: of what there can be."""
    plan = summary["plan"]
    shares = all(budget.endswith("%") for budget in plan["budgets"])
    figure, panels = _panels(len(plan["tasks"]), plan, 3.2)
    told_apart = [label for label in styles if label != FULL]
    for panel, task in zip(panels, plan["tasks"], strict=True):
        lines: dict[str, list[Point]] = {}
        for arm in plan["arms"]:
            points: list[Point] = sorted(
                (float(row["budget"][:-1]) if shares else row["budget_tokens"], *shown)
                for row, shown in _found(summary, task, arm["label"], value)
            )
            if points:
                lines[arm["label"]] = points
        budgets = [point[0] for points in lines.values() for point in points]
        step = _APART * (max(budgets) - min(budgets)) if budgets else 0.0
        for label, points in lines.items():
            if label == FULL:
                panel.axhline(points[0][1], **styles[label])
                continue
            x, middle, low, high = zip(*points, strict=True)
            style = styles.get(label, OTHERS)
            if label in styles:
                shift = step * (told_apart.index(label) - (len(told_apart) - 1) / 2)
                x = tuple(at + shift for at in x)
                panel.fill_between(x, low, high, alpha=0.1, linewidth=0, color=style["color"])
            panel.plot(x, middle, markersize=4, **style)
        panel.set_ylim(-0.03 if most else 0, 1.03 * most if most else None)
        panel.set_title(f"{task['name']} ({task['axis']}, n = {task['problems']})", fontsize=9)
        panel.set_xlabel("budget, % of the trace" if shares else "budget, tokens")
    panels[0].set_ylabel(what)
    return _save(figure, path, _legend(plan, styles))


def _ranked(
    path: Path,
    summary: dict[str, Any],
    styles: dict[str, dict[str, Any]],
    what: str,
    most: float | None,
    value: Callable[[dict[str, Any]], Figures | None],
) -> Path:
    """Of one budget: a panel a task, a dot an arm with its interval, the most on top."""
    plan = summary["plan"]
    found = {
        task["name"]: sorted(
            (shown, arm["label"])
            for arm in plan["arms"]
            for _, shown in _found(summary, task, arm["label"], value)
        )
        for task in plan["tasks"]
    }
    rows = max((len(arms) for arms in found.values()), default=0)
    figure, panels = _panels(len(plan["tasks"]), plan, max(1.6, _INCH_OF_ROW * rows + 0.8))
    for panel, task in zip(panels, plan["tasks"], strict=True):
        for place, ((middle, low, high), label) in enumerate(found[task["name"]]):
            style = styles.get(label, {"color": _SOFT})
            dot = {"color": style["color"], "marker": style.get("marker", "o"), "markersize": 4}
            ends = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
            panel.errorbar(middle, place, xerr=ends, linewidth=1.2, **dot)
        labels = [label for _, label in found[task["name"]]]
        panel.set_yticks(range(len(labels)), labels, fontsize=8)
        panel.set_ylim(-0.7, max(len(labels), 1) - 0.3)
        panel.set_xlim(-0.03 if most else 0, 1.03 * most if most else None)
        panel.set_title(f"{task['name']} ({task['axis']}, n = {task['problems']})", fontsize=9)
        panel.set_xlabel(f"{what}, at a budget of {plan['budgets'][0]}")
    return _save(figure, path, [])


def _scatter(
    path: Path, summary: dict[str, Any], styles: dict[str, dict[str, Any]], axes: Sequence[str]
) -> Path:
    """A panel a budget and further axis; what is up and to the right is better."""
    plan = summary["plan"]
    y, *others = axes
    places = [(budget, x) for x in others for budget in plan["budgets"]]
    figure, panels = _panels(len(places), plan, 3.2)
    for panel, (budget, x) in zip(panels, places, strict=True):
        for row in summary["axes"]:
            if row["budget"] != budget or x not in row or y not in row:
                continue
            panel.plot(row[x], row[y], **_dot(styles.get(row["arm"], OTHERS)))
        panel.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel=f"{x}, solved")
        panel.set_title(f"budget {budget}", fontsize=9)
    panels[0].set_ylabel(f"{y}, solved")
    dots = {label: _dot(style) for label, style in styles.items()}
    return _save(figure, path, _legend(plan, dots))


def _dot(style: dict[str, Any]) -> dict[str, Any]:
    """A point instead of a line, a hollow one for a line that is not whole."""
    fill = "full" if style.get("linestyle", "-") == "-" else "none"
    known = style is not OTHERS
    return {
        "color": style["color"],
        "linestyle": "",
        "marker": style.get("marker", "o"),
        "fillstyle": fill,
        "zorder": 2 if known else 1,
    }


def _panels(count: int, plan: dict[str, Any], height: float) -> tuple[Any, list[Any]]:
    """Without pyplot: no display, no state. height: of a panel, in inches."""
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(4 * columns + 1.5, height * rows + 1.4), layout="constrained")
    title = f"{plan['model']['name']}. {protection(plan)}."
    letters = round(_LETTERS_OF_INCH * figure.get_figwidth())
    figure.suptitle(textwrap.fill(title, letters), x=0.01, ha="left", fontsize=9, color=_SOFT)
    grid = figure.subplots(rows, columns, squeeze=False)
    for panel in grid.flat[count:]:
        panel.remove()
    for panel in grid.flat[:count]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["bottom", "left"]].set_color(_SOFT)
        panel.tick_params(colors=_SOFT)
        panel.grid(color=_LINE, linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, list(grid.flat[:count])


def _save(figure: Any, path: Path, handles: Sequence[Any]) -> Path:
    """The legend is below, where it takes no room from the title."""
    if handles:
        longest = max(len(handle.get_label()) for handle in handles)
        inches = _HANDLE_INCHES + _LETTER_INCHES * longest
        columns = max(1, int(figure.get_figwidth() / inches))
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def _legend(plan: dict[str, Any], styles: dict[str, dict[str, Any]]) -> list[Any]:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], label=label, markersize=4, **style) for label, style in styles.items()]
    if rest := len(plan["arms"]) - len(styles):
        lines.append(Line2D([], [], label=f"{rest} others", color=OTHERS["color"]))
    return lines
