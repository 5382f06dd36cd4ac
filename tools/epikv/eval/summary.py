"""What an evaluation found: a row for every arm at every budget on every task.

A row whose completions are not all there has counts and no figures: those that end early are not a
sample of all. Completions that the daemon refuses will not come, so the figures are then of the
others, as `n` and `refused` say, and comparisons of the problems that both have. The unit is the
problem: with several seeds, its mean over them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from epikv.eval.plan import FULL, control, runs, unbudgeted
from epikv.eval.results import Record
from epikv.stats import difference, ratio, sign_test, wilson

Row = dict[str, Any]
Runs = Mapping[str, Sequence[Record]]  # of an item, by seed


def summarise(plan: dict[str, Any], records: Iterable[Record]) -> dict[str, Any]:
    """Rows in the plan's order, and means over the tasks of each axis.

    The order in which completions ended says nothing: the same records give the same figures.
    """
    cells: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.key):
        cells[record.task, record.budget, record.arm].append(record)
    rows = []
    for task in plan["tasks"]:
        for budget in plan["budgets"]:
            for arm in plan["arms"]:
                if runs(task, plan, arm["label"]):
                    rows.append(_row(plan, cells, task, budget, arm))
    return {"plan": plan, "rows": rows, "axes": _axes(plan, rows)}


def faults(summary: dict[str, Any]) -> dict[str, int]:
    """What the daemon would not run, and how often."""
    told: dict[str, int] = {}
    for row in summary["rows"]:
        once = unbudgeted(row)
        if row["refused"] and (not once or row["budget"] == summary["plan"]["budgets"][0]):
            budget = "" if once else f" at {row['budget']}"
            told[f"{row['task']}, {row['arm']}{budget}: {row['fault']}"] = row["refused"]
    return told


def _row(
    plan: dict[str, Any],
    cells: Mapping[tuple[str, str, str], Sequence[Record]],
    task: dict[str, Any],
    budget: str,
    arm: dict[str, Any],
) -> Row:
    """`full` has a row at every budget, to be read beside the others."""
    once = {arm["label"] for arm in plan["arms"] if unbudgeted(arm)}

    def cell(label: str) -> Sequence[Record]:
        return cells.get((task["name"], "" if label in once else budget, label), ())

    label = arm["label"]
    found = cell(label)
    refused = [record for record in found if record.fault]
    row: Row = {
        "task": task["name"],
        "axis": task["axis"],
        "budget": budget,
        "arm": label,
        "policy": arm["policy"],
        "pending": task["problems"] * plan["seeds"] - len(found),
        "refused": len(refused),
        "fault": refused[0].fault if refused else "",
    }
    mine = _runs(found, plan["seeds"])
    if row["pending"] or not mine:
        return row
    row |= _figures(mine)
    full, chance = _runs(cell(FULL), plan["seeds"]), control(plan, label)
    row["against_full"] = _against(mine, full) if label != FULL else None
    row["length"] = _length(mine, full)
    row["random"] = chance
    if chance is not None and chance != label:
        row["against_random"] = _against(mine, _runs(cell(chance), plan["seeds"]))
    return row


def _runs(found: Iterable[Record], seeds: int) -> Runs:
    """Those of the problems that ran with every seed."""
    by_item: dict[str, list[Record]] = defaultdict(list)
    for record in found:
        if not record.fault:
            by_item[record.item].append(record)
    return {
        item: sorted(records, key=lambda record: record.seed)
        for item, records in by_item.items()
        if len(records) == seeds
    }


def _solved(mine: Runs) -> dict[str, float]:
    """By problem, the share of its completions that solve it."""
    return {item: fmean(record.solved for record in records) for item, records in mine.items()}


def _figures(mine: Runs) -> Row:
    solved = _solved(mine)
    all_records = [record for records in mine.values() for record in records]
    evicting = {i: [r for r in records if r.rounds] for i, records in mine.items()}
    evicting = {item: records for item, records in evicting.items() if records}
    hits = _solved(evicting)
    cached = sum(r.prompt_tokens + r.output_tokens for r in all_records)
    return {
        "n": len(solved),
        "solved": asdict(wilson(sum(solved.values()), len(solved))),
        "answers": fmean(fmean(r.right) for r in all_records),
        **_choices(all_records),
        "evicting": {
            "n": len(hits),
            "solved": asdict(wilson(sum(hits.values()), len(hits))) if hits else None,
        },
        "rounds": fmean(r.rounds for r in all_records),
        "dropped": sum(r.evicted_tokens for r in all_records) / cached,
        "output_tokens": fmean(r.output_tokens for r in all_records),
        "cap_hits": fmean(r.finish == "length" for r in all_records),
        "budget_tokens": fmean(r.budget_tokens for r in all_records),
        "peak_tokens": max(r.peak_tokens for r in all_records),
        "peak_bytes": max(r.peak_bytes for r in all_records),
        "uncalibrated": any(r.uncalibrated for r in all_records),
    }


def _choices(records: Sequence[Record]) -> Row:
    """Of multiple choices: both accuracies, one of which is what is called solved."""
    if any(record.acc is None for record in records):
        return {}
    return {
        "acc": fmean(bool(record.acc) for record in records),
        "acc_norm": fmean(bool(record.acc_norm) for record in records),
    }


def _against(mine: Runs, other: Runs) -> Row | None:
    """The gain in problems solved over another arm, on those that both have; None of none."""
    more, less = _solved(mine), _solved(other)
    both = [item for item in more if item in less]
    if not both:
        return None
    ours, theirs = [more[item] for item in both], [less[item] for item in both]
    return {"n": len(both), **asdict(difference(ours, theirs)), "p": sign_test(ours, theirs)}


def _length(mine: Runs, full: Runs) -> Row | None:
    """Output tokens over those under `full`, of the problems that both have."""
    both = [item for item in mine if item in full]
    if not both:
        return None
    ours, theirs = (
        [sum(record.output_tokens for record in runs[item]) for item in both]
        for runs in (mine, full)
    )
    return asdict(ratio(ours, theirs)) if sum(theirs) else None


def _axes(plan: dict[str, Any], rows: Iterable[Row]) -> list[Row]:
    """Of each arm and budget, the mean of what its tasks solved, by axis; where all are there."""
    wanted: dict[str, int] = defaultdict(int)
    for task in plan["tasks"]:
        wanted[task["axis"]] += 1
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "solved" in row:
            found[row["budget"], row["arm"]][row["axis"]].append(row["solved"]["value"])
    return [
        {
            "budget": budget,
            "arm": arm,
            **{axis: fmean(v) for axis, v in values.items() if len(v) == wanted[axis]},
        }
        for (budget, arm), values in found.items()
    ]
