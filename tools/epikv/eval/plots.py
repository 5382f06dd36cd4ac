"""An evaluation's pictures: solved against budget, axis against axis, and lengths of outputs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from epikv.eval.plan import FULL, ORACLE, RANDOM
from epikv.eval.table import protection

_COLUMNS = 3
# How arms look, here and in the picture of the sample models (epikv.sample.picture).
COLOURS = ("tab:blue", "tab:orange", "tab:red", "tab:purple", "tab:brown", "tab:pink")
OTHERS: dict[str, Any] = {"color": "0.82", "linewidth": 0.8, "zorder": 1}
ANCHORS: dict[str, dict[str, Any]] = {
    FULL: {"color": "black", "linestyle": "--"},
    ORACLE: {"color": "tab:green", "linestyle": "--"},
    RANDOM: {"color": "0.35", "linestyle": "-"},
}
FROZEN_RANDOM: dict[str, Any] = {"color": "0.35", "linestyle": ":"}

Point = tuple[float, float, float, float]  # x, value, low, high


def check() -> None:
    """Before anything is run for a report that cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError(f"{error}: pip install 'epikv[eval]'") from error


def draw(folder: Path, summary: dict[str, Any]) -> list[Path]:
    """Writes accuracy.png, length.png and, of tasks of several axes, recall.png."""
    styles = _styles(summary)
    files = [
        _curves(folder / "accuracy.png", summary, styles, "problems solved", _solved),
        _curves(folder / "length.png", summary, styles, "output tokens, of those of full", _length),
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
        if policy in ANCHORS:
            styles[label] = FROZEN_RANDOM if arm["params"].get("frozen") else ANCHORS[policy]
        elif values := [row["solved"]["value"] for row in rows if row["arm"] == label]:
            others[label] = fmean(values)
    best = sorted(others, key=lambda label: -others[label])
    return styles | {label: {"color": colour} for label, colour in zip(best, COLOURS, strict=False)}


def _solved(row: dict[str, Any]) -> tuple[float, float, float]:
    return tuple(row["solved"][name] for name in ("value", "low", "high"))


def _length(row: dict[str, Any]) -> tuple[float, float, float] | None:
    ratio = row["length_ratio"]
    return None if ratio is None else (ratio, ratio, ratio)


def _curves(
    path: Path,
    summary: dict[str, Any],
    styles: dict[str, dict[str, Any]],
    what: str,
    value: Callable[[dict[str, Any]], tuple[float, float, float] | None],
) -> Path:
    """A panel a task, a line an arm, over budgets."""
    plan = summary["plan"]
    shares = all(budget.endswith("%") for budget in plan["budgets"])
    figure, panels = _panels(len(plan["tasks"]), plan)
    for panel, task in zip(panels, plan["tasks"], strict=True):
        rows = [r for r in summary["rows"] if r["task"] == task["name"] and "solved" in r]
        for arm in plan["arms"]:
            label = arm["label"]
            points: list[Point] = sorted(
                (float(r["budget"][:-1]) if shares else r["budget_tokens"], *found)
                for r in rows
                if r["arm"] == label and (found := value(r)) is not None
            )
            if points and arm["policy"] == FULL:
                panel.axhline(points[0][1], **styles[label])
            elif points:
                x, middle, low, high = zip(*points, strict=True)
                style = styles.get(label, OTHERS)
                panel.plot(x, middle, marker="." if label in styles else "", **style)
                if label in styles:
                    panel.fill_between(x, low, high, alpha=0.1, linewidth=0, color=style["color"])
        panel.set_title(f"{task['name']} ({task['axis']}, n = {task['problems']})", fontsize=9)
        panel.set_xlabel("budget, % of the trace" if shares else "budget, tokens")
    panels[0].set_ylabel(what)
    return _save(figure, path, plan, styles)


def _scatter(
    path: Path, summary: dict[str, Any], styles: dict[str, dict[str, Any]], axes: Sequence[str]
) -> Path:
    """A panel a budget and further axis; what is up and to the right is better."""
    plan = summary["plan"]
    y, *others = axes
    places = [(budget, x) for x in others for budget in plan["budgets"]]
    figure, panels = _panels(len(places), plan)
    for panel, (budget, x) in zip(panels, places, strict=True):
        for row in summary["axes"]:
            if row["budget"] != budget or x not in row or y not in row:
                continue
            panel.plot(row[x], row[y], **_dot(styles.get(row["arm"], OTHERS)))
        panel.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel=f"{x}, solved")
        panel.set_title(f"budget {budget}", fontsize=9)
    panels[0].set_ylabel(f"{y}, solved")
    return _save(figure, path, plan, {label: _dot(style) for label, style in styles.items()})


def _dot(style: dict[str, Any]) -> dict[str, Any]:
    """A point instead of a line, a hollow one for a line that is not whole."""
    fill = "full" if style.get("linestyle", "-") == "-" else "none"
    known = style is not OTHERS
    return {
        "color": style["color"],
        "linestyle": "",
        "marker": "o",
        "fillstyle": fill,
        "zorder": 2 if known else 1,
    }


def _panels(count: int, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Without pyplot: no display, no state."""
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(4 * columns + 3, 3.2 * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for panel in grid.flat[count:]:
        panel.remove()
    figure.suptitle(f"{plan['model']['name']}. {protection(plan)}", fontsize=8)
    return figure, list(grid.flat[:count])


def _save(figure: Any, path: Path, plan: dict[str, Any], styles: dict[str, dict[str, Any]]) -> Path:
    figure.legend(handles=list(_legend(plan, styles)), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def _legend(plan: dict[str, Any], styles: dict[str, dict[str, Any]]) -> Iterator[Any]:
    from matplotlib.lines import Line2D

    for label, style in styles.items():
        yield Line2D([], [], label=label, **style)
    if rest := len(plan["arms"]) - len(styles):
        yield Line2D([], [], label=f"{rest} others", color=OTHERS["color"])
