"""A calibration as people read it."""

from typing import Any

from rich.console import Console
from rich.table import Table

from epikv.calibrate.choose import Interval
from epikv.calibrate.plan import Report

EXAMPLES = 5
WIDTH = 110  # columns that the tables need

out = Console(highlight=False, markup=False, soft_wrap=True)
out.width = max(out.width, WIDTH)


def show(report: Report) -> None:
    details = report.details
    traces = details["traces"]
    out.print(f"{traces['solved']} of {traces['problems']} problems solved")
    _labels(details)
    if report.search is not None:
        _search(report)
    for fraction, found in details.get("confirmation", {}).items():
        _confirmation(float(fraction), found)
    if report.refusal:
        out.print(f"not calibrated: {report.refusal}")
        return
    pair = report.chosen
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


def _search(report: Report) -> None:
    search = report.search
    out.print(
        f"{search.traces[0]} traces select, {search.traces[1]} judge;"
        f" {search.needed:.1%} of {search.tokens} candidates are needed"
    )
    table = Table("layer", "AUC of the step", "of its mean", "of its z", "place taken out", "p")
    for row in search.layers:
        intervals = (row[f"auc_{name}"] for name in ("raw", "mean", "z", "z_in_place"))
        table.add_row(str(row["layer"]), *map(_interval, intervals), f"{row['p']:.3f}")
    out.print(table)
    for band in [*search.bands, *search.rejected_bands]:
        out.print(
            f"band {band.first} to {band.last}, needed tokens move"
            f" {'more' if band.sign > 0 else 'less'}: AUC {_interval(band.selected)},"
            f" held out {_interval(band.held_out)}{'' if band.accepted else ': rejected'}"
        )
    table = Table("pair", "sign", "recall", "held out", "random's", "AUC", "held out", "p", "")
    for pair in [*search.pairs, *search.rejected_pairs]:
        table.add_row(
            f"{pair.a}, {pair.b}",
            f"{pair.sign:+d}",
            _interval(pair.recall),
            _interval(pair.held_out_recall),
            f"{pair.share:.3f}",
            _interval(pair.auc),
            _interval(pair.held_out_auc),
            f"{pair.p:.3f}",
            "" if pair.accepted else "rejected",
        )
    if table.row_count:
        out.print(table)


def _confirmation(fraction: float, found: dict) -> None:
    table = Table(
        f"{fraction:.0%} kept", "solved", "parts right", "chosen less it: solved", "parts"
    )
    for name, figures in found["arms"].items():
        low, high = figures["exact_interval"]
        less = found["chosen_less"].get(name)
        table.add_row(
            name,
            f"{figures['exact']:.3f} [{low:.3f}, {high:.3f}]",
            f"{figures['parts']:.3f}",
            *(
                f"{less[of]['value']:+.3f} [{less[of]['low']:+.3f}, {less[of]['high']:+.3f}]"
                if less
                else ""
                for of in ("exact", "parts")
            ),
        )
    out.print(table)


def _interval(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f},{interval.high:.3f}]"
