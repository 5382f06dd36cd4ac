"""A load's picture: latencies of each arm, and goodput and queue over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from epikv.bench.generator import Load
from epikv.bench.report import Window


def check() -> None:
    """Before anything is measured for plots that cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError("--plots needs matplotlib: pip install 'epikv[bench]'") from error


def draw(
    folder: Path, load: Load, arms: Sequence[str], window: Window, found: Mapping[str, Any]
) -> None:
    """Writes latency.png and timeline.png."""
    folder.mkdir(parents=True, exist_ok=True)
    _latencies(folder / "latency.png", load, arms, window)
    _timeline(folder / "timeline.png", found, window)


def _latencies(path: Path, load: Load, arms: Sequence[str], window: Window) -> None:
    figure, (first, whole) = _figure(1, 2, (10, 4))
    for index, name in enumerate(arms):
        samples = [s for s in load.samples if s.arm == index and s.scheduled in window]
        first.ecdf([s.first_token for s in samples if s.messages] or [0], label=name)
        whole.ecdf([s.end_to_end for s in samples if s.ok] or [0], label=name)
    first.set_xlabel("time to first token, s")
    whole.set_xlabel("end to end, s")
    first.set_ylabel("share of requests")
    if window.deadline is not None:
        whole.axvline(window.deadline, color="grey", linestyle=":", label="deadline")
    whole.legend()
    figure.savefig(path, dpi=120)


def _timeline(path: Path, found: Mapping[str, Any], window: Window) -> None:
    figure, (goodput, queue) = _figure(2, 1, (10, 6), sharex=True)
    points = found["timeline"]
    times = [point["at"] for point in points]
    goodput.plot(times, [point["goodput_tokens_per_second"] for point in points])
    goodput.set_ylabel("goodput, tokens/s")
    queue.plot(times, [point["under_way"] for point in points], label="under way (client)")
    for name in ("waiting", "running"):
        gauges = [(g["at"], g[name]) for g in found["gauges"] if g["at"] in window]
        if gauges:
            queue.plot(*zip(*gauges, strict=True), label=f"{name} (server)")
    queue.set_ylabel("requests")
    queue.set_xlabel("s")
    queue.legend()
    figure.savefig(path, dpi=120)


def _figure(rows: int, columns: int, size: tuple[float, float], **axes: Any) -> tuple[Any, Any]:
    """Without pyplot: no display, no state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **axes)
