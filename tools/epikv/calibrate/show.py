"""A calibration as people read it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from epikv.calibrate.findings import Search
from epikv.calibrate.plan import Report

EXAMPLES = 5
WIDTH = 110  # columns that the tables need

out = Console(emoji=False, highlight=False, markup=False, soft_wrap=True)
out.width = max(out.width, WIDTH)


def show(report: Report) -> None:
    details = report.details
    for task, figures in details["tasks"].items():
        needed = figures["needed tokens"]
        out.print(
            f"{task}: {figures['solved']} of {figures['problems']} problems solved"
            + ("" if needed is None else f", {needed:.1f} tokens needed of a trace")
            + f"; {figures['usable']} traces count"
        )
    _labels(details)
    if report.search is not None:
        _search(report.search)
    for fraction, found in details.get("confirmation", {}).items():
        _confirmation(float(fraction), found)
    if report.refusal:
        out.print(f"not calibrated: {report.refusal}")
        return
    pair = report.chosen
    assert pair is not None  # else there is a refusal
    out.print(
        f"layers {pair.a} and {pair.b}, sign {pair.sign:+d}, window {report.plan.rule.window}"
    )


def _labels(details: dict[str, Any]) -> None:
    labels = details["labels"]
    for task, reads in labels.get("eviction", {}).get("reads of a trace", {}).items():
        out.print(f"{task}: what is read of one trace, and where")
        for read in reads[:EXAMPLES]:
            out.print(
                f"  {read['text']!r}, {read['reader'] - read['token']} tokens later: {read['read as']!r}"
            )
    if "occlusion" in labels:
        counts = labels["occlusion"]
        out.print(f"{counts['flipped']} of {counts['windows']} windows flip the answer")
    for name, value in details.get("agreement", {}).items():
        out.print(f"  {name}: {'-' if value is None else f'{value:.3f}'}")


def _search(search: Search) -> None:
    out.print(
        f"{search.traces[0]} traces select, {search.traces[1]} judge;"
        f" {search.needed:.1%} of {search.tokens} candidates are needed"
    )
    table = Table("layer", "AUC of the step", "of its mean", "of its z", "place taken out", "p")
    for row in search.layers:
        cells = (asdict(row[f"auc_{name}"]) for name in ("raw", "mean", "z", "z_in_place"))
        table.add_row(str(row["layer"]), *map(_interval, cells), f"{row['p']:.3f}")
    out.print(table)
    for band in [*search.bands, *search.rejected_bands]:
        out.print(
            f"band {band.first} to {band.last}, needed tokens move"
            f" {'more' if band.sign > 0 else 'less'}: AUC {_interval(asdict(band.selected))},"
            f" held out {_interval(asdict(band.held_out))}{'' if band.accepted else ': rejected'}"
        )
    if not (found := [*search.pairs, *search.rejected_pairs]):
        return
    tasks = list(found[0].recall_by_task)
    heads = [task.removeprefix("sample:") for task in tasks] if len(tasks) > 1 else []
    table = Table("pair", "sign", "recall", "held out", *heads, "random's", "AUC held out", "p", "")
    for pair in found:
        by_task = [f"{recall:.3f}" for recall in pair.recall_by_task.values()]
        table.add_row(
            f"{pair.a}, {pair.b}",
            f"{pair.sign:+d}",
            f"{pair.recall.value:.3f}",
            _interval(asdict(pair.held_out_recall)),
            *(by_task if heads else ()),
            f"{pair.share:.3f}",
            _interval(asdict(pair.held_out_auc)),
            f"{pair.p:.3f}",
            "" if pair.accepted else "rejected",
        )
    out.print(table)


def _confirmation(fraction: float, found: dict[str, Any]) -> None:
    table = Table(
        f"{fraction:.0%} kept", "solved", "parts right", "chosen less it: solved", "parts"
    )
    for task, figures in {"": found, **found.get("tasks", {})}.items():
        if task:
            table.add_section()
            table.add_row(task)
        for name, arm in figures["arms"].items():
            gain = figures["gains"].get(name)
            told = (_interval(gain[of], "+") for of in ("solved", "parts")) if gain else ()
            table.add_row(name, _interval(arm["solved"]), f"{arm['parts']:.3f}", *told)
    out.print(table)


def _interval(interval: Mapping[str, float], sign: str = "") -> str:
    value, low, high = (f"{interval[name]:{sign}.3f}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
