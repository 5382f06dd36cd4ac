"""Curves of throughput over concurrency, and of time per token over context."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from epikv_lab.bench.peers.cells import Cell
from epikv_lab.bench.peers.engines import Arm
from epikv_lab.bench.peers.results import values
from epikv_lab.bench.peers.rounds import Results

Line = tuple[Arm, dict[int, list[float]]]  # figures by concurrency or context

_STYLES = {"ours": "-o", "peer": "--.", "memory": ":", "linears": ":"}


def draw(
    folder: Path, results: Results, cells: Sequence[Cell], arms: Sequence[Arm], threads: int
) -> list[Path]:
    """Writes concurrency-T.png and context-T.png, of T threads, where the cells have such curves:
    medians, with a bar from the least to the most."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = (
        ("streams", "concurrency", "streams at once", "tokens/s", lambda rate: rate),
        ("decode", "context", "tokens of context", "ms a token", lambda rate: 1e3 / rate),
    )
    made = []
    for kind, name, across, up, scale in curves:
        points = {int(cell.name[len(kind) :]): cell for cell in cells if cell.kind == kind}
        if len(points) < 2:
            continue
        path = folder / f"{name}-{threads}.png"
        lines: list[Line] = []
        for arm in arms:
            taken = {
                at: [scale(rate) for rate in found.values()]
                for at, cell in sorted(points.items())
                if (found := values(results, threads, (cell.name, arm.name)))
            }
            if taken:
                lines.append((arm, taken))
        _draw(path, lines, across, f"{up}, {threads} thread{'s' * (threads > 1)}")
        made.append(path)
    return made


def _draw(path: Path, lines: Sequence[Line], across: str, up: str) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    precisions = list(dict.fromkeys(arm.precision for arm, _ in lines))
    figure = Figure(figsize=(5 * max(1, len(precisions)), 5), layout="constrained")
    axes = figure.subplots(1, max(1, len(precisions)), sharey=True, squeeze=False)[0]
    for axis, precision in zip(axes, precisions, strict=False):
        for arm, taken in lines:
            if arm.precision != precision:
                continue
            middle = [median(found) for found in taken.values()]
            below = [m - min(found) for m, found in zip(middle, taken.values(), strict=True)]
            above = [max(found) - m for m, found in zip(middle, taken.values(), strict=True)]
            axis.errorbar(
                list(taken), middle, [below, above], fmt=_STYLES[arm.kind], label=arm.name,
                capsize=2, linewidth=2 if arm.kind == "ours" else 1,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter(StrMethodFormatter("{x:g}"))
            each.set_minor_formatter(NullFormatter())
        axis.set_xlabel(across)
        axis.set_title(precision)
        axis.legend(fontsize="small")
    axes[0].set_ylabel(up)
    figure.savefig(path, dpi=120)
