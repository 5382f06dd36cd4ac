"""A load's picture: latencies of each arm, and goodput and queue over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from epikv.bench.generator import Load, Sample
from epikv.bench.report import Window
from epikv.installing import pip_install


def check() -> None:
    """Before anything is measured for plots that cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError(f"--plots needs matplotlib: {pip_install('bench')}") from error


def draw(
    folder: Path, load: Load, arms: Sequence[str], window: Window, found: Mapping[str, Any]
) -> None:
    """Writes latency.png, timeline.png and, of requests that took part in experiments,
    experiment.png."""
    folder.mkdir(parents=True, exist_ok=True)
    arrived = [s for s in load.samples if s.scheduled in window]
    asked = {name: [s for s in arrived if s.arm == index] for index, name in enumerate(arms)}
    _latencies(folder / "latency.png", asked, window)
    _timeline(folder / "timeline.png", found, window)
    if dealt := found["experiment_arms"]:
        by_arm = {name: [s for s in arrived if s.experiment_arm == name] for name in dealt}
        _latencies(folder / "experiment.png", by_arm, window, dealt)


def _latencies(
    path: Path,
    groups: Mapping[str, Sequence[Sample]],
    window: Window,
    judged: Mapping[str, Any] | None = None,
) -> None:
    """judged: with the share of right answers, of the figures of each group."""
    figure, (first, whole, *more) = _figure(1, 2 if judged is None else 3, (10, 4))
    count = sum(len(samples) for samples in groups.values())
    figure.suptitle(f"Latencies of {count} requests, by arm", fontsize=10)
    for name, samples in groups.items():
        first.ecdf([s.first_token for s in samples if s.messages] or [0], label=name)
        whole.ecdf([s.end_to_end for s in samples if s.ok] or [0], label=name)
    first.set_xlabel("time to first token, s")
    whole.set_xlabel("end to end, s")
    first.set_ylabel("share of requests")
    for panel in (first, whole):
        panel.set_xlim(left=0)
    if window.deadline is not None:
        whole.axvline(window.deadline, color="grey", linestyle=":", label="deadline")
    whole.legend()
    for right in more:
        right.set_ylabel("share of right answers, 95 %")
        right.set_ylim(0, 1.02)
        for name, shares in (judged or {}).items():
            if (share := shares["right"]) is not None:
                below, above = share["value"] - share["low"], share["high"] - share["value"]
                right.errorbar(name, share["value"], [[below], [above]], fmt="o", capsize=4)
    figure.savefig(path, dpi=120)


def _timeline(path: Path, found: Mapping[str, Any], window: Window) -> None:
    figure, (goodput, queue) = _figure(2, 1, (10, 6), sharex=True)
    length = f"{window.seconds:.0f} seconds that count"
    within = "" if window.deadline is None else f"; a deadline of {window.deadline:.2f} s"
    figure.suptitle(f"Goodput and requests over the {length}{within}", fontsize=10)
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
    queue.set_xlabel("seconds since the load began")
    for panel in (goodput, queue):
        panel.set_ylim(bottom=0)
    queue.legend()
    figure.savefig(path, dpi=120)


def _figure(rows: int, columns: int, size: tuple[float, float], **axes: Any) -> tuple[Any, Any]:
    """Without pyplot: no display, no state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, **axes)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#d9dde4", linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, panels
